"""One MoE layer of OLMoE's sizes: the grouped backend beside the experts of transformers.

Every implementation gets the same weights, inputs and routes, which hit all experts evenly. Half:
every other expert is a constant, so that half of the routes meet one. Before anything is timed,
every answer must lie within three times the error of the oracle in the same dtype, token by token,
both taken against float64. Then implementations take turns in every repetition.

Columns, in milliseconds: the best and the median of the time that passed, and the median of the
CPU time of all threads, which other programs on the machine disturb least (with --threads 1; more
threads also count waiting for each other). Ratios: the least of transformers' by the same column.

    python benchmarks/moe_layer.py [--threads 2] [--repeats 15] [--quick]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version

import torch
from torch import Tensor
from transformers import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from mone_ref import moe
from mone_ref.backends import grouped_experts
from mone_ref.config import LayerSubstitution
from mone_ref.experts import ExpertWeights
from mone_ref.families import RouterRule
from mone_ref.moe import MoeLayer
from mone_ref.precision import plain

THEIRS = ("eager", "batched_mm", "grouped_mm")
DTYPES = (torch.float32, torch.bfloat16)
TOKENS = (1, 32, 512)
COPY_LIMIT = 2**31  # bytes of weights that batched_mm may copy, one expert for every route
CHECKED = 8  # tokens whose answers are compared
MULTIPLIER = 3  # of the number rule (SPEC.md, Numbers)

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer; the default is OLMoE-1B-7B."""

    hidden: int = 2048
    inner: int = 1024
    experts: int = 64
    top_k: int = 8


@dataclass(frozen=True)
class Given:
    """What every implementation is asked: ``x`` ``[T, H]``, ``weights`` and ``ids`` ``[T, K]``."""

    x: Tensor
    weights: Tensor
    ids: Tensor

    def first(self, tokens: int) -> Given:
        return Given(self.x[:tokens], self.weights[:tokens], self.ids[:tokens])


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="small sizes, one repetition")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes = Sizes(64, 32, 16, 4) if options.quick else Sizes()
    print(f"torch {torch.__version__}, transformers {version('transformers')}")
    print(f"{sizes}, {options.threads} threads, load average {os.getloadavg()[0]:.1f}\n")
    print("| dtype | tokens | implementation | best | median | CPU | ratios |")
    print("|---|---|---|---|---|---|---|")
    for dtype in DTYPES:
        measure(sizes, dtype, 1 if options.quick else options.repeats)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\npeak memory of the process {peak:.1f} GiB, load average {os.getloadavg()[0]:.1f}")


@torch.inference_mode()
def measure(sizes: Sizes, dtype: torch.dtype, repeats: int) -> None:
    """Print the rows of one dtype."""
    torch.manual_seed(0)
    dense = grouped_experts.build(made(sizes, dtype))
    half = grouped_experts.build(substituted(dense.layer))
    modules = {name: theirs(sizes, dense, name) for name in THEIRS}
    copied = dense.gate_up[0].nbytes + dense.down[0].nbytes  # for one route
    for tokens in TOKENS:
        given = evenly_routed(sizes, dtype, tokens)

        def asked(module: OlmoeExperts, given: Given = given) -> Call:
            return lambda: module(given.x, given.ids, given.weights)

        def ours(layer: grouped_experts.GroupedLayer, given: Given = given) -> Call:
            return lambda: grouped_experts.forward_routed(given.x, given.weights, given.ids, layer)

        calls = {f"transformers {name}": asked(module) for name, module in modules.items()}
        if tokens * sizes.top_k * copied > COPY_LIMIT:
            del calls["transformers batched_mm"]
        calls |= {"grouped": ours(dense), "grouped, half": ours(half)}
        for name, call in calls.items():
            check(name, call(), given, half.layer if name == "grouped, half" else dense.layer)
        show(dtype, tokens, take_turns(calls, repeats))


def made(sizes: Sizes, dtype: torch.dtype) -> MoeLayer:
    """A layer without substitution, outputs about as large as inputs."""

    def matrices(out: int, columns: int) -> Tensor:
        return torch.randn(sizes.experts, out, columns).mul_(columns**-0.5).to(dtype)

    return MoeLayer(
        router=torch.empty(0, sizes.hidden),
        experts=ExpertWeights(
            gate=matrices(sizes.inner, sizes.hidden),
            up=matrices(sizes.inner, sizes.hidden),
            down=matrices(sizes.hidden, sizes.inner),
        ),
        constants=torch.empty(0, sizes.hidden, dtype=dtype),
        substitution=LayerSubstitution(0, sizes.experts, (), {}),
        rule=RouterRule("softmax", False),
        top_k=sizes.top_k,
    )


