"""How a server is started and asked: ``--serve-cmd`` and its ``--engine-arg``s."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mone_ref.backend import PARALLEL, LoadOptions
from mone_ref.backends import completions
from mone_ref.suite.options import OptionError

HOST = "127.0.0.1"
"""Servers are asked over the loopback interface only."""

PLACEHOLDERS = (
    "checkpoint",
    "port",
    "host",
    "dtype",
    "max_tokens",
    "max_prompts",
    "tensor_parallel",
    "pipeline_parallel",
)
"""Words in braces that ``--serve-cmd`` may hold. ``max_tokens`` counts a prompt and the one
token after it that servers generate in passing."""

NEEDED = ("checkpoint", "port")

PLAIN = (
    "name",
    "version",
    "device",
    "dtypes",
    "logprobs",
    "top",
    "ready_path",
    "batches",
)
TABLES = ("compute", "feature")
BATCHES = ("list", "concurrent")
UNKNOWN = "unknown"

_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True)
class ServerSettings:
    """Everything about a server that is known before it runs.

    ``command`` holds placeholders; ``engine`` is the program's name unless another is given.
    ``compute`` maps dtypes to arithmetic, ``features`` names to the words that request
    them. ``dialect`` is empty where the first answer decides; ``top`` is how many
    log-probabilities per token are asked for, 0 for as many as there are. ``batches`` are
    the ways in which several prompts are sent, in turn.
    """

    command: tuple[str, ...]
    engine: str
    version: str = UNKNOWN
    device: str = UNKNOWN
    compute: Mapping[str, str] = field(default_factory=lambda: {"float32": "float32"})
    features: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dialect: str = ""
    top: int = 0
    ready_path: str = ""
    batches: tuple[str, ...] = BATCHES

    @property
    def parallel(self) -> frozenset[str]:
        """Those of ``PARALLEL`` that the command is told of."""
        told = {name for word in self.command for name in _PLACEHOLDER.findall(word)}
        return frozenset(PARALLEL) & told

    def words(self, checkpoint: Path, port: int, options: LoadOptions) -> list[str]:
        """The command for one checkpoint, with the words of the requested features at its end."""
        values = {
            "checkpoint": str(checkpoint),
            "port": str(port),
            "host": HOST,
            "dtype": options.dtype,
            "max_tokens": str(options.max_tokens + 1),
            "max_prompts": str(options.max_prompts),
            "tensor_parallel": str(options.tensor_parallel),
            "pipeline_parallel": str(options.pipeline_parallel),
        }
        extra = [word for name in sorted(options.features) for word in self.features[name]]
        return [
            _PLACEHOLDER.sub(lambda found: values[found[1]], word)
            for word in (*self.command, *extra)
        ]


def read(command: str, arguments: Iterable[str]) -> ServerSettings:
    """Settings from ``--serve-cmd`` and ``--engine-arg KEY=VALUE``. Raises ``OptionError``."""
    words = read_command(command)
    plain, tables = read_arguments(arguments)
    compute = {dtype: dtype for dtype in plain.get("dtypes", "float32").split(",")}
    foreign = sorted(set(tables["compute"]) - set(compute))
    if foreign:
        raise OptionError(f"--engine-arg compute.{foreign[0]}: dtypes are {', '.join(compute)}")
    features = {name: split(f"feature.{name}", text) for name, text in tables["feature"].items()}
    for name, given in features.items():
        check_placeholders(f"--engine-arg feature.{name}", given)
    return ServerSettings(
        command=words,
        engine=plain.get("name", Path(words[0]).name),
        version=plain.get("version", UNKNOWN),
        device=plain.get("device", UNKNOWN),
        compute=compute | tables["compute"],
        features=features,
        dialect=one_of("logprobs", plain.get("logprobs", ""), ("", *completions.DIALECTS)),
        top=whole_number("top", plain.get("top", "0")),
        ready_path=plain.get("ready_path", ""),
        batches=tuple(
            one_of("batches", way, BATCHES)
            for way in plain.get("batches", ",".join(BATCHES)).split(",")
        ),
    )


def read_command(command: str) -> tuple[str, ...]:
    """The words of a command, quoted as for a shell, whose program exists."""
    words = split("--serve-cmd", command)
    if not words:
        raise OptionError("--backend=server needs --serve-cmd, the command that starts the server")
    named = check_placeholders("--serve-cmd", words)
    missing = [name for name in NEEDED if name not in named]
    if missing:
        raise OptionError(f"--serve-cmd {command!r}: {{{missing[0]}}} is missing")
    if shutil.which(words[0]) is None:
        raise OptionError(f"--serve-cmd: there is no program {words[0]!r}")
    return words


def read_arguments(arguments: Iterable[str]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Plain settings, and those of the form ``table.key=value``; every value is text."""
    plain: dict[str, str] = {}
    tables: dict[str, dict[str, str]] = {table: {} for table in TABLES}
    for text in arguments:
        key, _, value = text.partition("=")
        table, dot, entry = key.partition(".")
        if dot and table in tables and entry:
            tables[table][entry] = value
        elif key in PLAIN:
            plain[key] = value
        else:
            known = ", ".join((*PLAIN, *(f"{table}.NAME" for table in TABLES)))
            raise OptionError(f"--engine-arg {text}: a server has {known}")
    return plain, tables


def check_placeholders(where: str, words: Iterable[str]) -> set[str]:
    """Names of the placeholders in some words, each of which must be known."""
    named = {name for word in words for name in _PLACEHOLDER.findall(word)}
    unknown = sorted(named - set(PLACEHOLDERS))
    if unknown:
        known = " ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise OptionError(f"{where}: {{{unknown[0]}}} is no placeholder; known: {known}")
    return named


def split(where: str, text: str) -> tuple[str, ...]:
    """Words of a text, quoted as for a shell."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise OptionError(f"{where} {text!r}: {error}") from error


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> str:
    """A value that must be one of a few."""
    if value not in allowed:
        named = " or ".join(filter(None, allowed))
        raise OptionError(f"--engine-arg {key}={value}: expected {named}")
    return value


def whole_number(key: str, value: str) -> int:
    """A number that is not negative."""
    if not (value.isascii() and value.isdigit()):
        raise OptionError(f"--engine-arg {key}={value}: expected a whole number")
    return int(value)
