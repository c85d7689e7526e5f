"""A checkpoint to rewrite, its plans, and the command in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import make_checkpoint
from patience import HANG

ROOT = Path(__file__).resolve().parent.parent
MODEL = replace(
    make_checkpoint.OLMOE,
    config={
        **make_checkpoint.OLMOE.config,
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    layers=4,
    experts=8,
    hidden=64,
    intermediate=32,
    shards=4,
)
KEEP = [0, 2, 3, 7]
WITHOUT_POWER = ("setpriv", "--bounding-set", "-all") if os.geteuid() == 0 else ()
"""Root may read and write everywhere: its process gives that power up before it starts."""
COMMAND = [sys.executable, "-c", "from mone_ref.cli import main; main()"]


def checkpoint(directory: Path, model: make_checkpoint.Model = MODEL) -> Path:
    """Random bytes in every tensor, so that no two experts are alike."""
    make_checkpoint.write(model, directory)
    (directory / "tokenizer.json").write_bytes(b"{}")
    (directory / "extra").mkdir()
    (directory / "extra" / "chat.jinja").write_bytes(b"template")
    drawn = random.Random(1)
    for path in directory.glob("*.safetensors"):
        with path.open("r+b") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            file.seek(begin)
            left = path.stat().st_size - begin
            while left:
                left -= file.write(drawn.randbytes(min(left, 1 << 20)))
    return directory


def large(directory: Path) -> Path:
    """As ``checkpoint``, of 340 MB in 12 shards: several blocks in each."""
    config = {**MODEL.config, "hidden_size": 1024, "intermediate_size": 1024}
    sizes = {"hidden": 1024, "intermediate": 1024, "shards": 12, "layers": 4}
    return checkpoint(directory, replace(MODEL, config=config, **sizes))


def plan(path: Path, keep: list[int] = KEEP, layers: int = 4) -> Path:
    """A plan that prunes every layer to the same experts."""
    listed = {str(layer): {"keep": keep} for layer in range(layers)}
    path.write_text(json.dumps({"version": 1, "kind": "prune", "layers": listed}))
    return path


def no_file_above(size: int) -> tuple[str, ...]:
    """What starts a process that can write no file of more bytes.

    No bytecode either: Python would leave its files behind, cut where the limit was.
    """
    return ("env", "PYTHONDONTWRITEBYTECODE=1", "prlimit", f"--fsize={size}:{size}")


def start(
    *arguments: object,
    prefix: tuple[str, ...] = (),
    command: Sequence[str] = COMMAND,
    **options: Any,
) -> subprocess.Popen[str]:
    """``mone-ref ARGUMENTS`` in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [*prefix, *command, *map(str, arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=environment, **pipes, **options)


def run(*arguments: object, **options: Any) -> tuple[int, str]:
    """Exit code and output of ``mone-ref ARGUMENTS``."""
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=HANG)
    assert "Traceback" not in out + err, out + err
    return process.returncode, out + err


def rewritten(root: Path) -> Path:
    """``source``, ``plan.json`` and the right output ``out`` in a directory, which is returned."""
    checkpoint(root / "source")
    plan(root / "plan.json")
    words = ("rewrite", root / "source", "--plan", root / "plan.json", "--out", root / "out")
    status, said = run(*words)
    assert status == 0, said
    return root


def hashes(directory: Path) -> dict[str, str]:
    """Every file of a directory and its sha256."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
