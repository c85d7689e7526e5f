"""Outputs of the checkpoint tools, loaded where they are meant to be loaded, and asked.

Pruned models in stock transformers and in vLLM, substituted ones in vLLM, in the transformers
loader and in the oracle. Budgets are derived from each output by the number rule. The oracle of a
pruned model is itself held against the model it was cut from: transformers' own routers, with the
logits of the dropped experts at minus infinity.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import rewritten
import torch
import transformers
import transformers_witness as witness
from rewritten import SUBJECTS, Subject
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import mone_ref
from mone_ref.backend import LoadOptions, Scores
from mone_ref.backends.vllm import VllmBackend, VllmSession
from mone_ref.fill import certificate
from mone_ref.integrations import transformers as integration
from mone_ref.rewrite.plan import Form
from mone_ref.suite.compare import compare
from mone_ref.suite.golden import Golden

transformers.utils.logging.disable_progress_bar()


@dataclass(frozen=True)
class Output:
    """What a tool wrote, what it was made of, and the right answers to prompts of its own."""

    subject: Subject
    source: Path
    directory: Path
    golden: Golden

    def flaws(self, answers: list[Tensor], compute_type: str) -> list[str]:
        """What is wrong with log-probabilities ``[T, V]`` of each prompt; empty if nothing."""
        assert len(answers) == len(self.golden.prompts)
        pairs = zip(answers, self.golden.prompts, strict=True)
        compared = [compare(Scores(answer), prompt, compute_type) for answer, prompt in pairs]
        return [one.flaw for one in compared if one.flaw]


@pytest.fixture(scope="module", params=SUBJECTS)
def pruned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Output:
    subject, place = SUBJECTS[request.param], tmp_path_factory.mktemp("pruned")
    source = rewritten.source(subject, place)
    out = rewritten.pruned(subject, source, place / "out")
    return Output(subject, source, out, rewritten.right(subject, out, place / "golden.safetensors"))


SUBSTITUTED = [(name, form) for name in SUBJECTS for form in Form]


@pytest.fixture(scope="module", params=SUBSTITUTED, ids=lambda one: f"{one[0]}-{one[1]}")
def substituted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Output:
    name, form = request.param
    subject, place = SUBJECTS[name], tmp_path_factory.mktemp("substituted")
    source = rewritten.source(subject, place)
    out = rewritten.substituted(subject, source, form, place / "out")
    return Output(subject, source, out, rewritten.right(subject, out, place / "golden.safetensors"))


def score(model: Any, prompts: list[list[int]]) -> list[Tensor]:
    return [witness.score(model, prompt) for prompt in prompts]


def stock(directory: Path) -> tuple[Any, dict[str, Any]]:
    """A model of transformers' own classes in float32, and what its loader has to say."""
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
    )
    assert type(model).__module__.startswith("transformers.models.")
    return model.eval(), told


# -- pruned models


def test_a_pruned_model_loads_in_stock_transformers_and_answers_as_the_oracle(
    pruned: Output,
) -> None:
    model, told = stock(pruned.directory)
    assert {key: found for key, found in told.items() if found} == {}
    experts = {module.num_experts for module in routers(model).values()}
    assert experts == {pruned.subject.recipe.num_experts - len(next(iter(gone(pruned))))}
    assert pruned.flaws(score(model, pruned.golden.ids), "float32") == []
    made = model.generate(torch.tensor([pruned.golden.ids[0]]), max_new_tokens=3, do_sample=False)
    assert made.shape[1] > len(pruned.golden.ids[0])


def gone(output: Output) -> list[tuple[int, ...]]:
    return [tuple(ids) for ids in output.subject.gone.values()]


def test_its_oracle_is_the_original_with_the_dropped_experts_masked(pruned: Output) -> None:
    """Softmax over the kept experts is softmax of masked logits, and a sigmoid looks at one."""
    model, _ = stock(pruned.source)
    mask(model, pruned.subject, pruned.subject.gone)
    assert pruned.flaws(score(model, pruned.golden.ids), "float32") == []


def test_another_mask_is_seen(pruned: Output) -> None:
    """The same number of experts, each one id further: agreement above is no accident."""
    count = pruned.subject.recipe.num_experts
    shifted = {
        layer: tuple((expert + 1) % count for expert in ids)
        for layer, ids in pruned.subject.gone.items()
    }
    model, _ = stock(pruned.source)
    mask(model, pruned.subject, shifted)
    assert len(pruned.flaws(score(model, pruned.golden.ids), "float32")) == len(rewritten.PROMPTS)


def routers(model: nn.Module) -> dict[int, Any]:
    """Layer -> transformers' router module."""
    return {
        int(re.findall(r"\.(\d+)\.", name)[0]): module
        for name, module in model.named_modules()
        if type(module).__name__.lower().endswith("topkrouter")
    }


