"""What can go wrong while an output is written, done to a real process; docs/rewrite.md has the
table of what follows, held to what happens here."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import rewriting
from patience import HANG

ROWS = (rewriting.ROOT / "docs" / "rewrite.md").read_text(encoding="utf-8").splitlines()

NOTHING, PARTIAL = "nothing", "the partial output"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """``source``, ``plan.json`` and the output of a rewrite that nothing disturbed."""
    root = tmp_path_factory.mktemp("failures")
    rewriting.large(root / "source")
    rewriting.plan(root / "plan.json")
    status, said = rewrite(root, root / "right")
    assert status == 0, said
    before = rewriting.hashes(root / "source")
    yield root
    assert rewriting.hashes(root / "source") == before  # whatever went wrong
    shutil.rmtree(root)  # half a gigabyte, which pytest would keep three times


@pytest.fixture(autouse=True)
def emptied(tmp_path: Path) -> Iterator[None]:
    """Outputs are large: none stays."""
    yield
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def arguments(root: Path, out: Path, *more: object) -> tuple[object, ...]:
    return ("rewrite", root / "source", "--plan", root / "plan.json", "--out", out, *more)


def rewrite(root: Path, out: Path, *more: object, **options: object) -> tuple[int, str]:
    return rewriting.run(*arguments(root, out, *more), **options)


def partial(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


def finished(out: Path) -> dict[str, tuple[int, int]]:
    """Shards that the journal of a partial output names: inode and time of change."""
    journal = partial(out) / "journal.json"
    names = json.loads(journal.read_bytes())["finished"] if journal.exists() else {}
    shards = {name for name in names if name.endswith(".safetensors")}
    found = {name: (partial(out) / "output" / name).stat() for name in shards}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in found.items()}


def holds(failure: str, status: int, said: str, code: str, left: str, then: str) -> None:
    """The table says what happened."""
    assert code in said
    shown = f"`{code}`" if "/" in code else code
    assert f"| {failure} | {status} | {shown} | {left} | {then} |" in ROWS


def resumes(root: Path, out: Path) -> str:
    """Run the command again: what was finished stays, and the output is the right one."""
    before = finished(out)
    status, said = rewrite(root, out, "--json")
    assert status == 0, said
    assert before.keys() <= set(json.loads(said)["resumed"])
    for name, (inode, changed) in before.items():
        stat = (out / name).stat()
        assert (stat.st_ino, stat.st_mtime_ns) == (inode, changed)
    assert rewriting.hashes(out) == rewriting.hashes(root / "right")
    assert not partial(out).exists()
    return "goes on"


HOLDS_ITSELF = """
import json, os, signal, sys, threading
from pathlib import Path
from mone_ref.cli import main

partial, shards, looking = Path(sys.argv.pop(1)), int(sys.argv.pop(1)), threading.Lock()

def look(event, _):
    if event != "open" or not looking.acquire(blocking=False):
        return  # not in the midst of a file, or this very look
    if (partial / "output").exists():
        names = json.loads((partial / "journal.json").read_bytes())["finished"]
        if sum(name.endswith(".safetensors") for name in names) >= shards:
            os.kill(os.getpid(), signal.SIGSTOP)
            return  # once
    looking.release()

