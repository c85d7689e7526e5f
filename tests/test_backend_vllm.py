"""The vLLM adapter: its pure parts everywhere, the live engine where vLLM is installed.

Tests marked ``vllm`` need the environment of ``conformance/engines/setup-vllm.sh``; there,
run ``pytest -m vllm tests/test_backend_vllm.py``.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mone_ref.backend import LoadOptions, Scores, Unavailable
from mone_ref.backends import process
from mone_ref.backends import vllm as adapter
from mone_ref.backends.vllm import VllmBackend, VllmSession
from mone_ref.suite import capture, cases, edits, errormap
from mone_ref.suite.attempt import Engine
from mone_ref.suite.bench import Options
from mone_ref.suite.guard import Guard
from mone_ref.suite.outcomes import Outcome
from mone_ref.suite.runner import Harness

ROOT = Path(__file__).resolve().parent.parent
ERROR_MAP = errormap.load(ROOT / "conformance" / "error_maps" / "vllm.toml")


def options(dtype: str = "float32", **more: Any) -> LoadOptions:
    return LoadOptions(dtype=dtype, max_tokens=16, max_prompts=4, **more)


# -- everywhere


@dataclass
class Flat:
    """What vLLM's ``FlatLogprobs`` offers."""

    start_indices: list[int]
    end_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]


def test_scores_align_each_position_with_the_token_before_it() -> None:
    # Two prompt tokens, three ids. vLLM lists the token itself first, then all by rank.
    prompt = Flat([0, 0], [0, 4], [1, 2, 0, 1], [-1.5, -0.5, -1.25, -1.5])
    generated = Flat([0], [4], [0, 0, 2, 1], [-0.25, -0.25, -2.0, -3.0])
    found = adapter.scores(prompt, generated, vocab=3)
    assert found.tolist() == [[-1.25, -1.5, -0.5], [-0.25, -3.0, -2.0]]


def test_an_id_that_vllm_does_not_report_is_nan() -> None:
    prompt = Flat([0, 0], [0, 1], [1], [-1.5])
    generated = Flat([0], [3], [0, 1, 2], [-1.0, -1.0, -1.0])
    found = adapter.scores(prompt, generated, vocab=3)
    assert found.isnan().tolist() == [[True, False, True], [False, False, False]]


def test_user_arguments_win() -> None:
    chosen = options(engine_args={"enforce_eager": False, "seed": 7})
    found = adapter.engine_arguments(Path("checkpoint"), chosen, cuda=False)
    assert (found["enforce_eager"], found["seed"], found["model"]) == (False, 7, "checkpoint")


def test_one_token_more_than_is_scored_fits_the_engine() -> None:
    found = adapter.engine_arguments(Path("checkpoint"), options(), cuda=False)
    assert (found["max_model_len"], found["max_num_seqs"]) == (17, 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_features_become_engine_arguments(dtype: str) -> None:
    asked = options(dtype, features=frozenset({"lora", "quantized_experts"}))
    found = adapter.engine_arguments(Path("checkpoint"), asked, cuda=True)
    assert (found["enable_lora"], found["quantization"]) == (True, "fp8")
    # fp8 has no float32 form in vLLM.
    assert found["dtype"] == {"float32": "bfloat16"}.get(dtype, dtype)


def test_another_device_than_vllm_has_is_an_error() -> None:
    with pytest.raises(ValueError, match="vLLM runs on cpu here, not on cuda"):
        adapter.engine_arguments(Path("checkpoint"), options(device="cuda"), cuda=False)


def test_float32_is_tf32_on_a_gpu_only() -> None:
    found = [adapter.compute_types(cuda)["float32"] for cuda in (True, False)]
    assert found == ["tf32", "float32"]


def test_without_vllm_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"setup-vllm\.sh"):
        VllmBackend()


def test_importing_the_adapter_does_not_import_vllm() -> None:
    code = "import sys, mone_ref.backends.vllm; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


