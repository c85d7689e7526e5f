"""``mone-ref plan``: plans by rule, for ``mone-ref rewrite``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from mone_ref.checkpoint.text import count, plain
from mone_ref.cli import problems
from mone_ref.errors import Code, Problem, Rejected, only_errors, reason
from mone_ref.rewrite import decisions, plan, ranking, soundness, structure
from mone_ref.rewrite.plan import Form, Kind, LayerPlan, Mtp, Plan
from mone_ref.rewrite.structure import Structure

app = typer.Typer(help="Make a plan for rewrite.", no_args_is_help=True)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint directory.")]
Out = Annotated[Path, typer.Option("--out", help="The plan to write, YAML.")]
KindOption = Annotated[Kind, typer.Option("--kind", help="What happens to the others.")]
FormOption = Annotated[Form, typer.Option("--form", help="How substitution is declared.")]
MtpOption = Annotated[Mtp | None, typer.Option("--mtp", help="What becomes of MTP layers.")]
TopK = Annotated[int | None, typer.Option("--top-k", min=1, help="Routes per token, if pruned.")]
Constants = Annotated[
    str | None,
    typer.Option("--constants", help="The safetensors file of the constants, as the plan says it."),
]


def register(parent: typer.Typer) -> None:
    """Add the ``plan`` command group."""
    parent.add_typer(app, name="plan")


@app.command("uniform")
def uniform(
    directory: Directory,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Experts kept in every layer.")],
    out: Out,
    kind: KindOption = Kind.PRUNE,
    form: FormOption = Form.APPROX,
    constants: Constants = None,
    top_k: TopK = None,
    mtp: MtpOption = None,
) -> None:
    """Keep the same number in every layer, evenly spread over the ids: for tests, not quality.

    Exits 0 when the plan was written, 1 when it does not fit DIR, 2 when DIR cannot be read.
    """

    def choose(read: Structure) -> tuple[dict[str, tuple[int, ...]], list[Problem]]:
        ranking.check_keep(read, keep)
        return ranking.uniform(read, keep, mtp is Mtp.PRUNE), []

    provenance = f"uniform, {keep} experts evenly spread"
    _make(directory, out, _draft(kind, form, constants, top_k, mtp, provenance), choose)


@app.command("from-scores")
def from_scores(
    directory: Directory,
    scores: Annotated[
        Path, typer.Argument(help="Scores per layer and expert: JSON, JSONL, safetensors or npz.")
    ],
    out: Out,
    keep: Annotated[
        int | None, typer.Option("--keep", min=1, help="Experts kept per layer (on average).")
    ] = None,
    ratio: Annotated[
        float | None, typer.Option("--ratio", help="Or: the share of experts that goes.")
    ] = None,
    across: Annotated[
        bool,
        typer.Option("--global/--per-layer", help="Rank all layers together, or each alone."),
    ] = False,
    kind: KindOption = Kind.PRUNE,
    form: FormOption = Form.APPROX,
    constants: Constants = None,
    top_k: TopK = None,
    mtp: MtpOption = None,
) -> None:
    """Keep the experts with the highest scores; of equal scores the lowest id.

    Exits 0 when the plan was written, 1 when it does not fit DIR, 2 when an input cannot be read.
    """
    if (keep is None) == (ratio is None):
        raise typer.BadParameter("exactly one of --keep and --ratio", param_hint="--keep")
    if ratio is not None and not 0 < ratio < 1:
        raise typer.BadParameter("a number between 0 and 1", param_hint="--ratio")

    def choose(read: Structure) -> tuple[dict[str, tuple[int, ...]], list[Problem]]:
        kept = ranking.kept_of_ratio(read, ratio) if ratio is not None else keep or 0
        ranking.check_keep(read, kept)
        values = ranking.read(scores, read, mtp is Mtp.PRUNE)
        rank = ranking.across_layers if across else ranking.per_layer
        return rank(values, kept), list(ranking.warnings(values, scores.name))

    scope = "all layers together" if across else "each layer"
    provenance = f"scores of {plain(scores.name)}, {scope}"
    _make(directory, out, _draft(kind, form, constants, top_k, mtp, provenance), choose)


def _draft(
    kind: Kind,
    form: Form,
    constants: str | None,
    top_k: int | None,
    mtp: Mtp | None,
    provenance: str,
) -> Plan:
    """A plan without layers."""
    if kind is Kind.PRUNE and constants is not None:
        raise typer.BadParameter("only with --kind substitute", param_hint="--constants")
    if kind is Kind.SUBSTITUTE and top_k is not None:
        raise typer.BadParameter("only with --kind prune", param_hint="--top-k")
    path = None if constants is None else Path(constants)
    return Plan(kind, {}, form, path, top_k, mtp, provenance)


def _make(
    directory: Path,
    out: Path,
    draft: Plan,
    choose: Callable[[Structure], tuple[dict[str, tuple[int, ...]], list[Problem]]],
) -> None:
    """Choose, hold the plan against the checkpoint, and write it if nothing objects."""
    read = structure.read(directory)
    found = [*read.problems, *soundness.problems(read)]
    made = None
    if not only_errors(found):
        try:
            kept, warned = choose(read)
            layers = {key: LayerPlan(ids) for key, ids in kept.items()}
            made = Plan(**{**vars(draft), "layers": layers, "file": plain(out.name)})
            found += [*warned, *decisions.decide(made, read).problems]
        except Rejected as rejected:
            found += rejected.problems
    for line in problems.lines(found):
        typer.echo(line, err=True)
    if made is None or only_errors(found):
        raise typer.Exit(_status(only_errors(found)))
    shown = plain(str(out))
    try:
        _write(out, plan.as_yaml(made))
    except OSError as error:
        typer.echo(f"error: {shown}: {reason(error).lower()}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"wrote {shown}: {_kept(made)}")


def _write(out: Path, text: str) -> None:
    """A new file, whole or not there. Raises OSError."""
    with out.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            out.unlink()
            raise


def _status(errors: Sequence[Problem]) -> int:
    unread = (Code.NOT_A_CHECKPOINT, Code.PLAN_FILE)
    return 2 if any(problem.code in unread for problem in errors) else 1


def _kept(made: Plan) -> str:
    """How many experts stay: layers may differ (A23)."""
    counts = sorted({len(one.listed) for one in made.layers.values()})
    span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{count(len(made.layers), 'layer')}, {span} experts kept in each"
