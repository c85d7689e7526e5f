"""``mone-ref inspect``: what a checkpoint is made of, from its headers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from mone_ref.checkpoint.text import count, plain
from mone_ref.cli import problems
from mone_ref.cli.problems import gigabytes
from mone_ref.errors import Code, only_errors, show
from mone_ref.rewrite import inspection
from mone_ref.rewrite.inspection import Inspection, LayerSummary


def register(parent: typer.Typer) -> None:
    """Add the ``inspect`` command."""
    parent.command("inspect")(inspect_directory)


def _positive(bandwidth: float | None) -> float | None:
    if bandwidth is not None and not 0 < bandwidth < float("inf"):
        raise typer.BadParameter("a positive number of GB/s")
    return bandwidth


def inspect_directory(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            "--bandwidth",
            callback=_positive,
            help="Memory bandwidth in GB/s, for an estimate of the decoding speed.",
        ),
    ] = None,
) -> None:
    """Layers, experts, layout and bytes of a checkpoint of any architecture; reads headers only.

    Exits 0 when nothing is wrong, 1 on errors, 2 when DIR cannot be read as a directory.
    """
    found = inspection.inspect(directory)
    status = exit_status(found)
    speed = found.tokens_per_second(bandwidth) if bandwidth else None
    if as_json:
        document = {**found.as_dict(), "tokens_per_second": speed, "exit_code": status}
        typer.echo(json.dumps(document, indent=2))
    else:
        for line in (*problems.lines(found.problems), *lines(found)):
            typer.echo(line)
        if speed is not None:
            typer.echo(f"decoding       about {speed:.0f} tokens/s at {bandwidth:g} GB/s, at most")
    raise typer.Exit(status)


def exit_status(found: Inspection) -> int:
    """0 without errors, 1 with errors, 2 where there is no directory to read."""
    errors = only_errors(found.problems)
    if any(problem.code is Code.NOT_A_CHECKPOINT for problem in errors):
        return 2
    return 1 if errors else 0


def lines(found: Inspection) -> Iterator[str]:
    """The report, one fact per line."""
    family = found.family or f"unknown (model_type {show(found.model_type)})"
    yield f"{'checkpoint':14} {plain(found.directory)}"
    yield f"{'family':14} {family}"
    yield f"{'tensors':14} {found.tensors} in {count(found.files, 'file')}, {_dtypes(found)}"
    yield f"{'router keys':14} {found.router_keys}"
    yield f"{'expert keys':14} {found.expert_keys}"
    decoder = sum(not layer.mtp for layer in found.layers)
    yield f"{'MoE layers':14} {decoder} in {found.stack or 'no stack'}"
    for group in _groups(found):
        yield f"{'':14} {group}"
    yield f"{'top-k':14} {found.top_k if found.top_k is not None else 'not told'}"
    yield f"{'shared':14} {count(found.shared, 'tensor')} of shared experts"
    yield f"{'MTP layers':14} {found.mtp_layers}"
    companions = [f"{number} {ending}" for ending, number in found.companions.items()]
    yield f"{'companions':14} {', '.join(companions) or 'none'}"
    biases = ", ".join(found.correction_biases) or "none"
    yield f"{'correction':14} {biases}; router biases: {found.router_biases}"
    others = f"; other dialects: {', '.join(found.dialects)}" if found.dialects else ""
    yield f"{'substitution':14} {found.form}, {count(found.substituted, 'expert')}{others}"
    if found.substituted:
        yield f"{'memory saved':14} {gigabytes(found.saved_bytes)} of weights"
    for component, size in found.bytes.items():
        if size:
            share = 100 * size / found.size
            yield f"  {component:12} {gigabytes(size):>10} {share:5.1f} %"
    yield f"{'total':14} {gigabytes(found.size):>10}"
    yield f"{'parameters':14} {parameters(found.parameters)}"
    yield (
        f"{'active':14} {parameters(found.active.parameters)}, "
        f"{gigabytes(found.active.bytes)} per token"
    )


def parameters(number: int) -> str:
    """In billions, or in millions below one billion."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


def _dtypes(found: Inspection) -> str:
    listed = sorted(found.dtypes.items(), key=lambda item: -item[1])
    return ", ".join(f"{number} {plain(dtype)}" for dtype, number in listed)


def _groups(found: Inspection) -> Iterator[str]:
    """Runs of layers that are alike, so that 61 layers take a line or two."""
    for _, run in groupby(found.layers, key=_likeness):
        alike = list(run)
        first, last = alike[0], alike[-1]
        path = plain(first.path)
        span = path if first is last else f"{path} to {last.path.rpartition('.')[2]}"
        retained = "" if first.retained == first.experts else f", {first.retained} retained"
        mtp = "MTP, " if first.mtp else ""
        yield (
            f"{span}: {mtp}{first.experts} experts{retained}, {first.layout} "
            f"({', '.join(first.projections)})"
        )


def _likeness(layer: LayerSummary) -> tuple[object, ...]:
    stack = layer.path.rpartition(".")[0]
    return stack, layer.mtp, layer.experts, layer.retained, layer.layout, layer.projections
