"""Files: config.json and safetensors, read with nothing but numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class BadCheckpoint(Exception):
    """A checkpoint that the engine refuses; ``kind`` says what is wrong, in one word."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")


def read_config(directory: Path) -> dict[str, Any]:
    """``config.json``, in which no key may stand twice."""
    try:
        text = (directory / "config.json").read_text(encoding="utf-8")
        return dict(json.loads(text, object_pairs_hook=unique))
    except OSError as error:
        raise BadCheckpoint("files", f"config.json cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadCheckpoint("json", f"config.json: {error}") from error


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON document; raises ``ValueError`` for a repeated key."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def read_tensors(directory: Path) -> dict[str, Array]:
    """Every tensor of every shard, in float32."""
    index = directory / "model.safetensors.index.json"
    names = {path.name for path in directory.glob("*.safetensors")}
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    if not names:
        raise BadCheckpoint("files", "there is no safetensors file")
    found: dict[str, Array] = {}
    for name in sorted(names):
        for key, tensor in read_file(directory / name).items():
            if key in found:
                raise BadCheckpoint("files", f"{key} is stored twice")
            found[key] = tensor
    return found


def read_file(path: Path) -> dict[str, Array]:
    """One safetensors file: the length of the header, the header, the bytes."""
    try:
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        return {name: read_tensor(data[start:], **entry) for name, entry in header.items()}
    except (OSError, ValueError) as error:
        raise BadCheckpoint("files", f"{path.name} cannot be read: {error}") from error


def read_tensor(data: bytes, dtype: str, shape: list[int], data_offsets: list[int]) -> Array:
    """One tensor; bfloat16 is the upper half of a float32. Integers are not weights."""
    if dtype not in STORED:
        raise BadCheckpoint("dtype", f"a tensor is stored as {dtype}")
    raw = np.frombuffer(data[slice(*data_offsets)], STORED[dtype]).reshape(shape)
    if dtype == "BF16":
        raw = (raw.astype("<u4") << 16).view("<f4")
    return raw.astype(np.float32)
