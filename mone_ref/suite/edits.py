"""Planting one flaw: edits to a copy of a fixture's checkpoint.

An edit is a mapping with one key, the name of a function below. An edit that finds
nothing to change is an error: the case would test nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Edit = Mapping[str, Any]

INDEX = "model.safetensors.index.json"
SYMBOLS = {
    "H": ("hidden_size",),
    "V": ("vocab_size",),
    "I": ("moe_intermediate_size", "intermediate_size"),
    "E": ("num_experts", "num_local_experts"),
}
"""Letters that may stand in a shape; each takes the value of the first of its config keys."""

_SIZE = re.compile(r"(\d*)([A-Z])(?:([+-]\d+))?")


class EditError(ValueError):
    """An edit that cannot be applied, or that changes nothing."""


@dataclass
class Draft:
    """A checkpoint in memory: the text of its config, and its tensors by file and name.

    ``cut`` says how many bytes are missing at the end of a file, all where it is None.
    """

    config: str
    files: dict[str, dict[str, Tensor]]
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    cut: dict[str, int | None] = field(default_factory=dict)

    def file_of(self, name: str) -> str:
        """The file that stores a tensor; raises ``EditError``."""
        for file, tensors in self.files.items():
            if name in tensors:
                return file
        raise EditError(f"the checkpoint has no tensor {name}")

    def get(self, name: str) -> Tensor:
        """One tensor."""
        return self.files[self.file_of(name)][name]

    def put(self, name: str, tensor: Tensor) -> None:
        """Replace a tensor with one that differs."""
        file = self.file_of(name)
        if identical(self.files[file][name], tensor):
            raise EditError(f"{name} is already like that")
        self.files[file][name] = tensor

    def add(self, name: str, tensor: Tensor) -> None:
        """Store a new tensor in the first file."""
        if any(name in tensors for tensors in self.files.values()):
            raise EditError(f"the checkpoint already has a tensor {name}")
        self.files[min(self.files)][name] = tensor

    def remove(self, name: str) -> Tensor:
        """Take a tensor out."""
        return self.files[self.file_of(name)].pop(name)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {name: tensor for file in self.files.values() for name, tensor in file.items()}

    def size(self, size: int | str) -> int:
        """A number, or one written as ``H``, ``H+1``, ``2I``."""
        if isinstance(size, int):
            return size
        match = _SIZE.fullmatch(size)
        if match is None or match[2] not in SYMBOLS:
            raise EditError(f"{size!r} is no size: expected a number, H, V, I, E, H+1, 2I, ...")
        factor, letter, offset = match.groups()
        config = json.loads(self.config)
        key = next((key for key in SYMBOLS[letter] if key in config), None)
        if key is None:
            raise EditError(f"{size!r}: config.json has none of {SYMBOLS[letter]}")
        return int(factor or 1) * int(config[key]) + int(offset or 0)

    def shape(self, sizes: Sequence[int | str]) -> tuple[int, ...]:
        """A shape whose sizes may be written with letters."""
        return tuple(self.size(size) for size in sizes)


def identical(one: Tensor, other: Tensor) -> bool:
    """Equal dtype, shape and bytes."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    as_bytes = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*as_bytes)


# -- the edits


def remove_tensor(draft: Draft, name: str) -> None:
    """``remove_tensor: NAME``"""
    draft.remove(name)


def add_tensor(draft: Draft, spec: Mapping[str, Any]) -> None:
    """``add_tensor: {name, shape, dtype, fill}``"""
    dtype = getattr(torch, spec["dtype"])
    draft.add(spec["name"], torch.full(draft.shape(spec["shape"]), spec["fill"], dtype=dtype))


def replace_tensor(draft: Draft, spec: Mapping[str, Any]) -> None:
    """``replace_tensor: {name, shape, fill}``, in the dtype that it had."""
    dtype = draft.get(spec["name"]).dtype
    draft.put(spec["name"], torch.full(draft.shape(spec["shape"]), spec["fill"], dtype=dtype))


def reshape(draft: Draft, spec: Mapping[str, Any]) -> None:
    """``reshape: {tensor, shape}``, the same values."""
    tensor, shape = draft.get(spec["tensor"]), draft.shape(spec["shape"])
    try:
        draft.put(spec["tensor"], tensor.reshape(shape))
    except RuntimeError as error:
        raise EditError(f"{spec['tensor']}: {error}") from None


