"""Case files: what is loaded, what is done with it, what an engine must do.

One YAML file per case below ``conformance/cases``, checked against
``conformance/case.schema.json``. The id of a case is its path.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import jsonschema

from mone_ref import strict_yaml
from mone_ref.backend import FEATURES, PARALLEL
from mone_ref.checkpoint.opening import read_regular
from mone_ref.errors import Phase, show
from mone_ref.strict_yaml import StrictYamlError
from mone_ref.suite import layer_cases
from mone_ref.suite.edits import Edit
from mone_ref.suite.errormap import CODES, group
from mone_ref.suite.layer_cases import LayerCase

PLAIN = "-plain"
"""How the name of a fixture without substitution ends."""


class CaseError(ValueError):
    """A case file that cannot be used; names the file and the place in it."""


class Kind(StrEnum):
    """What is done with the checkpoint; ``layer`` does without one."""

    OUTPUT = "output"
    CONTROL = "control"
    ROWS = "rows"
    DECODE = "decode"
    REFUSAL = "refusal"
    UPDATE = "update"
    UPDATE_REFUSAL = "update-refusal"
    RELOAD_REFUSAL = "reload-refusal"
    LAYER = "layer"


@dataclass(frozen=True)
class Setting:
    """How checkpoints are loaded: the features that are requested, and the numbers of ranks."""

    features: frozenset[str] = frozenset()
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    @property
    def ranks(self) -> dict[str, int]:
        """What of ``PARALLEL`` is asked for, beyond one rank."""
        return {name: getattr(self, name) for name in PARALLEL if getattr(self, name) > 1}

    @property
    def words(self) -> tuple[str, ...]:
        """The setting in words; none where it is plain."""
        return (*sorted(self.features), *(f"{name}={n}" for name, n in self.ranks.items()))

    @property
    def without_features(self) -> Setting:
        """The same ranks, and nothing requested."""
        return replace(self, features=frozenset())


USUAL = Setting()
"""One rank, and no request."""


@dataclass(frozen=True)
class Expected:
    """What the engine must do.

    ``groups`` are the code groups of a refusal, of which one must be named, no later
    than ``phase``; empty where nothing is refused. ``or_conforming`` also allows right
    answers; ``then_unchanged`` judges the answers after the refusal.
    """

    groups: frozenset[str] = frozenset()
    phase: Phase = Phase.LOAD
    or_conforming: bool = False
    then_unchanged: bool = False


@dataclass(frozen=True)
class Change:
    """What is handed to ``update`` or ``reload``: another fixture, after edits.

    ``after`` is a fixture to which an update goes first; empty where there is none.
    """

    source: str
    edits: tuple[Edit, ...]
    after: str = ""


@dataclass(frozen=True)
class Case:
    """One case file.

    ``control`` is the fixture's plain sibling (GEN-3). ``twin`` is resolved: the
    fixture and edits that must load and answer for a refusal to prove something.
    ``dtypes`` is ``each``, ``first`` or a tuple of names. A case of kind ``layer`` has a
    ``layer`` and no fixture.
    """

    id: str
    kind: Kind
    statement: str
    why: str
    clauses: tuple[str, ...]
    fixture: str
    control: str
    expected: Expected
    edits: tuple[Edit, ...] = ()
    change: Change | None = None
    twin: tuple[str, tuple[Edit, ...]] | None = None
    requires: tuple[str, ...] = ()
    setting: Setting = USUAL
    kills: tuple[str, ...] = ()
    dtypes: str | tuple[str, ...] = "each"
    layer: LayerCase | None = None

    @property
    def fixtures(self) -> tuple[str, ...]:
        """Every fixture whose answers may be judged."""
        judged = (self.fixture, self.control, self.change.source if self.change else "")
        return tuple(dict.fromkeys(filter(None, judged)))

    def dtypes_of(self, offered: Sequence[str]) -> tuple[str, ...]:
        """At which of the offered dtypes the case runs; those it names itself, offered or not."""
        if isinstance(self.dtypes, tuple):
            return self.dtypes
        return tuple(offered) if self.dtypes == "each" else tuple(offered[:1])


def load(root: Path) -> tuple[Case, ...]:
    """All cases below ``root/conformance/cases``, by id. Raises ``CaseError``.

    Checked beyond the schema: the id is the path, codes and features exist, fixtures
    exist, controls exist for judged answers, and a twin is an output case or a fixture.
    """
    directory = root / "conformance" / "cases"
    documents = read_documents(root)
    controls = read_controls(root / "fixtures")
    cases = []
    for name, document in documents.items():
        for place, flaw in flaws(name, document, documents, controls, root):
            raise CaseError(f"{directory / name}.yaml: {place}: {flaw}")
        cases.append(build(document, documents, controls, root))
    return tuple(cases)


def read_documents(root: Path) -> dict[str, dict[str, Any]]:
    """Every case file by its path below ``cases``, checked against the schema."""
    directory = root / "conformance" / "cases"
    validator = read_schema(root / "conformance" / "case.schema.json")
    documents = {
        path.relative_to(directory).with_suffix("").as_posix(): read_document(path, validator)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    if not documents:
        raise CaseError(f"{directory}: no case")
    return documents


def read_controls(fixtures: Path) -> dict[str, str]:
    """Every fixture with its plain sibling: itself where nothing is substituted, or one that its
    recipe shares with another fixture. Raises ``CaseError``."""
    controls = {}
    for golden in fixtures.glob("*/golden.safetensors"):
        name, recipe = golden.parent.name, golden.with_name("recipe.yaml")
        sibling = name if name.endswith(PLAIN) else f"{name}{PLAIN}"
        document = read_yaml(recipe) if recipe.exists() else {}
        controls[name] = document.get("control", sibling)
    return controls


def read_schema(path: Path) -> jsonschema.Draft202012Validator:
    """The validator for case files."""
    schema = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def read_document(path: Path, validator: jsonschema.Draft202012Validator) -> dict[str, Any]:
    """One case file, checked against the schema. Raises ``CaseError``."""
    if path.suffix != ".yaml":
        raise CaseError(f"{path}: only .yaml files may lie here")
    document = read_yaml(path)
    errors = list(validator.iter_errors(document))
    if errors:
        raise CaseError(f"{path}: {explain(errors)}")
    checked: dict[str, Any] = document
    return checked


def read_yaml(path: Path) -> Any:
    """The data of a file. Raises ``CaseError``."""
    try:
        return strict_yaml.parse(read_regular(path))
    except (OSError, StrictYamlError) as error:
        raise CaseError(f"{path}: {error}") from error


def explain(errors: Sequence[jsonschema.ValidationError]) -> str:
    """The plainest of several schema errors: what any case needs before what its kind needs."""
    general = [error for error in errors if error.absolute_schema_path[0] != "allOf"]
    error = jsonschema.exceptions.best_match(general or errors)
    message = error.message
    if error.validator == "not":
        message = f"a case of this kind has no {error.validator_value['required'][0]}"
    return f"{error.json_path}: {show(message, 300)}"


def flaws(
    name: str,
    document: Mapping[str, Any],
    documents: Mapping[str, Mapping[str, Any]],
    controls: Mapping[str, str],
    root: Path,
) -> Iterator[tuple[str, str]]:
    """JSON path and message for what the schema cannot see."""
    if document["id"] != name:
        yield "$.id", f"{document['id']} is not the path of the file, {name}"
    for code in as_list(refusal(document).get("rejected", {}).get("code", [])):
        if code not in CODES:
            yield "$.expect.rejected.code", f"no such code: {code}"
    if document["kind"] == Kind.LAYER:
        yield from layer_cases.flaws(document, root)
        return
    for feature in document.get("features", []):
        if feature not in FEATURES:
            yield "$.features", f"no such feature: {feature}"
    yield from fixture_flaws(document, controls)
    twin = document.get("twin", document["fixture"])
    if twin not in controls and documents.get(twin, {}).get("kind") != Kind.OUTPUT:
        yield "$.twin", f"{twin} is neither an output case nor a fixture"


def fixture_flaws(
    document: Mapping[str, Any], controls: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Fixtures that a case needs and that do not exist."""
    needed = {"$.fixture": document["fixture"]}
    change = document.get("change", {})
    needed |= {f"$.change.{key}": change[key] for key in ("from", "after") if key in change}
    if document["kind"] in (Kind.OUTPUT, Kind.DECODE, Kind.UPDATE) or "or" in document["expect"]:
        needed["$.fixture (its control)"] = controls.get(document["fixture"], "")
    for place, fixture in needed.items():
        if fixture not in controls:
            yield place, f"no such fixture: {fixture}"


