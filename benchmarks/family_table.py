"""The families: what their rows say, and how far engines stand from the goldens.

A figure is the worst ratio of an engine's error to the budget, over all prompts of all
fixtures of a family, substituted ones and their plain controls; up to 3 passes. The first
column of figures is an error, not a ratio: the largest difference, in nats, between the
float64 oracle and stock transformers in float32 on the plain controls.

    python benchmarks/family_table.py [REPORT.jsonl ...] [--run ENGINE]...

Reports are those of ``mone-ref conform --case 'outputs/*' --case 'controls/*' --report FILE``;
``--run`` makes one first, with this Python. Without either only the descriptions are printed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mone_ref.families import FAMILIES, REFUSED, DenseRule, Family, QkNorm
from mone_ref.fill import recipe
from mone_ref.suite import report

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
DTYPES = ("float32", "bfloat16", "float16")
JUDGED = ("ok", "mismatch")
TRUTH = "transformers"  # the engine whose float32 the oracle is held against
CASES = ("outputs/*", "controls/*")
CONFORM = "from mone_ref.cli import main; main()"

Result = Mapping[str, Any]


# -- what a row of the table says


def described() -> Iterator[str]:
    """One line of Markdown per family, after the head."""
    heads = ("family", "architecture", "tensors", "router", "attention", "beside experts")
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for family in FAMILIES:
        cells = (
            family.name,
            ", ".join(f"`{name}`" for name in family.architectures),
            tensors(family),
            router(family),
            attention(family),
            beside_experts(family),
        )
        yield f"| {' | '.join(cells)} |"


def tensors(family: Family) -> str:
    """Where router and experts lie in the decoder's stack."""
    projections = ",".join(family.projections)
    return (
        f"`{family.layer_prefix(0).replace('.0', '.N')}`: `{family.router}`, "
        f"`{family.experts}.J.{{{projections}}}`"
    )


def router(family: Family) -> str:
    """How logits become weights."""
    default = str(family.normalise_default).lower()
    by_key = f"normalised by `norm_topk_prob` (default {default})"
    always = "always normalised" if family.normalise_default else "never normalised"
    parts = [family.scoring, by_key if "norm_topk_prob" in family.reads else always]
    if family.correction_bias:
        parts.append("chosen with `e_score_correction_bias`")
    if "n_group" in family.reads:
        best = "best expert" if family.group_best == 1 else f"{family.group_best} best experts"
        parts.append(f"groups by their {best}")
    if "routed_scaling_factor" in family.reads:
        parts.append("times `routed_scaling_factor`")
    return ", ".join(parts)


NORMS = {
    QkNorm.PROJECTION: "norms over all heads",
    QkNorm.HEAD: "norms of each head",
    QkNorm.NONE: "no norms of heads",
}


def attention(family: Family) -> str:
    """Which form of attention, and what it has beside its projections."""
    if family.latent:
        return "multi-head latent"
    parts = ["grouped queries", NORMS[family.qk_norm]]
    if "use_qk_norm" in family.reads:
        parts[-1] += " by `use_qk_norm`"
    if family.attention_bias:
        parts.append(f"biases by `{family.attention_bias}`")
    if "partial_rotary_factor" in family.reads:
        parts.append("part of a head rotated")
    return ", ".join(parts)


DENSE = {
    DenseRule.NONE: "",
    DenseRule.STEP: "dense layers by `decoder_sparse_step`, `mlp_only_layers`",
    DenseRule.FIRST: "first `first_k_dense_replace` layers dense",
}


def beside_experts(family: Family) -> str:
    """Shared experts and dense layers."""
    shared = f"shared experts `{family.shared}`" if family.shared else ""
    gate = f" behind `{family.shared_gate}`" if family.shared_gate else ""
    return "; ".join(filter(None, (shared + gate, DENSE[family.dense_rule]))) or "nothing"