def mask(model: nn.Module, subject: Subject, dropped: Any) -> None:
    """Let every router work on logits in which dropped experts are at minus infinity."""
    found = routers(model)
    assert found.keys() == dropped.keys()
    for layer, router in found.items():
        ids = torch.tensor(dropped[layer])
        router.top_k = subject.top_k or router.top_k
        router.forward = masked(router.forward, ids)
        if hasattr(router, "e_score_correction_bias"):
            router.e_score_correction_bias[ids] = -torch.inf


def masked(forward: Any, dropped: Tensor) -> Any:
    """A router's ``forward`` whose one product is masked; all else is transformers'."""
    linear = nn.functional.linear

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight).index_fill(-1, dropped, -torch.inf)  # [T, E]

    def run(hidden_states: Tensor) -> Any:
        with mock.patch.object(nn.functional, "linear", product):
            return forward(hidden_states)

    return run


# -- the two bugs that the authors of a pruner met only by loading its output


def test_every_shard_says_format_pt(pruned: Output) -> None:
    files = list(pruned.directory.glob("*.safetensors"))
    assert files
    for path in files:
        with safe_open(path, framework="pt") as file:
            assert file.metadata()["format"] == "pt"


def test_a_router_under_a_documented_name_that_is_not_the_stored_one_would_show(
    pruned: Output, tmp_path: Path
) -> None:
    """The router was cut under the name in the files; under another nothing reads it."""
    tensors: dict[str, Tensor] = {}
    for path in pruned.directory.glob("*.safetensors"):
        tensors |= load_file(path)
    name, *others = [one for one in tensors if re.search(r"\.gate\.weight$", one)]
    assert len(others) + 1 == len(pruned.subject.gone)
    assert len(tensors[name]) == pruned.subject.recipe.num_experts - len(gone(pruned)[0])
    tensors[name.replace(".gate.", ".router.")] = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((pruned.directory / "config.json").read_bytes())
    _, told = stock(tmp_path)
    assert len(told["missing_keys"]) == len(told["unexpected_keys"]) == 1


# -- substituted models


def test_a_substituted_model_answers_alike_in_a_plain_wiring_and_in_the_loader(
    substituted: Output,
) -> None:
    """The witness reads config and constants by itself: it stands for the oracle's right."""
    directory, prompts = substituted.directory, substituted.golden.ids
    seen = witness.load(directory, torch.float32)
    assert substituted.flaws(score(seen, prompts), "float32") == []
    loaded = integration.load(directory, "float32")
    assert substituted.flaws(score(loaded, prompts), "float32") == []
    counts = certificate.coverage(mone_ref.load(directory, torch.float64), prompts)
    assert counts["some"] + counts["all"] > 0


def test_both_forms_give_the_oracle_one_model(substituted: Output, tmp_path: Path) -> None:
    other = next(form for form in Form if form != form_of(substituted.directory))
    again = rewritten.substituted(substituted.subject, substituted.source, other, tmp_path / "out")
    assert form_of(again) == other
    answers = mone_ref.load(again, torch.float64).score(substituted.golden.ids)
    for answer, prompt in zip(answers, substituted.golden.prompts, strict=True):
        assert torch.equal(answer, prompt.logprobs)


def form_of(directory: Path) -> Form:
    document = json.loads((directory / "config.json").read_text())
    return Form.APPROX if "approximate_experts" in document else Form.EXPLICIT


# -- vLLM


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmBackend]:
    backend = VllmBackend()
    yield backend
    backend.close()


def ask(engine: VllmBackend, output: Output) -> tuple[list[Tensor], dict[int, int]]:
    """Log-probabilities of every prompt, and the expert rows that were allocated."""
    limits = {"max_tokens": max(rewritten.PROMPTS), "max_prompts": len(rewritten.PROMPTS)}
    session = engine.load(output.directory, LoadOptions(output.subject.compute_type, **limits))
    assert isinstance(session, VllmSession)
    try:
        answers = session.score(output.golden.ids)
        return [answer.logprobs for answer in answers], session.expert_rows()
    finally:
        session.close()


def left(output: Output) -> dict[int, int]:
    experts = output.subject.recipe.num_experts
    return {layer: experts - len(ids) for layer, ids in output.subject.gone.items()}


@pytest.mark.vllm
def test_a_pruned_model_answers_in_vllm_as_the_oracle(pruned: Output, engine: VllmBackend) -> None:
    answers, rows = ask(engine, pruned)
    assert rows == left(pruned)
    assert pruned.flaws(answers, pruned.subject.compute_type) == []


@pytest.mark.vllm
def test_a_substituted_model_answers_in_vllm_as_the_oracle(
    substituted: Output, engine: VllmBackend
) -> None:
    answers, rows = ask(engine, substituted)
    assert rows == left(substituted)
    assert substituted.flaws(answers, substituted.subject.compute_type) == []