INVALID = "ValueError: approximate_experts has an invalid entry for layer"
UNSUPPORTED = "NotImplementedError: expert substitution does not support"
VALUES = "model.layers.0.mlp.experts.routed_experts.expert_substitution.values"

# As printed by vLLM 0.33.0; what a tiny checkpoint provokes is tested on the live engine below.
MESSAGES = [
    (
        f"{UNSUPPORTED}: expert parallelism, data parallelism",
        "UNSUPPORTED/feature",
    ),
    (
        "NotImplementedError: expert substitution requires the default RoutedExperts and no "
        "routed input or output transforms",
        "UNSUPPORTED/feature",
    ),
    (f"{UNSUPPORTED} deferred MoE finalize", "UNSUPPORTED/feature"),
    (f"{UNSUPPORTED} layerwise weight reload", "UNSUPPORTED/layerwise-reload"),
    (
        f"{INVALID} '0'\nbuiltins.TypeError: int() argument must be a string, a bytes-like object "
        "or a real number, not 'NoneType'",
        "SUBSTITUTION/id-type",
    ),
    (
        f"{INVALID} '0'\nbuiltins.ValueError: invalid literal for int() with base 10: '0.5'",
        "SUBSTITUTION/id-type",
    ),
    (
        f"{INVALID} '0.5'\nbuiltins.ValueError: invalid literal for int() with base 10: '0.5'",
        "SUBSTITUTION/layer-key",
    ),
    (
        f"ValueError: {VALUES} is missing approx_value for 9 expert(s), first missing expert IDs: "
        "[0, 1, 2, 3, 4, 5, 6, 7]",
        "MISSING_CONSTANT/absent",
    ),
    # Failures that are no refusal of anything.
    ("AttributeError: 'NoneType' object has no attribute 'is_monolithic'", None),
    ("AssertionError: pipeline model parallel group is not initialized", None),
    ("RuntimeError: The size of tensor a (40) must match the size of tensor b (44)", None),
]


@pytest.mark.parametrize(("message", "code"), MESSAGES)
def test_error_map_reads_the_messages(message: str, code: str | None) -> None:
    assert ERROR_MAP.find(message) == code


# -- with vLLM

vllm = pytest.mark.vllm
Open = Callable[..., AbstractContextManager[VllmSession]]


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmBackend]:
    backend = VllmBackend()
    yield backend
    backend.close()


@pytest.fixture
def opened(engine: VllmBackend) -> Open:
    @contextmanager
    def opening(checkpoint: Path, **more: Any) -> Iterator[VllmSession]:
        session = engine.load(checkpoint, options(**more))
        assert isinstance(session, VllmSession)
        try:
            yield session
        finally:
            session.close()

    return opening


def refusal(opened: Open, directory: Path) -> BaseException:
    with pytest.raises(Exception) as raised, opened(directory):  # noqa: PT011
        pass
    return raised.value


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [3, 5, 8, 9, 7, 9]]


def equal(one: list[Scores], other: list[Scores]) -> bool:
    return all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(one, other, strict=True))


def log_softmax_bound(logprobs: torch.Tensor) -> float:
    """How far the probabilities of a float32 ``log_softmax`` ``[T, V]`` may add up beside 1.

    With ``m = max |logprob|``, no step holds a larger number: the difference from the
    largest logit errs by ``u m``, in the sum and in the answer; the ``V`` exponentials and
    their sum by ``(V + 1) u`` of it; the logarithm by ``2 u m``, the answer's own rounding
    by ``u m``. ``m`` is at least ``log V``, which is more than 1.
    """
    terms = logprobs.shape[1] + 6 * float(logprobs.abs().max())
    return terms * 2.0**-24 / (1 - terms * 2.0**-24)


@vllm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scores_do_not_depend_on_the_batch(approx: Path, opened: Open, dtype: str) -> None:
    with opened(approx, dtype=dtype) as session:
        together = session.score(PROMPTS)
        alone = [session.score([prompt])[0] for prompt in PROMPTS]
        backwards = session.score(PROMPTS[::-1])[::-1]
    assert [tuple(scores.logprobs.shape) for scores in together] == [(8, 128), (1, 128), (6, 128)]
    for scores in together:
        # Every row is a distribution, up to the rounding of a float32 log_softmax.
        total = scores.logprobs.double().exp().sum(dim=1)
        bound = log_softmax_bound(scores.logprobs)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=bound)
    assert equal(together, alone)
    assert equal(together, backwards)


