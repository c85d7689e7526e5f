"""Output files from blueprints made by hand: layout, copying and memory."""

import hashlib
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import handmade
import pytest
import rewriting

from mone_ref.errors import Code, Rejected
from mone_ref.rewrite import copying, journal, make, output_file, plan, writer
from mone_ref.rewrite.blueprint import Blueprint, OutputShard, OutputTensor, Piece
from mone_ref.rewrite.copying import BUFFER
from mone_ref.rewrite.output_file import OutputFile

DATA = bytes(range(200))


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A file of 200 bytes, each its own place."""
    path = tmp_path / "stored"
    path.write_bytes(DATA)
    return path


def blueprint(stored: Path, *tensors: OutputTensor) -> Blueprint:
    shard = OutputShard("model.safetensors", {"format": "pt"}, tensors)
    return Blueprint(stored.parent / "source", (shard,), {"config.json": b"{}"}, ())


def test_a_shard_byte_for_byte(stored: Path, tmp_path: Path) -> None:
    """A narrow type of odd length comes last, so that the wide one starts aligned (F16)."""
    (tmp_path / "source").mkdir()
    narrow = OutputTensor("a", "Q7", (3,), (Piece(stored, 1, 4),))
    router = OutputTensor("b", "F32", (2, 1), (Piece(stored, 8, 12), Piece(stored, 100, 104)))
    empty = OutputTensor("c", "BF16", (0,), ())
    writer.write(blueprint(stored, narrow, router, empty), tmp_path / "out")
    text = (
        b'{"__metadata__":{"format":"pt"},'
        b'"b":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},'
        b'"c":{"dtype":"BF16","shape":[0],"data_offsets":[8,8]},'
        b'"a":{"dtype":"Q7","shape":[3],"data_offsets":[8,11]}}'
    )
    text += b" " * (-len(text) % 8)
    data = DATA[8:12] + DATA[100:104] + DATA[1:4]
    expected = len(text).to_bytes(8, "little") + text + data
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected
    manifest = json.loads((tmp_path / "out" / "mone-ref-manifest.json").read_bytes())
    digest = hashlib.sha256(expected).hexdigest()
    assert manifest["outputs"]["model.safetensors"] == {"size": len(expected), "sha256": digest}


def test_neighbours_are_joined(stored: Path) -> None:
    other = stored.with_name("other")
    pieces = [Piece(stored, 0, 4), Piece(stored, 4, 4), Piece(stored, 4, 8), Piece(other, 8, 9)]
    assert output_file.coalesced(pieces) == (Piece(stored, 0, 8), Piece(other, 8, 9))
    apart = (Piece(stored, 4, 8), Piece(stored, 0, 4))
    assert output_file.coalesced(apart) == apart


@pytest.mark.parametrize("size", [0, 1, BUFFER - 1, BUFFER, BUFFER + 1, 2 * BUFFER, 2 * BUFFER + 9])
@pytest.mark.parametrize("head", [b"", b"head"])
def test_every_length_around_the_buffer(size: int, head: bytes, tmp_path: Path) -> None:
    source = tmp_path / "source"
    content = (bytes(range(251)) * (size // 251 + 1))[:size]
    source.write_bytes(b"x" + content)
    middle = 1 + size // 3
    pieces = tuple(Piece(source, *ends) for ends in ((1, middle), (middle, size + 1)))
    told: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        file = OutputFile("out", head, pieces)
        digest = copying.write_file(file, tmp_path / "out", pool, told.append)
    assert (tmp_path / "out").read_bytes() == head + content
    assert digest == hashlib.sha256(head + content).hexdigest()
    assert sum(told) == file.size == len(head) + size


def test_a_source_shorter_than_its_header_says(stored: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    long = OutputTensor("a", "U8", (2,), (Piece(stored, 199, 201),))
    with pytest.raises(Rejected, match="the end of the file at byte 200") as refused:
        writer.write(blueprint(stored, long), tmp_path / "out")
    assert refused.value.codes == (Code.TRUNCATED,)
    assert not (tmp_path / "out").exists()


def test_equal_rewrites_have_equal_manifests(tmp_path: Path) -> None:
    """Wherever source and output lie, and whenever they were written."""
    manifests = []
    for place in (tmp_path / "one", tmp_path / "two"):
        rewriting.checkpoint(place / "source")
        plan = rewriting.plan(place / "plan.json")
        words = (place / "source", "--plan", plan, "--out", place / "out")
        assert rewriting.run("rewrite", *words)[0] == 0
        manifests.append((place / "out" / "mone-ref-manifest.json").read_bytes())
    assert manifests[0] == manifests[1]


def test_a_rewrite_is_one_however_its_files_are_spelled(tmp_path: Path) -> None:
    """Also where the plan names constants in the source by a path of its own."""
    source = rewriting.checkpoint(tmp_path / "source")
    name = "model.layers.0.mlp.experts.1.approx_value"
    constants = {name: handmade.bf16([64], b"\x80\x3f")}
    (source / "extra" / "constants.safetensors").write_bytes(handmade.safetensors(constants))
    layers = {"0": {"substitute": [1]}}
    said = {"version": 1, "kind": "substitute", "form": "approx", "layers": layers}
    (tmp_path / "link").symlink_to(source)
    spellings = [
        ("source", "source/extra/constants.safetensors"),
        (source, source / "extra" / "constants.safetensors"),
        (f"../{tmp_path.name}/link", "link/extra/../extra/constants.safetensors"),
    ]
    manifests = []
    for at, (spelled, file) in enumerate(spellings):
        plan, out = tmp_path / f"{at}.json", tmp_path / f"out-{at}"
        plan.write_text(json.dumps({**said, "constants": str(file)}))
        words = ("rewrite", spelled, "--plan", f"{at}.json", "--out", out)
        status, text = rewriting.run(*words, cwd=tmp_path)
        assert status == 0, text
        manifests.append((out / "mone-ref-manifest.json").read_text())
    assert manifests[0] == manifests[1] == manifests[2]
    written = json.loads(manifests[0])
    assert written["plan"]["constants"] == "extra/constants.safetensors"
    assert written["plan"]["constants"] in written["inputs"]


MEMORY = """
import sys
from pathlib import Path
from mone_ref.rewrite import writer
from mone_ref.rewrite.blueprint import Blueprint, OutputShard, OutputTensor, Piece
source, out, size = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
tensor = OutputTensor("a", "U8", (size,), (Piece(source / "stored", 0, size),))
shard = OutputShard("model.safetensors", {"format": "pt"}, (tensor,))
writer.write(Blueprint(source, (shard,), {}, ()), out)
assert "torch" not in sys.modules and "safetensors" not in sys.modules
# Of this program alone: ru_maxrss begins with what the process was that started it.
status = Path("/proc/self/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))
"""


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    """F26: one tensor of 256 MB (a hole in a file) takes no more than one of 16 MB."""
    peaks = []
    for name, size in (("small", 16 << 20), ("large", 256 << 20)):
        source = tmp_path / name
        source.mkdir()
        with (source / "stored").open("wb") as file:
            file.truncate(size)
        words = [
            sys.executable,
            "-c",
            MEMORY,
            str(source),
            str(tmp_path / f"{name}-out"),
            str(size),
        ]
        done = subprocess.run(words, cwd=rewriting.ROOT, check=True, capture_output=True, text=True)
        peaks.append(int(done.stdout) * 1024)
        shutil.rmtree(tmp_path / f"{name}-out")
    assert peaks[1] - peaks[0] < 2 * BUFFER


def test_files_of_the_source_are_never_taken_for_unfinished_ones(tmp_path: Path) -> None:
    source = rewriting.checkpoint(tmp_path / "in")
    for name in ("config.json", "mone-ref-manifest.json", "tokenizer.json"):
        (source / f"{name}.unfinished").write_text(name)
    plan, out = rewriting.plan(tmp_path / "plan.json"), tmp_path / "out"
    assert rewriting.run("rewrite", source, "--plan", plan, "--out", out)[0] == 0
    assert rewriting.run("verify", out, "--against", source)[0] == 0


@pytest.mark.parametrize("json", [[], ["--json"]])
def test_paths_that_are_too_long(tmp_path: Path, json: list[str]) -> None:
    source = rewriting.checkpoint(tmp_path / "in")
    plan, path = rewriting.plan(tmp_path / "plan.json"), "/".join(["o" * 200] * 30)
    assert rewriting.run("rewrite", source, "--plan", plan, "--out", path, *json)[0] == 1
    assert rewriting.run("verify", path, "--against", source, *json)[0] == 2


@pytest.mark.parametrize("state", [[1], [1, 2, 3, 4], 1, ["a", "b", "c"], None])
def test_a_broken_journal_is_none(state: object, tmp_path: Path) -> None:
    document = {"identity": "0", "states": {"a": state}, "finished": {}}
    (tmp_path / journal.NAME).write_text(json.dumps(document))
    assert journal.load(tmp_path) is None


def test_a_rewrite_goes_on_however_its_source_is_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewriting.checkpoint(tmp_path / "in")
    chosen = plan.read(rewriting.plan(tmp_path / "plan.json"))
    begun: list[int] = []

    def stop_at_the_second_file(size: int) -> None:
        begun.extend([size] if size == 0 else [])
        if len(begun) == 2:
            raise RuntimeError

    first = make.blueprint(tmp_path / "in", chosen).blueprint
    assert first
    with pytest.raises(RuntimeError):
        writer.write(first, tmp_path / "out", advance=stop_at_the_second_file, workers=1)
    monkeypatch.chdir(tmp_path)
    second = make.blueprint("in", chosen).blueprint
    assert second
    assert len(writer.write(second, Path("out")).resumed) == 1


def test_a_link_in_place_of_the_partial_output_is_not_followed(tmp_path: Path) -> None:
    source = rewriting.checkpoint(tmp_path / "in")
    before = rewriting.hashes(source)
    (tmp_path / ".out.partial").symlink_to(source)
    words = ("--plan", rewriting.plan(tmp_path / "plan.json"), "--out", tmp_path / "out")
    status, said = rewriting.run("rewrite", source, *words, "--restart")
    assert (status, "OUTPUT/write" in said) == (1, True)
    assert rewriting.hashes(source) == before


def test_a_directory_that_may_not_be_read_is_not_left_out(tmp_path: Path) -> None:
    source = rewriting.checkpoint(tmp_path / "in")
    (source / "extra").chmod(0)
    words = ("--plan", rewriting.plan(tmp_path / "plan.json"), "--out", tmp_path / "out")
    status, said = rewriting.run("rewrite", source, *words, prefix=rewriting.WITHOUT_POWER)
    assert (status, "CHECKPOINT/unreadable" in said) == (1, True)
    assert "extra" in said
    assert not (tmp_path / "out").exists()
