"""Which architecture a checkpoint is of, as far as an adapter may know before its engine does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read(checkpoint: Path) -> dict[str, Any]:
    """config.json, or nothing: a broken one is for the engine to refuse."""
    try:
        document = json.loads((checkpoint / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def named(document: dict[str, Any]) -> list[Any]:
    """The architectures that a config names."""
    found = document.get("architectures")
    return found if isinstance(found, list) else []