@vllm
def test_a_failed_load_leaves_nothing_behind(approx: Path, opened: Open) -> None:
    broken = [{"remove_tensor": "model.layers.1.mlp.experts.2.approx_value"}]

    def answers() -> tuple[list[Scores], int]:
        with opened(approx) as session:
            found = session.score(PROMPTS)
        return found, len(os.listdir("/proc/self/fd"))

    before, files = answers()
    kept = []  # the exceptions outlive the next load, as they do in a report
    for _ in range(3):
        with edits.edited(approx, broken) as directory:
            kept.append(refusal(opened, directory))
    after, files_after = answers()
    assert equal(before, after)
    assert files == files_after
    assert all("first missing expert IDs: [2]" in str(error) for error in kept)


@vllm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_weight_that_was_never_loaded_is_nan(
    approx: Path, opened: Open, engine: VllmBackend, dtype: str
) -> None:
    judged = Engine(engine, Guard(ERROR_MAP, 120.0))
    # An engine before leaves right weights in the memory that the broken one is given.
    with opened(approx, dtype=dtype) as session:
        right = session.score(PROMPTS)
    never = [{"remove_tensor": "model.layers.1.mlp.experts.6.up_proj.weight"}]
    for _ in range(2):
        with (
            edits.edited(approx, never) as directory,
            judged.open(directory, options(dtype)) as broken,
        ):
            assert isinstance(broken.session, VllmSession)
            found = broken.session.score(PROMPTS)
        # The last layer: tokens that are not routed to the expert keep their answers.
        lost = torch.cat([scores.logprobs.isnan().any(dim=1) for scores in found])
        assert 0 < lost.sum() < len(lost)
        pairs = [(a.logprobs, b.logprobs) for a, b in zip(found, right, strict=True)]
        one, other = (torch.cat(side)[~lost] for side in zip(*pairs, strict=True))
        assert torch.equal(one, other)


@vllm
def test_two_sessions_at_a_time_are_refused(
    approx: Path, opened: Open, engine: VllmBackend
) -> None:
    with opened(approx) as session:
        with pytest.raises(RuntimeError, match="close the previous session first"):
            engine.load(approx, options())
        assert len(session.score(PROMPTS)) == 3


@vllm
def test_rows_are_those_of_the_substituted_class(
    approx: Path, fixtures: Path, opened: Open
) -> None:
    with opened(approx) as session:
        rows = session.expert_rows()
        kinds = session._llm.apply_model(
            lambda model: [
                type(module).__name__ for module in model.modules() if hasattr(module, "w13_weight")
            ]
        )
    # 8 experts a layer, of which {1, 5} and {0, 2, 7} are substituted.
    assert rows == {0: 6, 1: 5}
    assert kinds == [["SubstitutedRoutedExperts"] * 2]
    with opened(fixtures / "olmoe-approx-plain" / "checkpoint") as session:
        assert session.expert_rows() == {0: 8, 1: 8}


@vllm
def test_update_and_back(approx: Path, opened: Open) -> None:
    name = "model.layers.1.mlp.experts.2.approx_value"
    stored = load_file(approx / "model.safetensors")[name]
    with opened(approx) as session:
        before = session.score(PROMPTS)
        session.update({name: stored + 1})
        changed = session.score(PROMPTS)
        session.update({name: stored})
        after = session.score(PROMPTS)
    assert not equal(before, changed)
    assert equal(before, after)


@vllm
def test_refused_reload_changes_nothing(approx: Path, fixtures: Path, opened: Open) -> None:
    with opened(approx) as session:
        before = session.score(PROMPTS)
        with pytest.raises(NotImplementedError) as raised:
            session.reload(fixtures / "olmoe-updated" / "checkpoint")
        assert equal(before, session.score(PROMPTS))
    assert ERROR_MAP.find(capture.chain(raised.value)) == "UNSUPPORTED/layerwise-reload"


