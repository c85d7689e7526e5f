"""Log-probabilities of a prompt and of what follows, in two dialects of the completions API.

In both, the answer has one entry per token, the prompt's first: entry ``i`` holds what the
engine thought of token ``i`` before it read it, and entry 0 is null.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import torch

from mone_ref.backend import Generation, Scores
from mone_ref.errors import show

ALL = -1
USUAL_LIMITS = (20, 5)
"""What servers answer at most unless they were told otherwise: vLLM's, and OpenAI's own."""

_ID = re.compile(r"[0-9]{1,9}")

Tokens = Mapping[str, int]
Row = list[tuple[float, int]]
"""Values and ids of one entry."""


class AnswerError(ValueError):
    """An answer that does not hold what was asked for; names the place."""


@dataclass(frozen=True)
class Vocabulary:
    """What answers are read with: its size, and the ids of the tokenizer's token strings."""

    size: int
    tokens: Tokens

    @classmethod
    def of(cls, checkpoint: Path) -> Vocabulary:
        """From ``config.json`` and, where there is one, ``tokenizer.json``.

        Raises ``AnswerError``: a server that runs on a config without ``vocab_size`` shows
        log-probabilities of which nobody can say whether they are all.
        """
        config = _json(checkpoint / "config.json")
        nested = _member(config, "text_config")
        size = _member(nested, "vocab_size") or _member(config, "vocab_size")
        if not isinstance(size, int):
            raise AnswerError(f"config.json: vocab_size is {show(size)}, expected a number")
        tokens = _member(_member(_json(checkpoint / "tokenizer.json"), "model"), "vocab")
        return cls(size, tokens if isinstance(tokens, dict) else {})


def _json(path: Path) -> object:
    """A document; None where there is none, which is for the server to judge."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _member(document: object, key: str) -> object:
    return document.get(key) if isinstance(document, dict) else None


class Dialect(ABC):
    """One way to ask for log-probabilities of a prompt, ``top`` of them per token."""

    generated = 0
    """Entries that may follow those of the prompt."""

    def __init__(self, top: int) -> None:
        self.top = top

    def __str__(self) -> str:
        return f"{type(self).__name__} {'all' if self.top == ALL else self.top}"

    @abstractmethod
    def request(self) -> dict[str, Any]:
        """Fields that ask for them."""

    @abstractmethod
    def entries(self, choice: Mapping[str, Any]) -> object:
        """The list of entries of one choice."""

    @abstractmethod
    def pair(self, key: str, value: object, tokens: Tokens) -> tuple[float, int]:
        """Value and id of one log-probability. Raises ``AnswerError``."""


class Vllm(Dialect):
    """vLLM's extension: ``prompt_logprobs``, keyed by token ids."""

    def request(self) -> dict[str, Any]:
        """-1 stands for the whole vocabulary."""
        return {"prompt_logprobs": self.top}

    def entries(self, choice: Mapping[str, Any]) -> object:
        """Beside the text of a choice."""
        return choice.get("prompt_logprobs")

    def pair(self, key: str, value: object, tokens: Tokens) -> tuple[float, int]:
        """The value stands beside its rank and its token string."""
        if not isinstance(value, dict) or "logprob" not in value:
            raise AnswerError(f"no logprob in {show(value)}")
        if not _ID.fullmatch(key):
            raise AnswerError(f"{show(key)} is no token id")
        return number(value["logprob"]), int(key)


class OpenAi(Dialect):
    """OpenAI's: ``echo`` with ``logprobs``, keyed by token strings."""

    generated = 1

    def request(self) -> dict[str, Any]:
        """With vLLM's word for keys that are ids, which others ignore."""
        return {"echo": True, "logprobs": self.top, "return_tokens_as_token_ids": True}

    def entries(self, choice: Mapping[str, Any]) -> object:
        """One level further down."""
        logprobs = choice.get("logprobs")
        return logprobs.get("top_logprobs") if isinstance(logprobs, dict) else None

    def pair(self, key: str, value: object, tokens: Tokens) -> tuple[float, int]:
        """``token_id:7``, or a string of the tokenizer."""
        _, prefix, text = key.partition("token_id:")
        if prefix and _ID.fullmatch(text):
            return number(value), int(text)
        if key not in tokens:
            raise AnswerError(f"{show(key)} is no token of tokenizer.json")
        return number(value), tokens[key]


DIALECTS: Mapping[str, type[Dialect]] = {"vllm": Vllm, "openai": OpenAi}


def dialects(name: str, top: int, size: int) -> list[Dialect]:
    """Ways to ask, the one that shows most first.

    ``name`` and ``top`` leave one dialect or number only, unless they are empty and 0.
    ``size`` of the vocabulary stands for all where a dialect has no word for that.
    """
    everything = {Vllm: ALL, OpenAi: size}
    return [
        kind(number)
        for kind in ([DIALECTS[name]] if name else DIALECTS.values())
        for number in ([top] if top else [everything[kind], *USUAL_LIMITS])
    ]


def generated(top: int, size: int) -> list[Dialect]:
    """Ways to ask for log-probabilities of generated tokens: vLLM has OpenAI's word for them."""
    return dialects("openai", top, size)


def request(model: str, prompts: Sequence[Sequence[int]], dialect: Dialect) -> dict[str, Any]:
    """The body of a request. One prompt stands as itself, several as a list."""
    prompt = prompts if len(prompts) > 1 else prompts[0]
    asked = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    return asked | dialect.request()


