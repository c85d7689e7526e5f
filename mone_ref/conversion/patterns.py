"""Names with fields in braces: ``model.layers.{layer}.mlp.experts.{expert}.w1.weight``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property

from mone_ref.tensor_names import INDEX

FIELD = re.compile(r"\{([a-z_]+)\}")


class Pattern:
    """A tensor name in which each field stands for one canonical decimal index.

    Names are matched whole: ``mlp.shared_experts`` is no ``experts`` (LOAD-12). Raises
    ``ValueError`` for a field that stands twice.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.fields = tuple(FIELD.findall(text))
        if len(set(self.fields)) != len(self.fields):
            raise ValueError(f"{text} names a field twice")

    def match(self, name: str) -> dict[str, int] | None:
        """The indices in a name; None for a name of another form."""
        found = self._regex.fullmatch(name)
        return {field: int(text) for field, text in found.groupdict().items()} if found else None

    def fill(self, fields: Mapping[str, int]) -> str:
        """The name with these indices."""
        return self.text.format_map(fields)

    def __repr__(self) -> str:
        return self.text

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        texts = FIELD.split(self.text)  # text, field, text, field, ..., text
        parts = (
            f"(?P<{text}>{INDEX})" if place % 2 else re.escape(text)
            for place, text in enumerate(texts)
        )
        return re.compile("".join(parts), re.ASCII)
