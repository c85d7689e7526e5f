"""``fixtures/SHA256SUMS``: the hash of every pinned file, in the format of ``sha256sum -c``."""

from __future__ import annotations

import hashlib
from pathlib import Path

PINS = "SHA256SUMS"


def current(root: Path) -> dict[str, str]:
    """Relative file name -> sha256 of every file below a fixture directory."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != PINS
    }


def write(root: Path) -> None:
    """Pin what is there now."""
    lines = [f"{digest}  {name}\n" for name, digest in current(root).items()]
    (root / PINS).write_text("".join(lines), encoding="utf-8")


def read(root: Path) -> dict[str, str]:
    """The pinned hashes."""
    lines = (root / PINS).read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def differences(root: Path) -> list[str]:
    """Files that were changed, added or lost since they were pinned."""
    if not (root / PINS).is_file():
        return [f"{PINS} is missing"]
    pinned, found = read(root), current(root)
    lost = [f"{name}: lost" for name in pinned.keys() - found.keys()]
    added = [f"{name}: not pinned" for name in found.keys() - pinned.keys()]
    changed = [f"{n}: changed" for n in pinned.keys() & found.keys() if pinned[n] != found[n]]
    return sorted(lost + added + changed)