def continuation_request(
    model: str, prompts: Sequence[Sequence[int]], steps: int, dialect: Dialect
) -> dict[str, Any]:
    """The same for ``steps`` tokens behind each prompt; an end of text is none."""
    asked = {"max_tokens": steps, "ignore_eos": True, "echo": False}
    return request(model, prompts, dialect) | asked


def read(
    answer: object, prompts: Sequence[Sequence[int]], dialect: Dialect, vocabulary: Vocabulary
) -> list[Scores]:
    """Scores of each prompt, the likeliest ids first, ``[T - 1, n]``. Raises ``AnswerError``.

    The row after the last token is left out: servers give it on the way of generated tokens.
    """
    found: list[Scores] = []
    for index, (choice, prompt) in enumerate(zip(choices(answer, prompts), prompts, strict=True)):
        try:
            found.append(scores(dialect.entries(choice), len(prompt), dialect, vocabulary))
        except AnswerError as error:
            raise AnswerError(f"choice {index}: {error}") from None
    return found


def read_continuations(
    answer: object, prompts: Sequence[Sequence[int]], dialect: Dialect, vocabulary: Vocabulary
) -> list[Generation]:
    """The tokens behind each prompt and their scores ``[S, n]``. Raises ``AnswerError``."""
    found: list[Generation] = []
    for index, choice in enumerate(choices(answer, prompts)):
        try:
            found.append(continuation(choice, dialect, vocabulary))
        except AnswerError as error:
            raise AnswerError(f"choice {index}: {error}") from None
    return found


def continuation(choice: Mapping[str, Any], dialect: Dialect, vocabulary: Vocabulary) -> Generation:
    """One choice: its tokens by their strings, a row of log-probabilities for each.

    A server that stops at an end of text does not know ``ignore_eos``: that is no mistake of its
    model, so that such an answer is none.
    """
    if choice.get("finish_reason") == "stop":
        raise AnswerError('finish_reason "stop", expected "length"')
    names, entries = _member(choice.get("logprobs"), "tokens"), dialect.entries(choice)
    if not isinstance(entries, list) or not isinstance(names, list) or not entries:
        raise AnswerError("no log-probabilities of generated tokens")
    if len(names) != len(entries):
        raise AnswerError(f"{len(names)} tokens beside {len(entries)} entries")
    tokens = [dialect.pair(str(name), 0.0, vocabulary.tokens)[1] for name in names]
    return Generation(tokens, table(entries, dialect, vocabulary))


def choices(answer: object, prompts: Sequence[Sequence[int]]) -> list[Mapping[str, Any]]:
    """The choices in the order of the prompts."""
    listed = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(listed, list) or not all(isinstance(choice, dict) for choice in listed):
        raise AnswerError("the answer holds no list of choices")
    by_index = {choice.get("index"): choice for choice in listed}
    expected = list(range(len(prompts)))
    if len(listed) != len(expected) or set(by_index) != set(expected):
        numbers = [choice.get("index") for choice in listed]
        raise AnswerError(f"choices {show(numbers)}, expected {expected}, one per prompt")
    return [by_index[index] for index in expected]


def scores(entries: object, tokens: int, dialect: Dialect, vocabulary: Vocabulary) -> Scores:
    """Scores from the entries of one prompt; what follows the prompt's is cut off."""
    if not isinstance(entries, list):
        raise AnswerError("no log-probabilities of the prompt")
    if not tokens <= len(entries) <= tokens + dialect.generated:
        raise AnswerError(f"{len(entries)} entries, expected one for each of {tokens} tokens")
    return table(entries[1:tokens], dialect, vocabulary, first=1)


def table(
    entries: Sequence[object], dialect: Dialect, vocabulary: Vocabulary, first: int = 0
) -> Scores:
    """One row for each entry; ``first`` is the number of the first entry in the answer."""
    due = vocabulary.size if dialect.top == ALL else min(dialect.top, vocabulary.size)
    rows = []
    for index, entry in enumerate(entries, first):
        row = likeliest_first(entry, dialect, vocabulary.tokens, f"entry {index}")
        if len(row) < due:
            raise AnswerError(f"entry {index}: {len(row)} log-probabilities where {due} were due")
        rows.append(row[:due])  # the token itself is listed even when it is not likely
    return Scores(
        torch.tensor([[value for value, _ in row] for row in rows], dtype=torch.float64),
        torch.tensor([[key for _, key in row] for row in rows], dtype=torch.int64),
    )


def likeliest_first(entry: object, dialect: Dialect, tokens: Tokens, place: str) -> Row:
    """Log-probabilities of one entry. NaN comes first, so that no cut can hide it."""
    if not isinstance(entry, dict):
        raise AnswerError(f"{place}: {show(entry)} instead of log-probabilities by token")
    try:
        row = [dialect.pair(key, value, tokens) for key, value in entry.items()]
    except AnswerError as error:
        raise AnswerError(f"{place}: {error}") from None
    return sorted(row, key=lambda pair: inf if isnan(pair[0]) else pair[0], reverse=True)


def number(value: object) -> float:
    """A log-probability; JSON writers have null where it is not a number."""
    if value is None:
        return nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AnswerError(f"{show(value)} is no log-probability")
    return float(value)
