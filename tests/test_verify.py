"""Damage of every kind to an output, each found where it is."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import handmade
import pytest
import rewriting

SHARD = "model-00001-of-00004.safetensors"
EXPERT = "model.layers.0.mlp.experts.{}.gate_proj.weight"
ROUTER = "model.layers.0.mlp.gate.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``source``, ``plan.json`` and the right output ``out``."""
    return rewriting.rewritten(tmp_path_factory.mktemp("verify"))


def header(path: Path) -> tuple[int, dict[str, dict[str, list[int]]]]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return 8 + length, json.loads(data[8 : 8 + length])


def flip(out: Path, tensor: str, byte: int) -> None:
    path = out / SHARD
    begin, entries = header(path)
    place = begin + entries[tensor]["data_offsets"][0] + byte
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def swap(out: Path, one: str, other: str) -> None:
    path = out / SHARD
    begin, entries = header(path)
    data = bytearray(path.read_bytes())
    first, second = (
        slice(*(begin + at for at in entries[n]["data_offsets"])) for n in (one, other)
    )
    data[first], data[second] = data[second], data[first]
    path.write_bytes(data)


def edit(path: Path, change: Callable[[dict], None]) -> None:
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document, indent=2) + "\n")


def rename(out: Path, old: str, new: str) -> None:
    path = out / SHARD
    path.write_bytes(path.read_bytes().replace(f'"{old}"'.encode(), f'"{new}"'.encode()))