def substituted(layer: MoeLayer) -> MoeLayer:
    """The layer with every odd expert a constant."""
    count, hidden = layer.substitution.num_logical, layer.constants.shape[1]
    odd = tuple(range(1, count, 2))
    weights = layer.experts
    return replace(
        layer,
        experts=ExpertWeights(weights.gate[::2], weights.up[::2], weights.down[::2]),
        constants=torch.randn(len(odd), hidden).to(layer.constants.dtype),
        substitution=LayerSubstitution(0, count, odd, {expert: str(expert) for expert in odd}),
    )


def theirs(sizes: Sizes, dense: grouped_experts.GroupedLayer, name: str) -> OlmoeExperts:
    """The experts of transformers' OLMoE on the very same memory."""
    config = OlmoeConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
    )
    config._experts_implementation = name
    with torch.device("meta"):
        module = OlmoeExperts(config)
    stacks = {"gate_up_proj": dense.gate_up, "down_proj": dense.down}
    module.load_state_dict(stacks, assign=True)
    return module


def evenly_routed(sizes: Sizes, dtype: torch.dtype, tokens: int) -> Given:
    """Inputs, and routes in which every expert comes equally often, odd ones in every token."""
    ids = torch.arange(tokens * sizes.top_k) % sizes.experts  # [T * K]
    return Given(
        x=torch.randn(tokens, sizes.hidden).to(dtype),
        weights=torch.rand(tokens, sizes.top_k).softmax(dim=1).to(dtype),
        ids=ids.view(tokens, sizes.top_k)[torch.randperm(tokens)],
    )


def check(name: str, answer: Tensor, given: Given, layer: MoeLayer) -> None:
    """Hold an answer ``[T, H]`` against the oracle. Raises ``SystemExit``."""
    few = given.first(CHECKED)
    exact = by_oracle(few, layer, torch.float64)  # [T, H]
    honest = rms(by_oracle(few, layer, given.x.dtype) - exact)  # [T]
    unit = torch.finfo(given.x.dtype).eps / 2 * rms(exact)  # [T]
    allowed = MULTIPLIER * honest.maximum(honest.median()).maximum(unit)  # [T]
    error = rms(answer[:CHECKED] - exact)  # [T]
    if not (error <= allowed).all():
        raise SystemExit(f"{name}: error {error.tolist()}, allowed {allowed.tolist()}")


def by_oracle(given: Given, layer: MoeLayer, dtype: torch.dtype) -> Tensor:
    """Both sums of SEM-1 at a dtype, expert by expert so that little is held twice: ``[T, H]``."""
    precision, retained = plain(dtype), layer.substitution.retained
    x, weights = given.x.to(dtype), given.weights.to(dtype)
    y = moe.constants(weights, given.ids, layer, precision)  # [T, H]
    for row, expert in enumerate(retained):
        if not (given.ids == expert).any():
            continue
        parts = (layer.experts.gate, layer.experts.up, layer.experts.down)
        one = replace(
            layer,
            experts=ExpertWeights(*(part[row : row + 1].to(dtype) for part in parts)),
            substitution=LayerSubstitution(0, expert + 1, range(expert), {}),
        )
        y = y + moe.retained(x, weights, given.ids, one, precision)
    return y


def rms(x: Tensor) -> Tensor:
    """Root mean square of every token: ``[T, H]`` -> ``[T]``."""
    return x.double().square().mean(dim=1).sqrt()


@dataclass
class Times:
    """Milliseconds of every repetition: passed, and of the CPU."""

    passed: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def columns(self) -> tuple[float, float, float]:
        return min(self.passed), statistics.median(self.passed), statistics.median(self.cpu)


def take_turns(calls: dict[str, Call], repeats: int) -> dict[str, Times]:
    """Time every call, in every repetition one after the other."""
    times = {name: Times() for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start, cpu = time.perf_counter(), time.process_time()
            call()
            times[name].passed.append((time.perf_counter() - start) * 1e3)
            times[name].cpu.append((time.process_time() - cpu) * 1e3)
    return times


def show(dtype: torch.dtype, tokens: int, times: dict[str, Times]) -> None:
    """Print one row for every implementation: ratios above 1 are faster than all of theirs."""
    theirs = [t.columns() for name, t in times.items() if name.startswith("transformers")]
    best = [min(column) for column in zip(*theirs, strict=True)]
    for name, measured in times.items():
        columns = measured.columns()
        ratios = " ".join(f"{b / c:.2f}" for b, c in zip(best, columns, strict=True))
        label = str(dtype).removeprefix("torch.")
        figures = " | ".join(f"{column:.1f}" for column in columns)
        print(f"| {label} | {tokens} | {name} | {figures} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