def listed(ids: Any, key: str = "0") -> dict[str, Any]:
    return {"set_config": {"path": ["approximate_experts", key], "value": ids}}


FIRST = "model.layers.0.mlp.experts.1.approx_value"
REFUSALS = [
    ({"set_config": {"path": ["approximate_experts"], "value": [[1, 5]]}}, "not-a-mapping"),
    (listed(5), "not-a-list"),
    (listed([1, 5, 5]), "id-duplicate"),
    (listed([-1, 5]), "id-range"),
    (listed([1, 5, 8]), "id-range"),
    (listed(["a", 5]), "id-type"),
    (listed([None, 5]), "id-type"),
    (listed([1], key="one"), "layer-key"),
    (listed([0, 1, 2, 3, 4, 5, 6, 7]), "all-substituted"),
    (
        {
            "set_config": {
                "path": ["compression_config"],
                "value": {"transform_config": {"expert_substitution": {"version": 1}}},
            }
        },
        "both-forms",
    ),
    ({"remove_tensor": FIRST}, "MISSING_CONSTANT/absent"),
    ({"poison": {"tensor": FIRST, "index": 0, "value": "nan"}}, "MISSING_CONSTANT/absent"),
    ({"reshape": {"tensor": FIRST, "shape": [1, "H"]}}, "CONSTANT_SHAPE/shape"),
    (
        {"copy_tensor": {"from": FIRST, "to": FIRST.replace("1.approx", "2.approx")}},
        "UNLISTED_CONSTANT/retained",
    ),
    ({"remove_tensor": "model.norm.weight"}, "MODEL_WEIGHTS/missing"),
    (
        {"replace_tensor": {"name": "model.norm.weight", "shape": ["H+1"], "fill": 1}},
        "MODEL_WEIGHTS/shape",
    ),
    (
        {"copy_tensor": {"from": FIRST, "to": FIRST.replace("layers.0", "layers.9")}},
        "MODEL_WEIGHTS/unknown",
    ),
    ({"replace_config_text": {"find": r"\}\s*\Z", "replace": ""}}, "CONFIG_JSON/syntax"),
]


@vllm
@pytest.mark.parametrize(("edit", "code"), REFUSALS)
def test_live_refusals(approx: Path, opened: Open, edit: dict[str, Any], code: str) -> None:
    with edits.edited(approx, [edit]) as directory:
        error = refusal(opened, directory)
    found = ERROR_MAP.find(capture.chain(error))
    assert found == (code if "/" in code else f"SUBSTITUTION/{code}")


@vllm
@pytest.mark.parametrize(
    ("edit_file", "code"),
    [
        (lambda directory: (directory / "config.json").unlink(), "CHECKPOINT/no-config"),
        (lambda directory: (directory / "model.safetensors").unlink(), "CHECKPOINT/no-weights"),
        (
            lambda directory: (directory / "model.safetensors").write_bytes(b"\xff" * 99),
            "CHECKPOINT/header",
        ),
        (
            lambda directory: os.truncate(directory / "model.safetensors", 100_000),
            "CHECKPOINT/truncated",
        ),
    ],
)
def test_live_refusals_of_files(
    approx: Path, tmp_path: Path, opened: Open, edit_file: Callable[[Path], Any], code: str
) -> None:
    for file in approx.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_file(tmp_path)
    assert ERROR_MAP.find(capture.chain(refusal(opened, tmp_path))) == code


@vllm
def test_every_feature_is_refused_by_name(approx: Path, engine: VllmBackend) -> None:
    for feature in sorted(engine.describe().features):
        with pytest.raises(NotImplementedError) as raised:
            engine.load(approx, options(features=frozenset({feature})))
        assert ERROR_MAP.find(capture.chain(raised.value)) == "UNSUPPORTED/feature"


