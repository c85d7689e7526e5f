"""No false alarm: honest engines on freshly certified fixtures, one set per seed.

Every seed gives one fixture of each family, none of which any budget rule was tuned on. Each
engine answers every prompt alone, together and in reverse; an answer outside the budget is a
false alarm. Engines differ from the oracle in what an honest implementation may choose:
dtype, threads, the order of every sum, tensor-parallel partial sums that are rounded before
they are added, compiled steps, other kernels.

    python benchmarks/false_alarms.py fill --out DIR [--seeds 20]
    python benchmarks/false_alarms.py judge --out DIR [--engine NAME]...
    python benchmarks/false_alarms.py table --out DIR
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from mone_ref import backends, experts, layer, loading, moe
from mone_ref.backend import Backend, LoadOptions, Scores, Session
from mone_ref.fill import fixture
from mone_ref.fill.recipe import Recipe, RecipeError
from mone_ref.fill.variants import STORAGE, permuted
from mone_ref.loading import Model
from mone_ref.model import attention, decoder, rope
from mone_ref.moe import MoeLayer
from mone_ref.precision import Precision
from mone_ref.suite import golden
from mone_ref.suite.compare import MULTIPLIER, compare

DTYPES = ("float32", "bfloat16", "float16")
Answer = Callable[[Sequence[Sequence[int]]], list[Scores]]

SIZES = {
    "vocab_size": 128,
    "hidden_size": 96,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_layers": 2,
    "prompts": [24, 16, 8],
}
RECIPES = {
    "olmoe": {
        "hidden_size": 128,
        "intermediate_size": 40,
        "num_experts": 8,
        "top_k": 2,
        "substitution": {"0": [1, 5], "1": [0, 2, 7]},
    },
    "qwen3_moe": {
        "intermediate_size": 24,
        "num_experts": 12,
        "top_k": 4,
        "substitution": {"0": [11, 0, 4, 2, 9, 7], "1": [8, 3, 10, 6, 1, 5]},
        "normalise": True,
        "head_dim": 32,
        "form": "explicit",
    },
    "mixtral": {
        "intermediate_size": 56,
        "num_experts": 7,
        "top_k": 3,
        "substitution": {"0": [6, 0, 3, 2], "1": [1, 5, 4]},
        "head_dim": 32,
    },
}
"""One shape a family. Four heads and these intermediate sizes divide among 1, 2 and 4 ranks."""


def recipe(family: str, seed: int) -> Recipe:
    """A fixture that no one has looked at."""
    name = f"{family.replace('_', '-')}-{seed}"
    sizes = SIZES | RECIPES[family]
    return Recipe(name=name, family=family, seed=seed, **sizes)  # type: ignore[arg-type]


# -- honest engines: how they load a checkpoint and answer prompts


def own(
    checkpoint: Path, dtype: str, *, threads: int = 1, order: int = 0, ranks: int = 1
) -> Answer:
    """The oracle in ``dtype``: on some threads, in a column order, as tensor-parallel ranks."""
    torch.set_num_threads(threads)
    model = loading.load(checkpoint, STORAGE[dtype])
    if order:
        model = Model(model.config, permuted(model, order), model.precision)

    def answer(prompts: Sequence[Sequence[int]]) -> list[Scores]:
        with tensor_parallel(model, ranks):
            return [Scores(scores) for scores in model.score(prompts)]

    return answer


@contextmanager
def tensor_parallel(model: Model, ranks: int) -> Iterator[None]:
    """Split attention outputs by heads and experts by intermediate columns.

    Each rank's partial is rounded to the dtype of activations before it is added to the sum
    of the ranks before it, as an all-reduce in that dtype does. Constants come from rank 0.
    """
    outputs = {one.attention.o.data_ptr() for one in model.weights.layers}
    product, retained = attention.product, moe.retained

    def row_parallel(x: Tensor, weight: Tensor, precision: Precision) -> Tensor:
        if weight.data_ptr() not in outputs:
            return product(x, weight, precision)
        parts = zip(x.chunk(ranks, dim=-1), weight.chunk(ranks, dim=-1), strict=True)
        return reduced([product(part, columns, precision) for part, columns in parts])

    def sharded(
        x: Tensor, weights: Tensor, ids: Tensor, whole: MoeLayer, precision: Precision
    ) -> Tensor:
        shards = [
            replace(whole, experts=layer.shard(whole.experts, (rank, ranks)))
            for rank in range(ranks)
        ]
        return reduced([retained(x, weights, ids, shard, precision) for shard in shards])

    with (
        mock.patch.object(attention, "product", row_parallel),
        mock.patch.object(moe, "retained", sharded),
    ):
        yield


def reduced(partials: Sequence[Tensor]) -> Tensor:
    """A sum over ranks that is rounded after every addition: ``[T, H]`` each."""
    total = partials[0]
    for part in partials[1:]:
        total = total + part
    return total


COMPILED = (
    (decoder, "rms_norm"),
    (attention, "rms_norm"),
    (rope, "rotate"),
    (attention, "causal_mix"),
    (experts, "mlp"),
)


def compiled(checkpoint: Path, dtype: str) -> Answer:
    """The oracle with everything between its products fused by ``torch.compile``."""
    model = loading.load(checkpoint, STORAGE[dtype])

    def answer(prompts: Sequence[Sequence[int]]) -> list[Scores]:
        with ExitStack() as stack:
            for module, name in COMPILED:
                stack.enter_context(mock.patch.object(module, name, fused(module, name)))
            return [Scores(scores) for scores in model.score(prompts)]

    return answer


FUSED: dict[tuple[str, str], Callable[..., Tensor]] = {}


def fused(module: object, name: str) -> Callable[..., Tensor]:
    """One compiled step, made once."""
    key = str(module), name
    if key not in FUSED:
        torch._dynamo.config.recompile_limit = 64  # one per dtype, rank and width
        FUSED[key] = torch.compile(getattr(module, name), dynamic=True)
    return FUSED[key]


def through(name: str, checkpoint: Path, dtype: str, **engine_args: str) -> Answer:
    """An engine through its adapter."""
    made = ADAPTERS.setdefault(name, backends.find(name))
    if name in OPEN:
        OPEN.pop(name).close()  # vLLM runs one engine in a process
    # Fixtures hold 64 positions, and an engine needs one behind the longest prompt.
    options = LoadOptions(dtype=dtype, max_tokens=48, engine_args=engine_args)
    OPEN[name] = made.load(checkpoint, options)
    return OPEN[name].score


ADAPTERS: dict[str, Backend] = {}
OPEN: dict[str, Session] = {}

ENGINES: Mapping[str, Callable[[Path, str], Answer]] = {
    "reference, 1 thread": own,
    "reference, 2 threads": partial(own, threads=2),
    "reference, other column order": partial(own, order=1000),
    "reference, tensor parallel 2": partial(own, ranks=2),
    "reference, tensor parallel 4": partial(own, ranks=4),
    "reference, compiled": compiled,
    "transformers, eager": partial(through, "transformers", experts_implementation="eager"),
    "transformers, batched_mm": partial(
        through, "transformers", experts_implementation="batched_mm"
    ),
    "transformers, grouped_mm": partial(
        through, "transformers", experts_implementation="grouped_mm"
    ),
    "vllm": partial(through, "vllm"),
}


# -- filling, judging, telling


def fill(out: Path, seeds: int) -> None:
    """Fill until every family has ``seeds`` fixtures; a seed without a certificate is passed by."""
    for family in RECIPES:
        filled, passed = 0, 0
        for seed in itertools.count(1001):
            if filled == seeds:
                break
            wanted = recipe(family, seed)
            try:
                if not (out / wanted.name).exists():
                    fixture.fill_pair(wanted, out)
                filled += 1
            except RecipeError:
                passed += 1
        print(f"{family}: {filled} seeds, {passed} passed by without a certificate", flush=True)


def judge(out: Path, names: Sequence[str]) -> None:
    """Append one line per engine, fixture and dtype to ``results.jsonl``."""
    places = sorted(path.parent for path in out.glob("*/recipe.yaml"))
    with (out / "results.jsonl").open("a", encoding="utf-8") as results:
        for name in names:
            for place in places:
                for dtype in DTYPES:
                    line = {"engine": name, "fixture": place.name, "dtype": dtype}
                    line |= measured(ENGINES[name], place, dtype)
                    results.write(json.dumps(line) + "\n")
            results.flush()
            print(f"judged {name}", flush=True)


def measured(engine: Callable[[Path, str], Answer], place: Path, dtype: str) -> dict[str, object]:
    """Worst ratio over all prompts in three orders, with how many were out of budget."""
    pinned = golden.read(place / "golden.safetensors")
    prompts = pinned.ids
    answer = engine(place / "checkpoint", dtype)
    orders = [
        [answer([prompt])[0] for prompt in prompts],
        answer(prompts),
        answer(prompts[::-1])[::-1],
    ]
    compared = [
        compare(scores, prompt, dtype)
        for answers in orders
        for scores, prompt in zip(answers, pinned.prompts, strict=True)
    ]
    return {
        "answers": len(compared),
        "tokens": sum(len(prompt) for prompt in prompts) * len(orders),
        "alarms": sum(bool(one.flaw) for one in compared),
        "ratio": max(one.ratio for one in compared),
    }


def table(out: Path) -> None:
    """Markdown: per engine and dtype, false alarms of answers, and the worst ratio."""
    lines = (out / "results.jsonl").read_text(encoding="utf-8").splitlines()
    newest = {(r["engine"], r["fixture"], r["dtype"]): r for r in map(json.loads, lines)}
    print(f"| engine | {' | '.join(DTYPES)} |\n|---|---|---|---|")
    for name in ENGINES:
        cells = [cell([newest[key] for key in newest if key[::2] == (name, d)]) for d in DTYPES]
        print(f"| {name} | {' | '.join(cells)} |")
    tokens = sum(result["tokens"] for result in newest.values())
    fixtures = len({fixture for _, fixture, _ in newest})
    print(f"\n{fixtures} fixtures, {tokens} tokens judged; limit {MULTIPLIER:g}")


def cell(results: Sequence[Mapping[str, float]]) -> str:
    """``alarms of answers (worst ratio)``."""
    if not results:
        return "not run"
    alarms, answers = (sum(int(r[key]) for r in results) for key in ("alarms", "answers"))
    return f"{alarms} of {answers} ({max(r['ratio'] for r in results):.2f})"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("step", choices=("fill", "judge", "table"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--engine", action="append", choices=list(ENGINES))
    given = parser.parse_args()
    if given.step == "fill":
        fill(given.out, given.seeds)
    elif given.step == "judge":
        judge(given.out, given.engine or list(ENGINES))
    else:
        table(given.out)


if __name__ == "__main__":
    main()
