"""Bytes -> the data of a YAML document, as far as JSON could have said it.

Plans, recipes, cases and notes are in YAML for its looks alone. Aliases let a few lines stand for
any amount of data, or hold themselves; of two equal keys the last would win; 010 would be 8.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from mone_ref.errors import show

DECIMAL = re.compile("-?(?:0|[1-9][0-9]*)", re.ASCII)


class StrictYamlError(ValueError):
    """The bytes are no such document; the message says why and, where known, where."""


SAFE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where the package has it


class _Loader(SAFE):  # type: ignore[misc]
    """YAML 1.1 without repeated keys; keys are text, as in JSON."""


def _mapping(loader: Any, node: yaml.MappingNode) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if key is None or key in read:
            line = key_node.start_mark.line + 1
            found = "a key that is no text" if key is None else f"the key {show(key)} again"
            raise StrictYamlError(f"{found} in line {line}")
        read[key] = loader.construct_object(value_node, deep=True)
    return read


def _integer(_: Any, node: yaml.ScalarNode) -> int:
    """An integer as JSON writes it: YAML 1.1 would read 010 as 8 and 1:30 as 90."""
    if not DECIMAL.fullmatch(node.value):
        found = f"the integer {show(node.value)}, which is not decimal"
        raise StrictYamlError(f"{found}, in line {node.start_mark.line + 1}")
    return int(node.value)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def parse(data: bytes) -> Any:
    """Parse one YAML document; raises ``StrictYamlError``.

    Refused: other encodings than UTF-8, repeated keys and keys that are no text, integers that
    are not decimal, aliases, tags, and nesting beyond what the parser can take.
    """
    try:
        text = data.decode("utf-8")
        if "*" in text or "!" in text:
            _refuse_beyond_json(text)
        return yaml.load(text, _Loader)
    except UnicodeDecodeError as error:
        raise StrictYamlError(f"byte {error.start} that is not UTF-8") from None
    except yaml.YAMLError as error:
        raise StrictYamlError(show(" ".join(str(error).split()), 200)) from None
    except StrictYamlError:
        raise
    except (RecursionError, ValueError, OverflowError):
        raise StrictYamlError("values nested too deep or too long") from None


def _refuse_beyond_json(text: str) -> None:
    """Raises ``StrictYamlError`` for an alias or a tag."""
    for event in yaml.parse(text, SAFE):
        if isinstance(event, yaml.AliasEvent):
            raise StrictYamlError("an alias: a few of them can stand for any amount of data")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise StrictYamlError(f"the tag {show(tag)}")