def refused() -> Iterator[str]:
    """One line per architecture whose experts cannot be substituted."""
    for name, reason in REFUSED.items():
        yield f"- `{name}`: {reason}."


# -- figures


def figures(reports: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    """One line of Markdown per family; reports by the name of their engine."""
    heads = ["family", f"float64 oracle - {TRUTH} float32", *reports]
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for family in FAMILIES:
        rows = {name: of_family(results, family) for name, results in reports.items()}
        cells = [family.name, error(rows.get(TRUTH, []))]
        cells += [" / ".join(ratio(own, dtype) for dtype in DTYPES) for own in rows.values()]
        yield f"| {' | '.join(cells)} |"


def of_family(results: Sequence[Result], family: Family) -> list[Result]:
    """Results on the fixtures of one family."""
    return [one for one in results if families_of_fixtures()[fixture(one)] == family.name]


def families_of_fixtures() -> dict[str, str]:
    """Fixture -> family."""
    if not FOUND:
        for path in FIXTURES.glob("*/recipe.yaml"):
            FOUND[path.parent.name] = recipe.read(path).family
    return FOUND


FOUND: dict[str, str] = {}


def fixture(result: Result) -> str:
    """Output cases and controls are called like their fixtures."""
    return str(result["case"]).partition("/")[2]


def error(results: Sequence[Result]) -> str:
    """Largest error of the plain controls in float32, in nats."""
    found = [
        one["numbers"]["max_error"]
        for one in results
        if one["case"].startswith("controls/")
        and (one["dtype"], one["outcome"]) == ("float32", "ok")
    ]
    return f"{max(found):.1e}" if found else "not run"


def ratio(results: Sequence[Result], dtype: str) -> str:
    """Worst ratio at one dtype, or why there is none."""
    own = [one for one in results if one["dtype"] == dtype]
    if any(one["case"].startswith("controls/") and one["outcome"] == "mismatch" for one in own):
        return "base differs"
    found = [
        max(one["numbers"]["token_ratio"], one["numbers"]["max_ratio"])
        for one in own
        if one["outcome"] in JUDGED
    ]
    return f"{max(found):.2f}" if found else "not run"


def reasons(reports: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    """Why something was not run: engine, family, reason; each once."""
    told: dict[tuple[str, str], set[str]] = defaultdict(set)
    for engine, results in reports.items():
        for one in results:
            if one["outcome"] == "not-applicable":
                told[engine, one["found"]].add(families_of_fixtures()[fixture(one)])
    for (engine, reason), names in told.items():
        yield f"- {engine}, {', '.join(sorted(names))}: {reason}."


def measured(engine: str, scratch: Path) -> Path:
    """A report of one engine, made now. What the run prints goes to standard error."""
    file = scratch / f"{engine}.jsonl"
    words = ["conform", f"--backend={engine}", *(f"--case={case}" for case in CASES)]
    command = [sys.executable, "-c", CONFORM, *words, f"--report={file}"]
    subprocess.run(command, check=False, stdout=2)  # a failed case is a figure too
    return file


def read(files: Sequence[Path]) -> dict[str, list[Result]]:
    """Results of output cases and controls, by engine. Raises ``ReportError``."""
    wholes = [report.read(file) for file in files]
    return {
        whole.header["backend"]["name"]: [
            one for one in whole.results if one["case"].partition("/")[0] in ("outputs", "controls")
        ]
        for whole in wholes
    }


def main() -> None:
    """Print descriptions, and figures where there are reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("reports", nargs="*", type=Path, metavar="REPORT.jsonl")
    parser.add_argument("--run", action="append", default=[], metavar="ENGINE")
    given = parser.parse_args()
    print("\n".join(described()))
    with tempfile.TemporaryDirectory() as scratch:
        made = [measured(engine, Path(scratch)) for engine in given.run]
        reports = read([*given.reports, *made])
    if reports:
        print("\n" + "\n".join(figures(reports)))
        print("\n" + "\n".join(reasons(reports)))


if __name__ == "__main__":
    main()
