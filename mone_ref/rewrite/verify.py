"""Whether a directory is what a blueprint says, byte for byte.

The blueprint is made anew from source and plan. Nothing that the output says about itself is
believed: its manifest is only held against what is found.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mone_ref.checkpoint.findings import flaw, unreadable
from mone_ref.checkpoint.opening import leaves, open_regular
from mone_ref.errors import Code, Problem, Rejected, show
from mone_ref.rewrite import documents, identity, manifest, source_state
from mone_ref.rewrite.blueprint import Blueprint
from mone_ref.rewrite.output_file import OutputFile, files
from mone_ref.rewrite.shard_check import Checked, check_bytes, check_shard, require_readable

WORKERS = 2


@dataclass(frozen=True)
class Verified:
    """What was compared, and everything that differs."""

    problems: tuple[Problem, ...]
    files: int
    tensors: int
    size: int


def verify(
    directory: Path,
    blueprint: Blueprint,
    plan: dict[str, Any] | None = None,
    *,
    advance: Callable[[int], None] = lambda size: None,
) -> Verified:
    """Compare a whole output directory with its blueprint and its manifest.

    ``plan`` is held against the manifest's where it is given. Codes: OUTPUT_BYTES,
    OUTPUT_TENSORS, OUTPUT_FILES, OUTPUT_DOCUMENT, MANIFEST, UNREADABLE, HEADER and what else a
    broken safetensors file gives. Raises ``Rejected`` where the source cannot be read
    (UNREADABLE, TRUNCATED) or there is no output (NOT_A_CHECKPOINT).
    """
    require_readable(directory)
    try:
        wanted = files(blueprint)
    except OSError as error:
        raise Rejected([unreadable(str(error.filename), error)]) from None
    shards = {shard.name: shard for shard in blueprint.shards}

    def check(file: OutputFile) -> Checked:
        path = directory / file.name
        if not os.path.isfile(path):  # Path.is_file raises where a directory is closed
            return Checked((), "", 0)  # told with the other files that are missing
        try:
            open_regular(path).close()
        except OSError as error:
            return Checked((unreadable(file.name, error),), "", 0)
        if file.name in shards:
            return check_shard(path, shards[file.name], advance)
        if file.name in blueprint.documents:
            return documents.check(path, file.name, file.head)
        return check_bytes(path, file, advance)

    with ThreadPoolExecutor(WORKERS) as pool:
        checked = dict(zip([file.name for file in wanted], pool.map(check, wanted), strict=True))
    problems = [*_names(directory, wanted)]
    for one in checked.values():
        problems += one.problems
    problems += _manifest_problems(directory, blueprint, wanted, plan, checked)
    tensors = len(blueprint.tensors)
    return Verified(
        tuple(problems), len(wanted), tensors, sum(one.size for one in checked.values())
    )


def _names(directory: Path, wanted: tuple[OutputFile, ...]) -> Iterator[Problem]:
    """Files too few and too many, and those that lie elsewhere, where nobody proves them later."""
    planned = {file.name for file in wanted} | {manifest.NAME}
    present, closed = _present(directory)
    yield from closed
    for name in sorted(planned - {manifest.NAME}):
        if not os.path.isfile(directory / name):
            found = "a pipe, a device or a broken link" if name in present else "no such file"
            yield flaw(Code.OUTPUT_FILES, name, "file", found, "the file that is planned")
        elif leaves(directory / name, directory):
            found, expected = "a link out of the directory", "a file in the directory"
            yield flaw(Code.OUTPUT_FILES, name, "file", found, expected)
    for name in sorted(present - planned):
        yield flaw(Code.OUTPUT_FILES, name, "file", "a file", "none of this name")


def _present(directory: Path) -> tuple[set[str], list[Problem]]:
    """Files and links of a directory, and a problem for each part that cannot be looked into."""
    present: set[str] = set()
    closed: list[OSError] = []
    for root, directories, files_ in os.walk(directory, onerror=closed.append):
        here = Path(root).relative_to(directory)
        links = [name for name in directories if os.path.islink(os.path.join(root, name))]
        present |= {(here / name).as_posix() for name in (*files_, *links)}
    parts = [(Path(error.filename).relative_to(directory).as_posix(), error) for error in closed]
    return present, [unreadable(part, error) for part, error in parts]


def _manifest_problems(
    directory: Path,
    blueprint: Blueprint,
    wanted: tuple[OutputFile, ...],
    plan: dict[str, Any] | None,
    checked: dict[str, Checked],
) -> Iterator[Problem]:
    """What the manifest says against what was found."""
    try:
        said = manifest.read(directory)
    except Rejected as error:
        yield from error.problems
        return
    if plan is not None and said["plan"] != manifest.plan_entry(plan, blueprint.source):
        yield _unlike("$.plan", said["plan"], "the plan that is given")
    if said["tool"] == identity.TOOL and said["rewrite"] != identity.of(wanted, blueprint.source):
        yield _unlike("$.rewrite", said["rewrite"], "the identity of this plan on this source")
    inputs = manifest.describe(source_state.inputs(blueprint, wanted), blueprint.source)
    yield from _entries("inputs", said["inputs"], inputs)
    present = {name: one for name, one in checked.items() if one.sha256}
    outputs = {
        name: {"size": (directory / name).stat().st_size, "sha256": one.sha256}
        for name, one in present.items()
    }
    missing = {file.name for file in wanted} - present.keys()
    listed = {name: entry for name, entry in said["outputs"].items() if name not in missing}
    yield from _entries("outputs", listed, outputs)


def _entries(part: str, said: dict[str, Any], found: dict[str, Any]) -> Iterator[Problem]:
    for name in sorted({*said, *found}):
        if said.get(name) != found.get(name):
            where = f"$.{part}[{show(name)}]"
            yield _unlike(where, said.get(name), f"{found.get(name)}, as it is stored")


def _unlike(where: str, found: object, expected: str) -> Problem:
    return flaw(Code.MANIFEST, manifest.NAME, where, show(found, 120), expected)