def poison(draft: Draft, spec: Mapping[str, Any]) -> None:
    """``poison: {tensor, index, value}``: one element, counted in row-major order."""
    tensor = draft.get(spec["tensor"]).clone()
    if not 0 <= spec["index"] < tensor.numel():
        raise EditError(f"{spec['tensor']} has no element {spec['index']}")
    tensor.view(-1)[spec["index"]] = float(spec["value"])
    draft.put(spec["tensor"], tensor)


def copy_tensor(draft: Draft, spec: Mapping[str, Any]) -> None:
    """``copy_tensor: {from, to}``"""
    draft.add(spec["to"], draft.get(spec["from"]).clone())


def rename_tensor(draft: Draft, spec: Mapping[str, Any]) -> None:
    """``rename_tensor: {from, to}``"""
    draft.add(spec["to"], draft.remove(spec["from"]))


def store_twice(draft: Draft, spec: Mapping[str, Any]) -> None:
    """``store_twice: {tensor, file, fill}``: under the same name in another file, other values."""
    name, file = spec["tensor"], spec["file"]
    if file not in draft.files:
        raise EditError(f"the checkpoint has no file {file}")
    if draft.file_of(name) == file:
        raise EditError(f"{name} is stored in {file} already")
    draft.files[file][name] = torch.full_like(draft.get(name), spec["fill"])


def rename_prefix(draft: Draft, spec: Mapping[str, Any]) -> None:
    """``rename_prefix: {from, to}``: every name that begins with it."""
    names = [name for name in draft.tensors() if name.startswith(spec["from"])]
    if not names:
        raise EditError(f"no tensor begins with {spec['from']}")
    for name in names:
        draft.add(spec["to"] + name.removeprefix(spec["from"]), draft.remove(name))


def retype(draft: Draft, spec: Mapping[str, Any]) -> None:
    """``retype: {tensors, dtype}``: the same values, as far as the new dtype has them."""
    for name in spec["tensors"]:
        draft.put(name, draft.get(name).to(getattr(torch, spec["dtype"])))


def fuse_tensors(draft: Draft, spec: Mapping[str, Any]) -> None:
    """``fuse_tensors: {rows, to}``: each row's tensors joined along their first dimension,
    the rows stacked."""
    rows = [torch.cat([draft.remove(name) for name in row]) for row in spec["rows"]]
    draft.add(spec["to"], torch.stack(rows))


def set_config(draft: Draft, spec: Mapping[str, Any]) -> None:
    """``set_config: {path, value}``; the last key of the path may be new."""
    document = json.loads(draft.config)
    holder, key = _holder(document, spec["path"])
    before = json.dumps(document)
    holder[key] = spec["value"]
    if json.dumps(document) == before:
        raise EditError(f"config.json already has that value at {spec['path']}")
    draft.config = json.dumps(document, indent=2)


def remove_config(draft: Draft, path: Sequence[str | int]) -> None:
    """``remove_config: PATH``"""
    document = json.loads(draft.config)
    holder, key = _holder(document, path)
    try:
        del holder[key]
    except (KeyError, IndexError):
        raise EditError(f"config.json has nothing at {list(path)}") from None
    draft.config = json.dumps(document, indent=2)


def copy_config(draft: Draft, spec: Mapping[str, Sequence[str | int]]) -> None:
    """``copy_config: {from: PATH, to: PATH}``; the last key of ``to`` is new."""
    document = json.loads(draft.config)
    value, _ = _holder(document, [*spec["from"], ""])
    target, name = _holder(document, spec["to"])
    if name in target:
        raise EditError(f"config.json already has something at {list(spec['to'])}")
    target[name] = value
    draft.config = json.dumps(document, indent=2)


def move_config(draft: Draft, spec: Mapping[str, Sequence[str | int]]) -> None:
    """``move_config: {from: PATH, to: PATH}``; the last key of ``to`` is new."""
    copy_config(draft, spec)
    remove_config(draft, spec["from"])


def replace_config_text(draft: Draft, spec: Mapping[str, str]) -> None:
    """``replace_config_text: {find, replace}``: for what no JSON writer writes.

    ``find`` is a regular expression that matches exactly once.
    """
    text, count = re.subn(spec["find"], lambda _: spec["replace"], draft.config)
    if count != 1:
        raise EditError(f"{spec['find']!r} matches config.json {count} times, expected once")
    if text == draft.config:
        raise EditError(f"config.json already reads {spec['replace']!r}")
    draft.config = text