sys.addaudithook(look)
main()
"""
"""The command. Whoever watched it from outside might look too late: it stops itself where a file is
opened next to so many finished shards."""


def stopped(root: Path, out: Path, shards: int) -> subprocess.Popen[str]:
    """A rewrite held at a moment at which so many shards are finished, and not all."""
    held = (sys.executable, "-c", HOLDS_ITSELF, str(partial(out)), str(shards))
    process = rewriting.start(*arguments(root, out), command=held)
    how = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert how is not None
    assert how.si_code == os.CLD_STOPPED, process.communicate()
    assert shards <= len(finished(out)) < 12
    return process


@pytest.mark.parametrize("shards", [0, 1, 6])
@pytest.mark.parametrize(
    ("number", "failure", "status", "code"),
    [
        (signal.SIGKILL, "`kill -9`", -9, ""),
        (signal.SIGINT, "SIGINT", 130, "interrupted by SIGINT"),
        (signal.SIGTERM, "SIGTERM", 143, "interrupted by SIGTERM"),
    ],
)
def test_a_signal_leaves_what_can_go_on(
    made: Path, tmp_path: Path, shards: int, number: int, failure: str, status: int, code: str
) -> None:
    out = tmp_path / "out"
    process = stopped(made, out, shards)
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    said = "".join(process.communicate(timeout=HANG))
    assert process.returncode == status
    assert "Traceback" not in said
    assert not out.exists()
    holds(failure, abs(status) if status > 0 else 137, said, code, PARTIAL, resumes(made, out))


def test_a_file_that_may_not_grow(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, said = rewrite(made, out, prefix=rewriting.no_file_above(12 << 20))
    assert "file too large" in said
    assert not out.exists()
    holds("a write fails", status, said, "OUTPUT/write", PARTIAL, resumes(made, out))


def test_too_little_space(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one thing that is played: a full disk would be everybody's."""
    from mone_ref.errors import Rejected
    from mone_ref.rewrite import make, plan, writer

    blueprint = make.blueprint(made / "source", plan.read(made / "plan.json")).blueprint
    assert blueprint is not None
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(Rejected, match="found 1000 bytes free") as refused:
        writer.write(blueprint, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    holds("too little space", 1, str(refused.value), "OUTPUT/write", NOTHING, "starts anew")


def test_a_directory_that_may_not_be_written(made: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    status, said = rewrite(made, closed / "out", prefix=rewriting.WITHOUT_POWER)
    assert "permission denied" in said
    assert list(closed.iterdir()) == []
    holds("no permission", status, said, "OUTPUT/write", NOTHING, "starts anew")


def test_a_source_that_may_not_be_read(made: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(made / "source", source)
    shutil.copy(made / "plan.json", tmp_path)
    next(source.glob("*.safetensors")).chmod(0)
    status, said = rewrite(tmp_path, tmp_path / "out", prefix=rewriting.WITHOUT_POWER)
    assert not (tmp_path / "out").exists()
    assert not partial(tmp_path / "out").exists()
    holds("an unreadable source", status, said, "CHECKPOINT/unreadable", NOTHING, "starts anew")


def test_a_source_that_changes_while_it_is_read(made: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(made / "source", source)
    shutil.copy(made / "plan.json", tmp_path)
    process = stopped(tmp_path, out, 1)
    os.utime(source / "model-00002-of-00012.safetensors", (0, 0))
    process.send_signal(signal.SIGCONT)
    said = "".join(process.communicate(timeout=HANG))
    assert not out.exists()
    again, what = rewrite(tmp_path, out)
    assert (again, "SOURCE/changed" in what) == (1, True)
    assert rewrite(tmp_path, out, "--restart")[0] == 0
    assert rewriting.hashes(out) == rewriting.hashes(made / "right")
    row = (process.returncode, said, "SOURCE/changed", PARTIAL, "refused; `--restart`")
    holds("the source changes", *row)


def test_a_partial_output_of_another_plan(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = stopped(made, out, 1)
    process.kill()
    process.communicate(timeout=HANG)
    other = rewriting.plan(tmp_path / "other.json", [1, 4, 5, 6])
    words = ("rewrite", made / "source", "--plan", other, "--out", out)
    status, said = rewriting.run(*words)
    assert not out.exists()
    assert rewriting.run(*words, "--restart")[0] == 0
    proven = ("verify", out, "--against", made / "source", "--plan", other)
    assert rewriting.run(*proven)[0] == 0
    row = (status, said, "OUTPUT/partial", PARTIAL, "refused; `--restart`")
    holds("a partial output of another plan", *row)


def test_two_rewrites_at_once(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = stopped(made, out, 1)
    status, said = rewrite(made, out)
    first.send_signal(signal.SIGCONT)
    first.communicate(timeout=HANG)
    assert first.returncode == 0
    assert rewriting.hashes(out) == rewriting.hashes(made / "right")
    holds("another rewrite at work", status, said, "OUTPUT/busy", "the other's", "after it")


def there(out: Path, source: Path) -> Path:
    out.mkdir()
    return out


def link(out: Path, source: Path) -> Path:
    out.symlink_to(out.with_name("nowhere"))
    return out


def inside(out: Path, source: Path) -> Path:
    return source / "out"


def inside_by_a_link(out: Path, source: Path) -> Path:
    out.symlink_to(source)
    return out / "out"


def the_source(out: Path, source: Path) -> Path:
    return source


def nowhere(out: Path, source: Path) -> Path:
    return out / "deeper"


PLACES = [
    (there, "an existing output, even an empty directory", "OUTPUT/exists"),
    (link, "a link, even a broken one", "OUTPUT/exists"),
    (the_source, "the source itself", "OUTPUT/exists"),
    (inside, "an output inside the source, also by links", "OUTPUT/place"),
    (inside_by_a_link, "an output inside the source, also by links", "OUTPUT/place"),
    (nowhere, "no directory above the output", "OUTPUT/place"),
]


@pytest.mark.parametrize(("place", "failure", "code"), PLACES)
def test_a_place_where_no_output_may_appear(
    made: Path, tmp_path: Path, place: Callable[[Path, Path], Path], failure: str, code: str
) -> None:
    out = place(tmp_path / "out", made / "source")
    before = sorted(tmp_path.rglob("*")), sorted((made / "source").rglob("*"))
    status, said = rewrite(made, out)
    assert (sorted(tmp_path.rglob("*")), sorted((made / "source").rglob("*"))) == before
    holds(failure, status, said, code, NOTHING, "refused")
