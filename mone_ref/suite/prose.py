"""Sentences of SPEC.md and of cases, whose Markdown is code and emphasis within a line."""

from __future__ import annotations

import re
from typing import NamedTuple

_MARKED = re.compile(r"`(?P<code>[^`]+)`|\*(?P<em>\w[^*`]*)\*")


class Span(NamedTuple):
    """A piece of a sentence; ``mark`` is ``code``, ``em`` or empty."""

    mark: str
    text: str


Prose = tuple[Span, ...]


def prose(text: str) -> Prose:
    """A paragraph in pieces."""
    spans, end = [], 0
    for found in _MARKED.finditer(text):
        mark = found.lastgroup or ""
        spans += [Span("", text[end : found.start()]), Span(mark, found[mark])]
        end = found.end()
    return tuple(span for span in (*spans, Span("", text[end:])) if span.text)