def cut_file(draft: Draft, spec: Mapping[str, Any]) -> None:
    """``cut_file: {file, bytes}``: so many bytes are missing at its end."""
    if spec["file"] not in draft.files:
        raise EditError(f"the checkpoint has no file {spec['file']}")
    draft.cut[spec["file"]] = spec["bytes"]


def remove_file(draft: Draft, file: str) -> None:
    """``remove_file: FILE``: an index still names it."""
    if file not in draft.files:
        raise EditError(f"the checkpoint has no file {file}")
    draft.cut[file] = None


def _holder(document: Any, path: Sequence[str | int]) -> tuple[Any, str | int]:
    """The object or array that holds the last key of a path, and that key."""
    holder = document
    for key in path[:-1]:
        try:
            holder = holder[key]
        except (KeyError, IndexError, TypeError):
            raise EditError(f"config.json has nothing at {list(path)}") from None
    return holder, path[-1]


EDITS: dict[str, Callable[[Draft, Any], None]] = {
    function.__name__: function
    for function in (
        remove_tensor,
        add_tensor,
        replace_tensor,
        reshape,
        poison,
        copy_tensor,
        rename_tensor,
        store_twice,
        rename_prefix,
        retype,
        fuse_tensors,
        set_config,
        remove_config,
        copy_config,
        move_config,
        replace_config_text,
        cut_file,
        remove_file,
    )
}


# -- directories


def read(directory: Path) -> Draft:
    """A checkpoint directory as a draft."""
    draft = Draft((directory / "config.json").read_text(encoding="utf-8"), {})
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            draft.metadata[path.name] = file.metadata() or {}
            names = list(file.keys())
            draft.files[path.name] = {name: file.get_tensor(name) for name in names}
    return draft


def write(draft: Draft, directory: Path) -> None:
    """Write a draft over the directory it was read from."""
    (directory / "config.json").write_text(draft.config, encoding="utf-8")
    for file, tensors in draft.files.items():
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, directory / file, metadata=draft.metadata[file])
    if (directory / INDEX).exists():
        write_index(draft, directory / INDEX)
    for file, size in draft.cut.items():
        cut(directory / file, size)


def cut(path: Path, size: int | None) -> None:
    """Cut bytes off the end of a file, or the whole file off the directory."""
    if size is None:
        path.unlink()
        return
    left = path.stat().st_size - size
    if left < 0:
        raise EditError(f"{path.name} has no {size} bytes")
    os.truncate(path, left)


def write_index(draft: Draft, path: Path) -> None:
    """Bring a shard index in line with the tensors."""
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"] = {name: file for file, held in draft.files.items() for name in held}
    total = sum(tensor.nbytes for tensor in draft.tensors().values())
    index["metadata"] = {**index.get("metadata", {}), "total_size": total}
    path.write_text(json.dumps(index, indent=2), encoding="utf-8")


def apply(directory: Path, edits: Sequence[Edit]) -> None:
    """Apply edits in order to a directory. Raises ``EditError`` naming the edit."""
    draft = read(directory)
    for number, edit in enumerate(edits):
        ((name, argument),) = edit.items()
        try:
            EDITS[name](draft, argument)
        except EditError as error:
            raise EditError(f"edits[{number}].{name}: {error}") from None
    write(draft, directory)


@contextmanager
def edited(directory: Path, edits: Sequence[Edit]) -> Iterator[Path]:
    """A temporary copy of a checkpoint, edited: whoever gets it may write into it."""
    with tempfile.TemporaryDirectory(prefix="mone-ref-case-") as temporary:
        copy = Path(temporary) / "checkpoint"
        shutil.copytree(directory, copy)
        if edits:
            apply(copy, edits)
        yield copy


def changed_tensors(directory: Path, other: Path, edits: Sequence[Edit] = ()) -> dict[str, Tensor]:
    """Tensors of ``other``, after edits, that differ from those of ``directory``.

    What an edit touched comes last: an engine that applies an update tensor by tensor
    has then changed the good ones before it meets the bad one.
    """
    before, unedited = read(directory).tensors(), read(other).tensors()
    with edited(other, edits) as path:
        after = read(path).tensors()
    changed = [name for name in after if not _same(before, after, name)]
    if not changed:
        raise EditError(f"nothing differs between {directory} and {other}")
    changed.sort(key=lambda name: not _same(unedited, after, name))
    return {name: after[name] for name in changed}


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor], name: str) -> bool:
    return name in one and identical(one[name], other[name])