INDEX = "model.safetensors.index.json"
MANIFEST = "mone-ref-manifest.json"
DAMAGE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a byte of a retained tensor": (
        lambda out: flip(out, EXPERT.format(1), 5),
        [f"OUTPUT/bytes {SHARD}: {EXPERT.format(1)}: found byte 5 is", "found byte 5 is"],
    ),
    "a pipe in place of the config": (
        lambda out: [(out / "config.json").unlink(), os.mkfifo(out / "config.json")],
        ["OUTPUT/files config.json: file: found a pipe", "expected the file that is planned"],
    ),
    "a broken link in place of a shard": (
        lambda out: [(out / SHARD).unlink(), (out / SHARD).symlink_to("nowhere")],
        [f"OUTPUT/files {SHARD}: file: found a pipe, a device or a broken link", "OUTPUT/files"],
    ),
    "a byte of a router slice": (
        lambda out: flip(out, ROUTER, 3 * 128 + 2),
        [f"OUTPUT/bytes {SHARD}: {ROUTER}: found byte 386 is"],
    ),
    "two experts swapped": (
        lambda out: swap(out, EXPERT.format(2), EXPERT.format(3)),
        [f"OUTPUT/bytes {SHARD}: {EXPERT.format(n)}: found byte 0 is" for n in (2, 3)],
    ),
    "a tensor under another name": (
        lambda out: rename(out, EXPERT.format(3), EXPERT.format(7)),
        [
            f"OUTPUT/tensors {SHARD}: {EXPERT.format(3)}: found no such tensor",
            f"OUTPUT/tensors {SHARD}: {EXPERT.format(7)}: found a tensor, expected none",
        ],
    ),
    "another format": (
        lambda out: rename(out, "pt", "np"),
        [f"OUTPUT/tensors {SHARD}: header: found other metadata"],
    ),
    "a key of the config": (
        lambda out: edit(out / "config.json", lambda c: c.update(num_experts=8)),
        ["OUTPUT/document config.json: $.num_experts: found 8, expected 4"],
    ),
    "an entry of the index": (
        lambda out: edit(
            out / INDEX, lambda i: i["weight_map"].update({ROUTER: SHARD.replace("1", "2", 1)})
        ),
        [f'OUTPUT/document {INDEX}: $.weight_map["{ROUTER}"]: found', f"expected '{SHARD}'"],
    ),
    "total_size": (
        lambda out: edit(out / INDEX, lambda i: i["metadata"].update(total_size=1)),
        [f"OUTPUT/document {INDEX}: $.metadata.total_size: found 1, expected 348288"],
    ),
    "a shard too many": (
        lambda out: shutil.copy(out / SHARD, out / "model-00005-of-00005.safetensors"),
        ["OUTPUT/files model-00005-of-00005.safetensors: file: found a file, expected none"],
    ),
    "a shard too few": (
        lambda out: (out / SHARD).unlink(),
        [f"OUTPUT/files {SHARD}: file: found no such file"],
    ),
    "a shard cut short": (
        lambda out: (out / SHARD).write_bytes((out / SHARD).read_bytes()[:-1]),
        [f"CHECKPOINT/truncated {SHARD}: file: found a file of"],
    ),
    "no auxiliary file": (
        lambda out: (out / "extra" / "chat.jinja").unlink(),
        ["OUTPUT/files extra/chat.jinja: file: found no such file"],
    ),
    "another auxiliary file": (
        lambda out: (out / "tokenizer.json").write_bytes(b"[]"),
        ["OUTPUT/bytes tokenizer.json: file: found byte 0 is 0x5b, expected 0x7b, byte 0 of"],
    ),
    "a copied file that cannot be read": (
        lambda out: (out / "tokenizer.json").chmod(0),
        ["CHECKPOINT/unreadable tokenizer.json: file: found permission denied"],
    ),
    "a document that cannot be read": (
        lambda out: (out / "config.json").chmod(0),
        ["CHECKPOINT/unreadable config.json: file: found permission denied"],
    ),
    "a directory that cannot be looked into": (
        lambda out: (out / "extra").chmod(0),
        [
            "CHECKPOINT/unreadable extra: file: found permission denied",
            "OUTPUT/files extra/chat.jinja: file: found no such file",
        ],
    ),
    "a directory too many that cannot be looked into": (
        lambda out: (out / "more").mkdir(mode=0),
        ["CHECKPOINT/unreadable more: file: found permission denied"],
    ),
    "no manifest": (
        lambda out: (out / MANIFEST).unlink(),
        [f"OUTPUT/manifest {MANIFEST}: file: found no such file or directory"],
    ),
    "another hash in the manifest": (
        lambda out: edit(out / MANIFEST, lambda m: m["outputs"][SHARD].update(sha256="0" * 64)),
        [f"OUTPUT/manifest {MANIFEST}: ", f"$.outputs['{SHARD}']"],
    ),
    "another input in the manifest": (
        lambda out: edit(out / MANIFEST, lambda m: m["inputs"][SHARD].update(size=1)),
        [f"$.inputs['{SHARD}']"],
    ),
    "another plan in the manifest": (
        lambda out: edit(out / MANIFEST, lambda m: m["plan"]["layers"]["0"].update(keep=[0])),
        ["OUTPUT/manifest", "$.plan"],
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_where_it_is(kind: str, made: Path, tmp_path: Path) -> None:
    damage, expected = DAMAGE[kind]
    out = tmp_path / "out"
    shutil.copytree(made / "out", out)
    damage(out)
    words = ("--against", made / "source", "--plan", made / "plan.json")
    status, said = rewriting.run("verify", out, *words, prefix=rewriting.WITHOUT_POWER)
    assert status == 1
    for part in expected:
        assert part in said


@pytest.mark.parametrize("given", [True, False], ids=["its plan", "the manifest's plan"])
def test_an_intact_output_is_proven(made: Path, given: bool) -> None:
    chosen = ("--plan", made / "plan.json") if given else ()
    status, said = rewriting.run(
        "verify", made / "out", "--against", made / "source", *chosen, "--json"
    )
    document = json.loads(said)
    assert (status, document["findings"]) == (0, [])
    assert (document["files"], document["tensors"]) == (9, 87)


def test_a_false_manifest_is_not_believed(made: Path, tmp_path: Path) -> None:
    """Bytes and manifest changed together agree with each other, and not with the source."""
    out = tmp_path / "out"
    shutil.copytree(made / "out", out)
    flip(out, EXPERT.format(0), 0)
    digest = rewriting.hashes(out)[SHARD]
    edit(out / MANIFEST, lambda m: m["outputs"][SHARD].update(sha256=digest))
    status, said = rewriting.run("verify", out, "--against", made / "source")
    assert (status, said.count("OUTPUT/")) == (1, 1)
    assert f"OUTPUT/bytes {SHARD}: {EXPERT.format(0)}" in said


def test_a_file_that_lies_elsewhere_is_not_proven(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(made / "out", out)
    (out / SHARD).rename(tmp_path / SHARD)
    (out / SHARD).symlink_to(tmp_path / SHARD)
    status, said = rewriting.run("verify", out, "--against", made / "source")
    assert (status, f"OUTPUT/files {SHARD}: file: found a link out of" in said) == (1, True)


def test_another_source_is_another_checkpoint(made: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(made / "source", source)
    path = source / SHARD
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    status, said = rewriting.run("verify", made / "out", "--against", source)
    assert (status, "OUTPUT/bytes" in said) == (1, True)


def test_nothing_to_compare_is_no_difference(made: Path, tmp_path: Path) -> None:
    handmade.write(tmp_path / "empty", {})
    for arguments in (
        (tmp_path / "absent", "--against", made / "source"),
        (made / "out", "--against", tmp_path / "empty"),
        (made / "out", "--against", made / "source", "--plan", tmp_path / "absent.json"),
    ):
        status, said = rewriting.run("verify", *arguments)
        assert (status, "not compared" in said) == (2, True)


def test_a_substituted_output_is_proven_and_its_constants_are_held(
    made: Path, tmp_path: Path
) -> None:
    gone = [expert for expert in range(8) if expert not in rewriting.KEEP]
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.approx_value"
        for layer in range(4)
        for expert in gone
    ]
    stored = {name: handmade.bf16([64], bytes([n, 0x3F])) for n, name in enumerate(names)}
    handmade.write(tmp_path, {"constants.safetensors": handmade.safetensors(stored)})
    plan = rewriting.plan(tmp_path / "plan.json")
    edit(plan, lambda p: p.update(kind="substitute", constants="constants.safetensors"))
    out = tmp_path / "out"
    words = ("--against", made / "source", "--plan", plan)
    assert rewriting.run("rewrite", made / "source", "--plan", plan, "--out", out)[0] == 0
    status, said = rewriting.run("verify", out, *words)
    assert (status, "proven" in said) == (0, True)
    elsewhere = ("verify", "out", "--against", made / "source", "--plan", "plan.json")
    assert rewriting.run(*elsewhere, cwd=tmp_path)[0] == 0
    status, said = rewriting.run("verify", out, "--against", made / "source")
    assert (status, "OUTPUT/" in said) == (2, False)
    assert f"PLAN/constants {MANIFEST}: $.plan.constants: found no file" in said
    shutil.copytree(made / "source", tmp_path / "source")  # with the constants beside it
    assert rewriting.run("verify", out, "--against", tmp_path / "source")[0] == 0
    constant = names[0]
    assert constant in header(out / SHARD)[1]
    flip(out, constant, 0)
    status, said = rewriting.run("verify", out, *words)
    assert status == 1
    assert f"OUTPUT/bytes {SHARD}: {constant}: found byte 0 is 0x01, expected 0x00" in said
