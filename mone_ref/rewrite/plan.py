"""A plan: which experts of which layers a rewrite keeps, as a file that people can read.

The shape of the file is ``plan.schema.json``; what it must agree with in the checkpoint is in
``decisions.py``. Plans of other tools are read too (``plan_dialects.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, reduce
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from mone_ref import strict_json, strict_yaml
from mone_ref.checkpoint.findings import MOST, most
from mone_ref.checkpoint.opening import open_regular
from mone_ref.checkpoint.text import plain
from mone_ref.errors import Code, Phase, Problem, Rejected, reason, show
from mone_ref.fields import ROOT
from mone_ref.rewrite import plan_dialects
from mone_ref.rewrite.plan_dialects import VERSION, Unread
from mone_ref.strict_json import StrictJsonError, child
from mone_ref.strict_yaml import StrictYamlError

SCHEMA = Path(__file__).with_name("plan.schema.json")
MAX_BYTES = 64 * 2**20


class Kind(StrEnum):
    """What happens to the experts that are not kept."""

    SUBSTITUTE = "substitute"  # constants take their place, ids stay
    PRUNE = "prune"  # they are deleted, ids are compacted


class Form(StrEnum):
    """How a substitution is declared in config.json."""

    APPROX = "approx"
    EXPLICIT = "explicit"


class Mtp(StrEnum):
    """What becomes of MTP layers with experts."""

    KEEP = "keep"
    PRUNE = "prune"
    DROP = "drop"


@dataclass(frozen=True)
class LayerPlan:
    """The experts of one layer as the plan lists them: those kept, or those substituted."""

    listed: tuple[int, ...]
    is_kept: bool = True

    @property
    def word(self) -> str:
        """``keep`` or ``substitute``"""
        return "keep" if self.is_kept else "substitute"


@dataclass(frozen=True)
class Plan:
    """A plan by itself, not yet held against a checkpoint.

    ``layers`` has the plan's own keys: an index in the decoder's stack, or a module path.
    ``constants`` is a path that exists only if somebody made it; ``file`` is the name of the
    plan in messages.
    """

    kind: Kind
    layers: Mapping[str, LayerPlan]
    form: Form = Form.APPROX
    constants: Path | None = None
    top_k: int | None = None
    mtp: Mtp | None = None
    provenance: str = ""
    file: str = field(default="plan", compare=False)

    def problem(self, code: Code, where: str, found: str, expected: str) -> Problem:
        """A problem of this plan."""
        return Problem(code, Phase.PARSE, where, found, expected, self.file)

    def path(self, key: str) -> str:
        """JSON path of a layer's list."""
        return child(child(child(ROOT, "layers"), key), self.layers[key].word)


def read(path: Path) -> Plan:
    """Read a plan from a YAML or JSON file, or one of another tool.

    Raises ``Rejected`` (PLAN) with every problem of the file.
    """
    name = plain(path.name)
    try:
        data = contents(path)
    except (OSError, ValueError) as error:
        raise Rejected([_unreadable(name, reason(error).lower(), "a readable file")]) from None
    try:
        document = plan_dialects.to_document(load(data))
    except Unread as error:
        raise Rejected([_unreadable(name, str(error), "a plan in YAML or JSON")]) from None
    return from_document(document, path.parent, name)


def contents(path: Path) -> bytes:
    """A file of a size that a plan or scores can have. Raises OSError, ``Unread``."""
    with open_regular(path) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise Unread(f"more than {MAX_BYTES} bytes")
    return data


def from_document(document: Any, directory: Path, file: str = "plan") -> Plan:
    """A plan from its data; paths in it are relative to ``directory``.

    Raises ``Rejected`` with every problem.
    """
    problems = list(most(_shape_problems(document, file)))
    if problems:
        raise Rejected(problems)
    constants = document.get("constants")
    return Plan(
        kind=Kind(document["kind"]),
        layers={key: _layer(value) for key, value in document["layers"].items()},
        form=Form(document.get("form", Form.APPROX)),
        constants=None if constants is None else directory / constants,
        top_k=document.get("top_k"),
        mtp=Mtp(document["mtp"]) if "mtp" in document else None,
        provenance=document.get("provenance", ""),
        file=file,
    )