@vllm
def test_layers_and_engines_take_turns(approx: Path, opened: Open, engine: VllmBackend) -> None:
    recipe = next(case for case in cases.load(ROOT) if case.id == "layer/ranks-mixed").layer.recipe
    x = torch.arange(64.0).reshape(2, 32) / 64

    def layers() -> torch.Tensor:
        # Fresh ones each time: vLLM rewrites them in place.
        routes = torch.tensor([[0.5, 0.25], [0.25, 0.5]]), torch.tensor([[1, 2], [0, 6]])
        ranks = [recipe.spec("float32", (rank, 2), False) for rank in range(2)]
        built = [engine.build_layer(spec, recipe.build()) for spec in ranks]
        return torch.stack(
            [one.forward_routed(x.clone(), *(part.clone() for part in routes)) for one in built]
        )

    def answers() -> list[Scores]:
        with opened(approx) as session:
            with pytest.raises(RuntimeError, match="close the previous session first"):
                engine.build_layer(recipe.spec("float32", (0, 1), False), recipe.build())
            return session.score(PROMPTS)

    first, before = layers(), answers()
    assert torch.equal(layers(), first)
    assert equal(answers(), before)


@vllm
def test_at_odd_hidden_sizes_only_the_substitution_is_built(engine: VllmBackend) -> None:
    recipe = next(
        case for case in cases.load(ROOT) if case.id == "layer/output-of-hidden-7"
    ).layer.recipe
    built = engine.build_layer(recipe.spec("float32", (0, 1), False), recipe.build())
    weights, ids, constants = built.rewrite_routes(
        torch.tensor([[0.5, 0.25]]), torch.tensor([[0, 1]])
    )
    assert (weights.tolist(), ids.tolist()) == ([[0.5, 0]], [[0, 0]])
    stored = recipe.build()[f"{recipe.path}.1.approx_value"]
    assert torch.equal(constants, 0.25 * stored[None])
    with pytest.raises(Unavailable, match="that 32 divides, not 7"):
        built.forward_routed(torch.zeros(1, 7), weights, ids)


@vllm
def test_an_isolated_vllm_is_judged_as_it_is_in_process() -> None:
    by_id = {case.id: case for case in cases.load(ROOT)}
    engine = process.isolated("vllm")
    judge = Harness(engine, engine.describe(), ROOT, Options(error_map=ERROR_MAP))
    expected = {
        "outputs/olmoe-approx": ("ok", ()),
        "decode/olmoe-approx": ("ok", ()),
        "load/missing-constant": ("ok", ("MISSING_CONSTANT/absent",)),
        "load/constant-infinite": ("wrongly-accepted", ()),
        "layer/routes": ("ok", ()),
        "update/single-constants": ("ok", ()),
    }
    results = {name: judge.run(by_id[name], "float32") for name in expected}
    found = {name: (str(one.outcome), one.codes) for name, one in results.items()}
    assert found == expected
    assert judge.close() is None


@vllm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["decode/olmoe-approx", "decode/qwen3-approx"])
def test_decoding_conforms(engine: VllmBackend, name: str, dtype: str) -> None:
    judge = Harness(engine, engine.describe(), ROOT, Options(error_map=ERROR_MAP))
    case = next(case for case in cases.load(ROOT) if case.id == name)
    result = judge.run(case, dtype)
    assert result.outcome is Outcome.OK, result.found
    assert result.numbers is not None


@vllm
def test_tokens_that_end_a_text_end_nothing(opened: Open, approx: Path) -> None:
    with opened(approx) as session:
        (made,) = session.generate([[3, 1, 4]], 8)
        (scored,) = session.score([[3, 1, 4, *made.tokens]])
    assert made.scores.logprobs.shape == (8, 128)
    assert list(made.tokens) == made.scores.logprobs.argmax(dim=1).tolist()
    # One token at a time, or all at once: other kernels, the same float32 distributions.
    rows = scored.logprobs[2:-1]
    assert (made.scores.logprobs - rows).abs().max() < 100 * 128 * 2.0**-24
