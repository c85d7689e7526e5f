"""``mone-ref-manifest.json``: what was read, what was written, and by which plan.

The hash of an output file proves that it is what the writer wrote. The inputs are named by size
and the hash of their header (that of the whole file where it has none): this tells one checkpoint
from another at once, but not one that differs in values alone. That the output's bytes are the
source's is what ``verify`` proves, by comparing them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from mone_ref import strict_json
from mone_ref.checkpoint.findings import flaw, unreadable
from mone_ref.checkpoint.header import LENGTH_BYTES, LONGEST_HEADER
from mone_ref.checkpoint.index import SUFFIX
from mone_ref.checkpoint.opening import open_regular
from mone_ref.errors import Code, Rejected, reason, show
from mone_ref.rewrite import identity

NAME = "mone-ref-manifest.json"
VERSION = 1
SCHEMA = Path(__file__).with_name("manifest.schema.json")


def document(
    rewrite: str,
    plan: Mapping[str, Any] | None,
    inputs: Mapping[str, Mapping[str, Any]],
    outputs: Mapping[str, tuple[int, str]],
) -> bytes:
    """The manifest's bytes: no times, no machine, so that equal rewrites have equal manifests."""
    content = {
        "version": VERSION,
        "tool": identity.TOOL,
        "rewrite": rewrite,
        "plan": plan,
        "inputs": dict(sorted(inputs.items())),
        "outputs": {
            name: {"size": size, "sha256": digest}
            for name, (size, digest) in sorted(outputs.items())
        },
    }
    return json.dumps(content, indent=2).encode() + b"\n"


def plan_entry(plan: Mapping[str, Any] | None, source: Path) -> Mapping[str, Any] | None:
    """A plan as a manifest holds it: its constants by the name that they have among the inputs."""
    constants = plan.get("constants") if plan else None
    if plan is None or not isinstance(constants, str):
        return plan
    return {**plan, "constants": identity.label(Path(constants), source)}


def describe(paths: Iterable[Path], source: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of what identifies each input. Raises ``Rejected`` (UNREADABLE)."""
    return {identity.label(path, source): _described(path) for path in paths}


def _described(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    try:
        with open_regular(path) as stream:
            size = path.stat().st_size
            if path.name.endswith(SUFFIX):
                start = stream.read(LENGTH_BYTES)
                length = min(int.from_bytes(start, "little"), LONGEST_HEADER)
                digest.update(start + stream.read(length))
                return {"size": size, "header_sha256": digest.hexdigest()}
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise Rejected([unreadable(str(path), error)]) from None
    return {"size": size, "sha256": digest.hexdigest()}


def read(directory: Path) -> dict[str, Any]:
    """The manifest of an output. Raises ``Rejected`` (MANIFEST)."""
    try:
        with open_regular(directory / NAME) as stream:
            parsed = strict_json.parse(stream.read())
    except OSError as error:
        raise _broken("file", reason(error).lower(), "the manifest of a rewrite") from None
    except strict_json.StrictJsonError as error:
        raise _broken("$", str(error), "valid JSON") from None
    wrong = jsonschema.exceptions.best_match(_validator().iter_errors(parsed.value))
    if wrong is not None:
        raise _broken(wrong.json_path, show(wrong.message, 200), "a manifest as its schema says")
    content: dict[str, Any] = parsed.value
    return content


def _broken(where: str, found: str, expected: str) -> Rejected:
    return Rejected([flaw(Code.MANIFEST, NAME, where, found, expected)])


@cache
def _validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
