"""Plans made by rule: the same number of experts in every layer, or the best by given scores.

Scores are numbers per layer and expert, higher is better. Where they come from is not for this
package to say. Of equal scores the lowest id wins, so that one file always gives one plan (A23).
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mone_ref.checkpoint import dtypes, header
from mone_ref.checkpoint.opening import open_regular
from mone_ref.checkpoint.text import plain
from mone_ref.errors import Code, Phase, Problem, Rejected, Severity, only_errors, reason, show
from mone_ref.fields import ROOT
from mone_ref.rewrite import plan
from mone_ref.rewrite.plan_dialects import Unread
from mone_ref.rewrite.structure import MoeLayer, Structure
from mone_ref.strict_json import child

Scores = dict[str, list[float]]
"""Layer key -> one score per logical expert."""


UNPACKING = (
    ValueError,
    EOFError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What a broken, encrypted or lying archive raises in zipfile and numpy."""


def targets(structure: Structure, with_mtp: bool) -> dict[str, MoeLayer]:
    """The layers that a plan speaks of, by the plan's keys."""
    layers = (*structure.decoder, *(structure.mtp if with_mtp else ()))
    return {structure.key(layer): layer for layer in layers}


def uniform(structure: Structure, keep: int, with_mtp: bool = False) -> dict[str, tuple[int, ...]]:
    """``keep`` experts of every layer, evenly spread over the ids, and so over router groups."""
    layers = targets(structure, with_mtp)
    return {
        key: tuple(at * layer.num_experts // keep for at in range(keep))
        for key, layer in layers.items()
    }


def per_layer(scores: Scores, keep: int) -> dict[str, tuple[int, ...]]:
    """The ``keep`` best of each layer."""
    return {key: tuple(sorted(_best(one)[:keep])) for key, one in scores.items()}


def across_layers(scores: Scores, keep: int) -> dict[str, tuple[int, ...]]:
    """The best ``keep`` per layer on average, wherever they are; each layer keeps at least one."""
    first = {key: _best(one)[0] for key, one in scores.items()}
    order = sorted(
        (
            (-score, at, expert, key)
            for at, (key, one) in enumerate(scores.items())
            for expert, score in enumerate(one)
            if expert != first[key]
        ),
        key=lambda item: item[:3],
    )
    chosen = {key: [expert] for key, expert in first.items()}
    for _, _, expert, key in order[: keep * len(scores) - len(scores)]:
        chosen[key].append(expert)
    return {key: tuple(sorted(ids)) for key, ids in chosen.items()}


def _best(scores: Sequence[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))


def kept_of_ratio(structure: Structure, ratio: float) -> int:
    """Experts to keep when the share ``ratio`` of them goes, rounded to keep more."""
    return structure.num_experts - math.floor(structure.num_experts * ratio)


def read(path: Path, structure: Structure, with_mtp: bool = False) -> Scores:
    """Scores of every layer, from JSON, safetensors, npz, or lines of ordered ids.

    JSON: an object of arrays by layer, or an array of arrays in the order of the MoE layers.
    safetensors and npz: one ``[E]`` tensor per layer, named by the plan's key, or a single
    ``[layers, E]``. Lines (JSONL): ``{"0": [ids, best first]}`` with every id.
    Raises ``Rejected`` (PLAN/file, PLAN/scores).
    """
    layers = targets(structure, with_mtp)
    try:
        found = _by_layer(_load(path), list(layers))
    except (Unread, OSError) as error:
        expected = "scores in JSON, safetensors or npz"
        problem = _problem(Code.PLAN_FILE, ROOT, reason(error), expected, path.name)
        raise Rejected([problem]) from None
    problems = list(_score_problems(found, layers, path.name))
    if problems:
        raise Rejected(problems)
    return {key: [float(score) for score in found[key]] for key in layers}


def warnings(scores: Scores, file: str) -> Iterator[Problem]:
    """Layers in which the scores choose nothing: the lowest ids would stay (E09)."""
    for key, one in scores.items():
        if len(set(one)) == 1:
            found, expected = f"{show(one[0])} for every expert", "scores that differ"
            where, warning = child(ROOT, key), Severity.WARNING
            yield _problem(Code.PLAN_SCORES, where, found, expected, file, warning)


def _load(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return _safetensors(path)
    if path.suffix == ".npz":
        return _npz(path)
    value = plan.load(plan.contents(path))
    if path.suffix == ".jsonl" and isinstance(value, dict):
        value = [value]  # one line: ids in their order, which would pass for scores
    is_lines = isinstance(value, list) and all(isinstance(line, dict) for line in value)
    return _from_orders(value) if is_lines else value


def _npz(path: Path) -> dict[str, Any]:
    """Arrays by name; sizes are looked at before anything is unpacked."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            if sum(member.file_size for member in archive.infolist()) > plan.MAX_BYTES:
                raise Unread(f"more than {plan.MAX_BYTES} bytes when unpacked")
            return {name.removesuffix(".npy"): _array(archive, name) for name in archive.namelist()}
    except Unread:
        raise
    except UNPACKING as error:
        raise Unread(f"no npz file: {show(str(error))}") from None


def _array(archive: zipfile.ZipFile, name: str) -> Any:
    with archive.open(name) as member:
        return np.lib.format.read_array(member, allow_pickle=False).tolist()


def _safetensors(path: Path) -> dict[str, Any]:
    read = header.read(path, path.name)
    if broken := only_errors(read.problems):
        raise Rejected(broken)
    values: dict[str, Any] = {}
    with open_regular(path) as file:
        for entry in read.entries:
            if entry.dtype not in dtypes.FLOATS:
                raise Unread(f"dtype {show(entry.dtype)} of {show(entry.name)}")
            if len(entry.shape) > 2 or not entry.size:
                raise Unread(f"shape {show(list(entry.shape))} of {show(entry.name)}")
            file.seek(entry.begin)
            data = dtypes.decode(file.read(entry.size), entry.dtype)
            values[entry.name] = data.reshape(entry.shape).tolist()
    return values


def _from_orders(lines: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Ordered ids, best first, as scores: the place from the end."""
    scores: dict[str, Any] = {}
    for line in lines:
        for key, order in line.items():
            whole = isinstance(order, list) and all(type(expert) is int for expert in order)
            if not whole or sorted(order) != list(range(len(order))) or key in scores:
                raise Unread(f"a line for layer {show(key)} that does not order every expert once")
            places = {expert: float(len(order) - at) for at, expert in enumerate(order)}
            scores[key] = [places[expert] for expert in range(len(order))]
    return scores


def _by_layer(value: Any, keys: list[str]) -> dict[str, Any]:
    """Layer key -> scores; an array is by position among the layers with experts."""
    if isinstance(value, dict) and len(value) == 1 and len(keys) > 1:
        (value,) = value.values()  # the only tensor of a file
    if isinstance(value, list):
        if len(value) != len(keys):
            raise Unread(f"{len(value)} rows of scores for {len(keys)} layers with experts")
        return dict(zip(keys, value, strict=True))
    if not isinstance(value, dict):
        raise Unread(show(value))
    return {str(key): scores for key, scores in value.items()}


def _score_problems(
    found: Mapping[str, Any], layers: Mapping[str, MoeLayer], file: str
) -> Iterator[Problem]:
    for key in (*layers, *(key for key in found if key not in layers)):
        where = child(ROOT, key)
        if key not in layers or key not in found:
            text = "scores of no layer with experts" if key in found else "no scores"
            expected = "scores of each layer with experts, and no others"
            yield _problem(Code.PLAN_SCORES, where, text, expected, file)
            continue
        scores, experts = found[key], layers[key].num_experts
        numbers = isinstance(scores, list) and all(type(one) in (int, float) for one in scores)
        if not numbers or len(scores) != experts:
            text = f"{len(scores)} numbers" if numbers else show(scores)
            yield _problem(Code.PLAN_SCORES, where, text, f"{experts} numbers", file)
        elif not all(map(_is_finite, scores)):
            yield _problem(Code.PLAN_SCORES, where, "NaN or infinity", "finite scores", file)


def _is_finite(score: float) -> bool:
    try:
        return math.isfinite(score)
    except OverflowError:  # an integer beyond float64
        return False


def check_keep(structure: Structure, keep: int) -> None:
    """Raises ``Rejected`` (PLAN/counts) for a number of experts that some layer has not."""
    fewest = min((layer.num_experts for layer in structure.decoder), default=0)
    if not 0 < keep <= fewest:
        expected = f"1 to {fewest}, the experts of a layer"
        raise Rejected([_problem(Code.PLAN_COUNTS, "keep", str(keep), expected, "plan")])


def _problem(
    code: Code,
    where: str,
    found: str,
    expected: str,
    file: str,
    severity: Severity = Severity.ERROR,
) -> Problem:
    return Problem(code, Phase.PARSE, where, found, expected, plain(file), severity)
