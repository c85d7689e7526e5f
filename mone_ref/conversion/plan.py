"""Which stored tensors make which tensor of a model: everything that can be wrong, before a read.

Names are looked at once. Indices come from names and are kept: a tensor never moves to
another row because its neighbour is absent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mone_ref.checkpoint.text import plain
from mone_ref.config import LayerSubstitution
from mone_ref.conversion.converter import WeightConverter
from mone_ref.conversion.operations import Grid, Shape
from mone_ref.errors import Code, Phase, Problem, Rejected, show
from mone_ref.precision import FLOATS

Names = tuple[tuple[str, ...], ...]
"""Tensor names ``[pattern][index]``."""

AS_IS = WeightConverter(["source"], ["target"])
"""What becomes of a tensor that no converter names: it keeps its name."""


@dataclass(frozen=True)
class Request:
    """What is wanted of the stored tensors.

    ``dtype`` is that of every result, None the stored one. ``substitution`` says per layer
    which experts are retained, one row each in ascending order (EXEC-2), and which are
    skipped (LOAD-2); without it indices run from 0 without a gap. ``expected`` are the
    results and their shapes, None where any will do.
    """

    dtype: torch.dtype | None = None
    substitution: Callable[[int], LayerSubstitution] | None = None
    expected: Mapping[str, Shape] | None = None

    def indices(self, fields: Mapping[str, int], last: int) -> tuple[Sequence[int], Sequence[int]]:
        """Indices of a group that have a row, ascending, and those that are skipped."""
        if self.substitution is None:
            return range(last + 1), ()
        layer = self.substitution(fields["layer"])
        return layer.retained, layer.substituted


@dataclass(frozen=True)
class Group:
    """One whole: the stored tensors that lie in it, and the results that are views of it."""

    converter: WeightConverter
    sources: Names
    targets: Names
    shape: Shape
    dtype: torch.dtype
    stored_dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def places(self, whole: Tensor) -> dict[str, Tensor]:
        """Name of each source -> its view of the whole."""
        return _named(self.sources, self.converter.places(whole, len(self.sources[0])))

    def results(self, whole: Tensor) -> dict[str, Tensor]:
        """Name of each result -> its view of the whole."""
        return _named(self.targets, self.converter.results(whole, len(self.targets[0])))

    @property
    def reverse(self) -> Group:
        """From the results back to the stored tensors, in the dtype in which they were."""
        back = self.converter.reverse
        whole = torch.empty(self.shape, dtype=self.dtype, device="meta")
        results = self.converter.results(whole, len(self.targets[0]))
        shape = back.shape([[tuple(result.shape) for result in row] for row in results])
        return Group(back, self.targets, self.sources, shape, self.stored_dtype, self.dtype)


@dataclass
class _Found:
    """The stored tensors of one group, as they are found: ``names[pattern][index]``."""

    converter: WeightConverter
    fields: Mapping[str, int]
    names: list[dict[int, str]] = field(default_factory=list)


def make(
    stored: Mapping[str, Tensor],
    converters: Sequence[WeightConverter],
    request: Request,
    file_of: Callable[[str], str] = lambda name: "tensors",
) -> list[Group]:
    """Group stored tensors; only their shapes and dtypes are looked at.

    A tensor that no converter names keeps its name. ``file_of`` says in which file a name
    is, or should be. Raises ``Rejected`` with every problem: ``MISSING_EXPERT`` and
    ``MISSING_TENSOR`` for an absent part, ``UNKNOWN_TENSOR`` for one too many,
    ``TWO_SOURCES``, ``TENSOR_SHAPE`` and ``TENSOR_DTYPE``; ``ValueError`` when two
    converters name one tensor.
    """
    problems: list[Problem] = []
    groups: dict[str, Group] = {}  # by result

    def report(code: Code, name: str, found: str, expected: str) -> None:
        file = plain(file_of(name))
        problems.append(Problem(code, Phase.LOAD, plain(name), found, expected, file))

    for found in _scan(stored, converters):
        group = _group(found, stored, request, report)
        if group is None:
            continue
        for result in _flat(group.targets):
            other = groups.setdefault(result, group)
            if other is not group:
                first, second = (plain(_flat(one.sources)[0]) for one in (other, group))
                report(Code.TWO_SOURCES, second, f"{plain(result)} made of it and {first}", "one")
    absent = [name for name in request.expected or () if name not in groups]
    for name in absent if not problems else ():  # else the reason was reported already
        report(Code.MISSING_TENSOR, name, "no tensor that makes it", "a tensor of the model")
    if problems:
        raise Rejected(problems)
    return list({id(group): group for group in groups.values()}.values())


def _scan(stored: Mapping[str, Tensor], converters: Sequence[WeightConverter]) -> Iterable[_Found]:
    """Every tensor to its group, in one pass over the names."""
    groups: dict[tuple[object, ...], _Found] = {}
    for name in stored:
        matches = [
            (converter, row, fields)
            for converter in converters
            for row, pattern in enumerate(converter.sources)
            if (fields := pattern.match(name)) is not None
        ]
        if len(matches) > 1:
            raise ValueError(f"{plain(name)} belongs to several converters")
        converter, row, fields = matches[0] if matches else (AS_IS, 0, {})
        key = (name,) if converter is AS_IS else tuple(fields[name] for name in converter.key)
        empty = _Found(converter, fields, [{} for _ in converter.sources])
        found = groups.setdefault((converter, *key), empty)
        found.names[row][fields.get(converter.source_index, 0)] = name
    return groups.values()


Report = Callable[[Code, str, str, str], None]


def _group(
    found: _Found, stored: Mapping[str, Tensor], request: Request, report: Report
) -> Group | None:
    """One group with all its parts in place; None after a report."""
    sources = _complete(found, request, report)
    if sources is None or not _uniform(sources, stored, request.dtype, report):
        return None
    shapes = [[tuple(stored[name].shape) for name in row] for row in sources]
    stored_dtype = stored[sources[0][0]].dtype
    try:
        shape = found.converter.shape(shapes)
        whole = torch.empty(shape, dtype=stored_dtype, device="meta")
        results, targets = _results(found, whole, request)
    except (RuntimeError, IndexError, ValueError):
        all_shapes = " and ".join(show(list(row[0])) for row in shapes)
        report(Code.TENSOR_SHAPE, sources[0][0], f"shape {all_shapes}", "shapes that fit together")
        return None
    for name, result in _named(targets, results).items():
        if request.expected is not None and not _wanted(name, result, sources, request, report):
            return None
    dtype = request.dtype or stored_dtype
    return Group(found.converter, sources, targets, shape, dtype, stored_dtype)


def _complete(found: _Found, request: Request, report: Report) -> Names | None:
    """Names of all parts; None when one is absent or there is one too many."""
    converter, whole = found.converter, True
    indexed = bool(converter.source_index)
    if converter is AS_IS:
        return (tuple(found.names[0].values()),)
    last = max((index for row in found.names for index in row), default=0)
    wanted, skipped = request.indices(found.fields, last) if indexed else (range(1), ())
    for pattern, row in zip(converter.sources, found.names, strict=True):
        absent = next((index for index in wanted if index not in row), None)
        if absent is not None:
            name = pattern.fill({**found.fields, converter.source_index: absent})
            code = Code.MISSING_EXPERT if indexed else Code.MISSING_TENSOR
            others = sum(index in wanted for index in row)
            report(code, name, f"nothing, beside {others} of {len(wanted)}", "every part")
            whole = False
        for index, name in row.items():
            if index not in wanted and index not in skipped:
                report(Code.UNKNOWN_TENSOR, name, f"expert {index}", f"one of {show(list(wanted))}")
                whole = False
    return tuple(tuple(row[i] for i in wanted) for row in found.names) if whole else None


def _uniform(
    sources: Names, stored: Mapping[str, Tensor], dtype: torch.dtype | None, report: Report
) -> bool:
    """Whether the parts of each pattern have one shape, and all parts one dtype."""
    usual = Counter(stored[name].dtype for name in _flat(sources)).most_common(1)[0][0]
    for row in sources:
        shape = Counter(tuple(stored[name].shape) for name in row).most_common(1)[0][0]
        for name in row:
            part = stored[name]
            if tuple(part.shape) != shape:
                report(Code.TENSOR_SHAPE, name, show(list(part.shape)), show(list(shape)))
                return False
            if part.dtype != usual or (dtype not in (None, usual) and usual not in FLOATS):
                expected = "one dtype, a float type if it is to be another"
                report(Code.TENSOR_DTYPE, name, str(part.dtype), expected)
                return False
    return True


def _results(found: _Found, whole: Tensor, request: Request) -> tuple[Grid, Names]:
    """Views of the whole and their names. Raises ValueError when there are not as many."""
    converter = found.converter
    if converter is AS_IS:
        return [[whole]], (tuple(found.names[0].values()),)
    results = converter.results(whole, 0)
    columns: Sequence[int] = range(len(results[0]))
    if converter.target_index:
        columns, _ = request.indices(found.fields, len(columns) - 1)
        if len(columns) != len(results[0]):
            raise ValueError("another number of experts")
    names = tuple(
        tuple(pattern.fill({**found.fields, converter.target_index: index}) for index in columns)
        for pattern in converter.targets
    )
    return results, names


def _wanted(name: str, result: Tensor, sources: Names, request: Request, report: Report) -> bool:
    """Whether a result is one that was asked for, in its shape."""
    assert request.expected is not None
    shape, first = request.expected.get(name), _flat(sources)[0]
    if shape is None:
        report(Code.UNKNOWN_TENSOR, first, "a tensor", "tensors of the model only")
    elif tuple(result.shape) != shape:
        found = f"{plain(name)} of shape {show(list(result.shape))}"
        report(Code.TENSOR_SHAPE, first, found, show(list(shape)))
    return shape is not None and tuple(result.shape) == shape


def _named(names: Names, grid: Grid) -> dict[str, Tensor]:
    pairs = zip(names, grid, strict=True)
    return {n: t for row, cells in pairs for n, t in zip(row, cells, strict=True)}


def _flat(names: Names) -> list[str]:
    return [name for row in names for name in row]
