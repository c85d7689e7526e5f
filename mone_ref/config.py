"""config.json -> what to build (``ModelConfig``) and what to substitute (``Substitution``)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mone_ref import declaration, dialects, explicit, model_config, quantisation, strict_json
from mone_ref.declaration import Bounds, Listed, Named
from mone_ref.declaration import LayerSubstitution as LayerSubstitution
from mone_ref.declaration import Substitution as Substitution
from mone_ref.errors import Code, Phase, Problem, Rejected, Severity, show
from mone_ref.fields import ROOT, Fields
from mone_ref.model_config import ModelConfig as ModelConfig
from mone_ref.strict_json import StrictJsonError

FILE = "config.json"
MAX_BYTES = 16 * 2**20
"""Largest file that is read. The config of a model with 10^5 substituted experts is under 1 MiB."""


@dataclass(frozen=True, eq=False)
class Config:
    """A config that was read without an error. ``findings`` holds warnings and notes.

    Equal only to itself, so that what follows from a large one can be kept (``layout.py``).
    """

    model: ModelConfig
    substitution: Substitution
    findings: tuple[Problem, ...]


class NotModelled(Rejected):
    """The config of a model that is not computed here, and may be right.

    ``problems`` say which architecture or feature is not in the table; ``findings`` are
    warnings and notes, as in ``Config``. ``config`` is what was read where the names and
    shapes of tensors follow from it all the same, else None. Without it a config that
    declares substituted experts is never one of these: its list cannot be checked.
    """

    def __init__(
        self,
        problems: Iterable[Problem],
        findings: Iterable[Problem],
        config: Config | None = None,
    ) -> None:
        super().__init__(problems)
        self.findings = tuple(findings)
        self.config = config


LIMITS = (Code.UNKNOWN_FAMILY, Code.MODEL_FEATURE)
"""Codes of what this release does not compute, as opposed to what is wrong."""


def read(directory: Path) -> Config:
    """Read ``directory/config.json``.

    Raises ``Rejected`` with every error in the file: ``CHECKPOINT`` when there is no
    file to read, then the codes of ``parse``.
    """
    path = directory / FILE
    try:
        if not directory.is_dir():
            raise _unread(Code.NOT_A_CHECKPOINT, show(str(directory)), "a directory")
        if not path.exists():
            raise _unread(Code.NO_CONFIG, "no such file", f"a file {FILE}")
        if not path.is_file():
            raise _unread(Code.UNREADABLE, "a directory or a device", "a regular file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _unread(Code.UNREADABLE, show(error.strerror), "a readable file") from None
    if len(data) > MAX_BYTES:
        raise _unread(Code.UNREADABLE, "more bytes", f"at most {MAX_BYTES} bytes")
    return parse(data)


def _unread(code: Code, found: str, expected: str) -> Rejected:
    return Rejected([Problem(code, Phase.PARSE, ROOT, found, expected)])


def parse(text: bytes, file: str = FILE) -> Config:
    """Read a config from its bytes; ``file`` is its name in messages.

    Raises ``Rejected`` with every error: ``CONFIG_JSON`` (FMT-22), ``CONFIG_MODEL``
    (FMT-1), ``SUBSTITUTION`` (FMT-2 to FMT-30). All are noticed at ``parse``. Raises
    its subclass ``NotModelled`` where the only reason is a model that is not computed here.
    """
    fields = _open(text, file)
    family = model_config.find_family(fields)
    sizes = model_config.read_sizes(fields, family) if family else {}
    dense = model_config.read_dense_layers(fields, family, sizes) if family else frozenset()
    model = model_config.read(fields, family, sizes, dense) if family else None
    quantisation.check(fields)
    stored_layers = model_config.count_stored_layers(fields, family, sizes) if family else None
    bounds = Bounds(family, stored_layers, dense, sizes.get("num_experts"))
    listed = declaration.read(fields, bounds)
    named = explicit.read(fields, bounds)
    dialects.check(fields, listed, named)
    if fields.errors or model is None or listed is None or named is None:
        raise _rejection(fields, listed, named)
    config = Config(model, bind(model, listed, named), tuple(fields.problems))
    if fields.limits:
        raise NotModelled(fields.limits, config.findings, config)
    return config


def bind(model: ModelConfig, listed: Listed, named: Named) -> Substitution:
    """The one declaration of a config, in either form (FMT-13)."""
    if named:
        return declaration.bind("explicit", named, model.num_experts, model.num_layers)
    names = declaration.derived_names(listed, model.family)
    return declaration.bind("approx", names, model.num_experts, model.num_layers)


def _rejection(fields: Fields, listed: Listed | None, named: Named | None) -> Rejected:
    """What to raise; ``listed`` and ``named`` are empty where the config declares nothing."""
    if listed == {} and named == {} and all(problem.code in LIMITS for problem in fields.errors):
        findings = (p for p in fields.problems if p.severity is not Severity.ERROR)
        return NotModelled(fields.errors + fields.limits, findings)
    return Rejected(fields.errors + fields.limits)


def _open(text: bytes, file: str) -> Fields:
    """The top-level object; a repeated key is an error, and reading goes on with its last value."""
    try:
        parsed = strict_json.parse(text)
    except StrictJsonError as error:
        problem = Problem(Code.JSON_SYNTAX, Phase.PARSE, ROOT, str(error), "a JSON document", file)
        raise Rejected([problem]) from None
    if not isinstance(parsed.value, dict):
        code, found = Code.JSON_NOT_OBJECT, show(parsed.value)
        raise Rejected([Problem(code, Phase.PARSE, ROOT, found, "a JSON object", file)])
    fields = Fields(parsed.value, file)
    for path in parsed.duplicates:
        fields.report(Code.JSON_DUPLICATE_KEY, path, "the key again", "each key once", "FMT-22")
    return fields