def refusal(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of an expectation that speaks of a refusal: a layer case may allow one."""
    expect: Mapping[str, Any] = document["expect"]
    return expect.get("or", {}) if document["kind"] == Kind.LAYER else expect


def build(
    document: Mapping[str, Any],
    documents: Mapping[str, Mapping[str, Any]],
    controls: Mapping[str, str],
    root: Path,
) -> Case:
    """A case from its checked document."""
    kind = Kind(document["kind"])
    refuses = kind in (Kind.REFUSAL, Kind.UPDATE_REFUSAL, Kind.RELOAD_REFUSAL)
    dtypes = document.get("dtypes", "first" if refuses else "each")
    change = document.get("change")
    return Case(
        id=document["id"],
        kind=kind,
        statement=document["statement"],
        why=" ".join(document["why"].split()),
        clauses=tuple(document["clauses"]),
        fixture=document.get("fixture", ""),
        control=controls.get(document.get("fixture", ""), ""),
        expected=build_expected(refusal(document)),
        edits=tuple(document.get("edits", ())),
        change=build_change(change) if change else None,
        twin=build_twin(document["twin"], documents) if "twin" in document else None,
        requires=tuple(document.get("requires", ())),
        setting=build_setting(document),
        kills=tuple(document.get("kills", ())),
        dtypes=dtypes if isinstance(dtypes, str) else tuple(dtypes),
        layer=layer_cases.build(document, root) if kind is Kind.LAYER else None,
    )


def build_setting(document: Mapping[str, Any]) -> Setting:
    """How the checkpoints of a case are loaded."""
    ranks = {name: document.get(name, 1) for name in PARALLEL}
    return Setting(frozenset(document.get("features", ())), **ranks)


def build_expected(expect: Mapping[str, Any]) -> Expected:
    """The expectation in a case file; codes count by their group."""
    rejected = expect.get("rejected")
    if rejected is None:
        return Expected()
    return Expected(
        groups=frozenset(group(code) for code in as_list(rejected["code"])),
        phase=Phase(rejected["phase"]),
        or_conforming="or" in expect,
        then_unchanged="then" in expect,
    )


def build_change(change: Mapping[str, Any]) -> Change:
    """What an update or a reload is made of."""
    return Change(change["from"], tuple(change.get("edits", ())), change.get("after", ""))


def build_twin(
    name: str, documents: Mapping[str, Mapping[str, Any]]
) -> tuple[str, tuple[Edit, ...]]:
    """Fixture and edits of a twin, which is an output case or a fixture itself."""
    if name in documents:
        return documents[name]["fixture"], tuple(documents[name].get("edits", ()))
    return name, ()


def as_list(value: str | list[str]) -> list[str]:
    """One code, or several."""
    return [value] if isinstance(value, str) else value
