"""Token ids from the command line or a file, and whether a model can be asked them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from mone_ref.checkpoint.opening import open_regular
from mone_ref.errors import show
from mone_ref.model_config import ModelConfig

MAX_BYTES = 16 * 2**20
"""Largest file of token ids that is read: two million tokens."""
MAX_LISTED = 20
"""Faults of one prompt that are told; the last one then says how many there are."""
ID = re.compile(r"[0-9]{1,18}", re.ASCII)


class PromptCode(StrEnum):
    """What can be wrong with a prompt, by itself or for a model on this machine."""

    EMPTY = "PROMPT/empty"
    NOT_AN_ID = "PROMPT/not-an-id"
    VOCABULARY = "PROMPT/vocabulary"
    TOO_LONG = "PROMPT/too-long"
    FILE = "PROMPT/file"
    SOURCE = "PROMPT/source"
    MEMORY = "PROMPT/memory"


@dataclass(frozen=True)
class PromptFault:
    """One fault; ``where`` is an option or a file, with the place of the token, from 0."""

    code: PromptCode
    where: str
    found: str
    expected: str

    def __str__(self) -> str:
        return f"error {self.code} {self.where}: found {self.found}, expected {self.expected}"

    def as_dict(self) -> dict[str, str]:
        """The fault as JSON-ready data."""
        return {
            "code": str(self.code),
            "where": self.where,
            "found": self.found,
            "expected": self.expected,
        }


class PromptError(ValueError):
    """A prompt that cannot be scored; ``faults`` is never empty."""

    def __init__(self, *faults: PromptFault) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


@dataclass(frozen=True)
class Prompt:
    """Token ids, and where they were read, for messages."""

    ids: list[int]
    source: str


def read(tokens: str | None, file: Path | None) -> Prompt:
    """Ids separated by commas or white space, from the one place that is given.

    Raises ``PromptError``: ``SOURCE``, ``FILE``, ``EMPTY``, ``NOT_AN_ID``.
    """
    if (tokens is None) == (file is None):
        both = "none of them" if tokens is None else "both"
        fault = PromptFault(PromptCode.SOURCE, "--tokens, --tokens-file", both, "one of them")
        raise PromptError(fault)
    text, source = (tokens, "--tokens") if file is None else (_text(file), show(str(file)))
    assert text is not None
    words = [word for word in re.split(r"[\s,]+", text) if word]
    if not words:
        raise PromptError(PromptFault(PromptCode.EMPTY, source, "no token", "at least one id"))
    faults = (
        PromptFault(PromptCode.NOT_AN_ID, f"{source}[{index}]", show(word), "a token id like 17")
        for index, word in enumerate(words)
        if not ID.fullmatch(word)
    )
    _raise_any(faults)
    return Prompt([int(word) for word in words], source)


def _text(file: Path) -> str:
    """A file of ids, of a size that a prompt can have."""
    source = show(str(file))
    try:
        with open_regular(file) as opened:
            data = opened.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            fault = PromptFault(PromptCode.FILE, source, "more bytes", f"at most {MAX_BYTES} bytes")
            raise PromptError(fault)
        return data.decode()
    except OSError as error:
        found, expected = show(error.strerror), "a readable file"
    except UnicodeDecodeError as error:
        found, expected = f"byte {error.start} that is no UTF-8", "text"
    raise PromptError(PromptFault(PromptCode.FILE, source, found, expected))


def check(prompt: Prompt, model: ModelConfig) -> None:
    """A model can be asked these ids. Raises ``PromptError``: ``VOCABULARY``, ``TOO_LONG``."""
    _raise_any(_unfit(prompt, model))


def _unfit(prompt: Prompt, model: ModelConfig) -> Iterator[PromptFault]:
    length, longest = len(prompt.ids), model.max_positions
    if longest is not None and length > longest:
        expected = f"at most {longest}, the model's max_position_embeddings"
        yield PromptFault(PromptCode.TOO_LONG, prompt.source, f"{length} tokens", expected)
    expected = f"a token id from 0 to {model.vocab_size - 1}"
    for index, token in enumerate(prompt.ids):
        if token >= model.vocab_size:
            where = f"{prompt.source}[{index}]"
            yield PromptFault(PromptCode.VOCABULARY, where, str(token), expected)


def _raise_any(faults: Iterator[PromptFault]) -> None:
    """Raise all faults, of a long list the first ones and how many more there are."""
    found = list(faults)
    if len(found) > MAX_LISTED:
        first, more = found[0], len(found) - MAX_LISTED
        rest = PromptFault(first.code, first.where.partition("[")[0], f"{more} more", "none")
        found = [*found[:MAX_LISTED], rest]
    if found:
        raise PromptError(*found)
