"""Tensors that travel beside the messages: safetensors files in one directory, read with care."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import safetensors.torch
from torch import Tensor

from mone_ref.errors import show
from mone_ref.protocol.failures import ProtocolError

FILE_LIMIT = 1 << 28
"""Largest file in bytes; the answers of every case are below a thousandth of it."""


class Exchange:
    """The exchange directory, as either side sees it. Files are named without a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> str:
        """Write one file; returns its name."""
        ready = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
        (self.directory / name).write_bytes(safetensors.torch.save(ready))
        return name

    def read(self, name: str) -> dict[str, Tensor]:
        """Read one file. Raises ``ProtocolError`` that says what is wrong with it."""
        content = self._content(name)
        try:
            return safetensors.torch.load(content)
        except Exception as error:  # whatever a library says of foreign bytes
            raise ProtocolError(f"tensor file {show(name)}: {error}") from None

    def remove(self, name: str) -> None:
        """Delete a file that was read."""
        with suppress(OSError):
            os.unlink(self.directory / name)

    def _content(self, name: str) -> bytes:
        """The bytes of a regular file of bearable size in the directory itself."""
        if os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
            raise ProtocolError(f"tensor file {show(name)} is not in the exchange directory")
        # Neither through a link nor waiting for the writer of a named pipe.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(self.directory / name, flags)
        except OSError as error:
            reason = "is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise ProtocolError(f"tensor file {show(name)}: {reason}") from None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ProtocolError(f"tensor file {show(name)} is no regular file")
            if found.st_size > FILE_LIMIT:
                size = f"has {found.st_size} bytes, at most {FILE_LIMIT} are read"
                raise ProtocolError(f"tensor file {show(name)} {size}")
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(FILE_LIMIT)
        finally:
            os.close(descriptor)