def as_document(plan: Plan) -> dict[str, Any]:
    """The plan as data that ``from_document`` reads."""
    document: dict[str, Any] = {"version": VERSION, "kind": str(plan.kind)}
    if plan.kind is Kind.SUBSTITUTE:
        document["form"] = str(plan.form)
    if plan.constants is not None:
        document["constants"] = str(plan.constants)
    if plan.top_k is not None:
        document["top_k"] = plan.top_k
    if plan.mtp is not None:
        document["mtp"] = str(plan.mtp)
    if plan.provenance:
        document["provenance"] = plan.provenance
    document["layers"] = {key: {one.word: list(one.listed)} for key, one in plan.layers.items()}
    return document


def as_yaml(plan: Plan) -> str:
    """The plan as text: one line per layer."""
    document = as_document(plan)
    layers = document.pop("layers")
    head = yaml.safe_dump(document, sort_keys=False, allow_unicode=False)
    lines = (f"  {json.dumps(key)}: {_flow(one)}\n" for key, one in layers.items())
    return head + ("layers:\n" + "".join(lines) if layers else "layers: {}\n")


def _flow(one: Mapping[str, list[int]]) -> str:
    return "".join(f"{{{word}: {json.dumps(ids)}}}" for word, ids in one.items())


def load(data: bytes) -> Any:
    """Parse YAML or JSON, strictly; lines of JSON objects become a list. Raises ``Unread``."""
    lines = [line for line in data.splitlines() if line.strip()]
    if len(lines) > 1 and all(line.startswith(b"{") and line.endswith(b"}") for line in lines):
        return [_value(line) for line in lines]
    return _value(data)


def _value(data: bytes) -> Any:
    """JSON by its own parser: YAML reads escapes of JSON otherwise."""
    try:
        parsed = strict_json.parse(data)
    except StrictJsonError:
        return _yaml(data)
    if parsed.duplicates:
        raise Unread(f"the key {parsed.duplicates[0]} again")
    return parsed.value


def _yaml(data: bytes) -> Any:
    try:
        return strict_yaml.parse(data)
    except StrictYamlError as error:
        raise Unread(str(error)) from None


def _shape_problems(document: Any, file: str) -> Iterator[Problem]:
    """What the schema says, and that integers are no floats (JSON Schema takes 1.0 for 1)."""
    errors = islice(_validator().iter_errors(document), MOST + 1)
    for error in sorted(errors, key=lambda error: error.json_path):
        schema: Any = error.schema
        where = reduce(child, error.absolute_path, ROOT)
        expected = schema.get("description", error.message)
        found = _found(error)
        yield Problem(Code.PLAN_FIELD, Phase.PARSE, where, found, expected, file)
    for where, value in _floats(document, ROOT):
        expected = "an integer"
        yield Problem(Code.PLAN_FIELD, Phase.PARSE, where, show(value), expected, file)


def _found(error: jsonschema.ValidationError) -> str:
    """What stands there: the keys that are missing or unknown, or the value."""
    instance: Any = error.instance
    schema: Any = error.schema
    if error.validator == "required":
        missing = [key for key in schema["required"] if key not in instance]
        return f"no {', '.join(missing)}"
    if error.validator == "additionalProperties":
        known = schema["properties"]
        unknown = [key for key in instance if key not in known]
        return f"{'an unknown key' if len(unknown) == 1 else 'unknown keys'} {show(unknown)}"
    return show(instance)


def _floats(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, float) and value.is_integer():
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _floats(item, child(path, str(key)))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _floats(item, child(path, number))


@cache
def _validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))


def _layer(value: Mapping[str, list[int]]) -> LayerPlan:
    ((word, ids),) = value.items()
    return LayerPlan(tuple(ids), word == "keep")


def _unreadable(name: str, found: str, expected: str) -> Problem:
    return Problem(Code.PLAN_FILE, Phase.PARSE, ROOT, found, expected, name)
