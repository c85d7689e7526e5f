"""``mone-ref run``: what a checkpoint answers to a prompt, and where its routes went."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer

from mone_ref import layout, loading, observation, validate
from mone_ref import prompt as prompts
from mone_ref.checkpoint.text import count
from mone_ref.cli import problems, progress
from mone_ref.cli import validate as findings
from mone_ref.config import Config
from mone_ref.observation import LayerRoutes, Observation
from mone_ref.prompt import Prompt, PromptCode, PromptError, PromptFault
from mone_ref.validate import Report

LARGE = 2**30
"""Bytes in memory from which a load takes long enough to show its progress."""

ALLOCATION = "[Cc](?:an't|annot) allocate memory"
"""What torch says, in a RuntimeError, where Python would raise MemoryError."""


def register(parent: typer.Typer) -> None:
    """Add the ``run`` command."""
    parent.command("run")(run)


def run(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint directory.")],
    tokens: Annotated[
        str | None, typer.Option("--tokens", help="Token ids of the prompt: 5,17,3.")
    ] = None,
    tokens_file: Annotated[
        Path | None,
        typer.Option("--tokens-file", help="A text file of ids, by commas or white space."),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", callback=findings.known_dtype, help="Dtype of parameters and arithmetic."
        ),
    ] = "float32",
    top: Annotated[int, typer.Option("--top", min=1, help="How many tokens to print.")] = 5,
    every: Annotated[
        bool, typer.Option("--all-positions", help="After every token, not only the last.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Score a prompt with the reference: likeliest next tokens, and routes to substituted experts.

    Exits 0 with an answer, 1 when the checkpoint is refused, 2 on a prompt that cannot be
    asked, a path that is no directory, more than this machine's memory holds, or usage.
    """
    try:
        prompt = prompts.read(tokens, tokens_file)
        report = validate.check(checkpoint, dtype)
        if report.errors or report.not_modelled:
            _refuse_checkpoint(checkpoint, report, as_json)
        assert report.config is not None
        prompts.check(prompt, report.config.model)
        observed = observe(report, report.config, prompt, dtype)
    except PromptError as error:
        _refuse_prompt(error, as_json)
    positions = range(len(prompt.ids)) if every else [len(prompt.ids) - 1]
    answer = Answer(report.config, prompt.ids, dtype, observed, positions, top)
    if as_json:
        beside = {"findings": [problem.as_dict() for problem in report.problems]}
        typer.echo(json.dumps(document(answer) | beside, allow_nan=False))
        return
    for problem in report.problems:  # the answer stands alone on standard output
        typer.echo(problems.line(problem), err=True)
    for line in lines(answer):
        typer.echo(line)


@dataclass(frozen=True)
class Answer:
    """What was asked, what was observed, and how much of it is told."""

    config: Config
    tokens: list[int]
    dtype: str
    observed: Observation
    positions: Sequence[int]
    top: int

    def likeliest(self, position: int) -> list[tuple[int, float]]:
        """Ids and log-probabilities of the ``top`` likeliest tokens, ties to the lower id."""
        row = self.observed.logprobs[position]  # [V]
        values, ids = torch.sort(row, descending=True, stable=True)
        return list(zip(ids[: self.top].tolist(), values[: self.top].tolist(), strict=True))


# -- computing


def observe(report: Report, config: Config, prompt: Prompt, dtype: str) -> Observation:
    """Load and score, with a progress line where that takes long. Raises ``PromptError``."""
    held = getattr(torch, dtype)
    width = held.itemsize
    sizes = {name: width * math.prod(shape) for name, shape in layout.expected(config).items()}
    parameters = sum(sizes.values())
    activations = observation.peak_bytes(config.model, len(prompt.ids), held)
    needed = (
        f"{problems.gigabytes(parameters)} of parameters and "
        f"{problems.gigabytes(activations)} for the prompt in {dtype}"
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if parameters + activations > memory:  # told before a load that would take long to fail
        raise _too_large(
            needed, f"at most {problems.gigabytes(memory)}, the memory of this machine"
        )
    try:
        with progress.shown("loading", parameters, least=LARGE) as advance:
            model = loading.build(report, held, lambda name: advance(sizes.get(name, 0)))
        return observation.observe(model, prompt.ids)
    except (MemoryError, RuntimeError) as error:
        if not _is_allocation(error):
            raise
        raise _too_large(needed, "less, or more memory than this process can get") from None


def _too_large(found: str, expected: str) -> PromptError:
    return PromptError(PromptFault(PromptCode.MEMORY, "model and prompt", found, expected))


def _is_allocation(error: Exception) -> bool:
    """Whether memory ran out, be it under a limit of this process or beside others."""
    return isinstance(error, MemoryError) or bool(re.search(ALLOCATION, str(error)))


# -- telling


def lines(answer: Answer) -> Iterator[str]:
    """The answer as text: likeliest tokens, then one line per MoE layer."""
    model, form = answer.config.model, answer.config.substitution.form
    yield (
        f"{model.family.name}, {count(model.num_layers, 'layer')}, {model.num_experts} experts, "
        f"{model.top_k} per token, substitution {form}, {answer.dtype}"
    )
    for position in answer.positions:
        yield f"after token {answer.tokens[position]} at position {position}"
        yield "      token    log-prob        prob"
        for token, logprob in answer.likeliest(position):
            yield f"{token:11}{logprob:12.4f}{math.exp(logprob):12.4f}"
    yield "routes to substituted experts"
    for layer in answer.observed.layers:
        yield f"  layer {layer.layer}: {told(layer)}"


def told(layer: LayerRoutes) -> str:
    """``5 of 8 (62.5%): expert 2 (3), expert 7 (2)``, without those that nothing hit."""
    hit = (f"expert {expert} ({hits})" for expert, hits in layer.substituted.items() if hits)
    share = f"{layer.hits} of {layer.total} ({layer.share:.1%})"
    return f"{share}: {', '.join(hit)}" if layer.hits else share


def document(answer: Answer) -> dict[str, Any]:
    """The answer as JSON-ready data: log-probabilities in nats, null where they are no number."""
    return {
        "exit_code": 0,
        "family": answer.config.model.family.name,
        "form": answer.config.substitution.form,
        "dtype": answer.dtype,
        "tokens": answer.tokens,
        "positions": [
            {
                "position": position,
                "top": [
                    {"token": token, "logprob": logprob if math.isfinite(logprob) else None}
                    for token, logprob in answer.likeliest(position)
                ],
            }
            for position in answer.positions
        ],
        "layers": [
            {
                "layer": layer.layer,
                "routes": layer.total,
                "substituted": layer.hits,
                "share": layer.share,
                "experts": {str(expert): hits for expert, hits in layer.substituted.items()},
            }
            for layer in answer.observed.layers
        ],
    }


# -- refusing


def _refuse_checkpoint(checkpoint: Path, report: Report, as_json: bool) -> NoReturn:
    """What ``mone-ref validate`` finds, with what is not computed here among the errors."""
    whole = replace(report, problems=report.not_modelled + report.problems, not_modelled=())
    status = findings.exit_status(whole)
    if as_json:
        typer.echo(json.dumps(findings.document(checkpoint, whole, status), indent=2))
    else:
        for line in findings.lines(checkpoint, whole):
            typer.echo(line, err=True)
    raise typer.Exit(status)


def _refuse_prompt(error: PromptError, as_json: bool) -> NoReturn:
    if as_json:
        faults = [fault.as_dict() for fault in error.faults]
        typer.echo(json.dumps({"exit_code": 2, "findings": faults}, indent=2))
    else:
        typer.echo(str(error), err=True)
    raise typer.Exit(2)
