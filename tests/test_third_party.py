"""A stranger's path: the wheel in an empty environment, an engine of their own, their CI.

``tests/third_party`` is a whole repository. Nothing here imports ``mone_ref`` from this
checkout but the helpers of the test itself.
"""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml
from patience import HANG

import mone_ref
from mone_ref.suite import report

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = ROOT / "tests" / "third_party"
WORKFLOW = Path(".github", "workflows", "conformance.yml")
DECLARED = {
    "explicit/constant-is-a-model-tensor": "wrongly-accepted",
    "format/id-duplicate": "wrongly-accepted",
    "format/router-cut": "late",
    "load/missing-router": "late",
}


@dataclass(frozen=True)
class Stranger:
    """A copy of the repository, and an environment with the wheel and nothing of this checkout."""

    directory: Path
    environment: Path

    def run(self, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """A command line, as a CI runner starts it."""
        return subprocess.run(
            ["bash", "-e", "-c", command],
            cwd=self.directory,
            env={
                "PATH": f"{self.environment / 'bin'}:/usr/bin:/bin",
                "HOME": str(self.directory),
                "OMP_NUM_THREADS": "1",
                **variables,
            },
            capture_output=True,
            text=True,
            timeout=HANG,
        )


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built without a network."""
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--quiet", "--wheel-dir", out, ROOT], check=True, timeout=HANG)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def stranger(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    """Dependencies come from here by a .pth file, without ``mone_ref``, since tests are offline."""
    place = tmp_path_factory.mktemp("stranger")
    directory = Path(shutil.copytree(REPOSITORY, place / "toy-engine", ignore=caches))
    environment = place / "venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True, timeout=HANG)
    dependencies = place / "dependencies"
    dependencies.mkdir()
    for installed in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "mone_ref" not in installed.name.replace("-", "_") and installed.suffix != ".pth":
            (dependencies / installed.name).symlink_to(installed)
    (packages,) = environment.glob("lib/python*/site-packages")
    for bundled in packages.glob("setuptools*"):  # older than what torch asks for
        shutil.rmtree(bundled)
    (packages / "dependencies.pth").write_text(f"{dependencies}\n")
    there = Stranger(directory, environment)
    done = there.run(f"pip install --no-deps --no-index --quiet '{wheel}'")
    assert done.returncode == 0, done.stderr
    return there


def caches(_: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(("__pycache__", ".egg-info"))]


def steps() -> list[str]:
    """The commands of the workflow, in their order."""
    workflow = yaml.safe_load((REPOSITORY / WORKFLOW).read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    return [step["run"] for step in job["steps"] if "run" in step]


@pytest.fixture(scope="session")
def ci(stranger: Stranger) -> dict[str, subprocess.CompletedProcess[str]]:
    """Every command of the workflow, run where its runner would run it."""
    variables = {
        "GITHUB_STEP_SUMMARY": str(stranger.directory / "summary.md"),
        # What is installed already has to do: there is no registry.
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
    }
    (stranger.directory / "summary.md").touch()
    return {command: stranger.run(command, **variables) for command in steps()}


# -- the wheel


def test_every_file_that_is_no_python_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist()}
    data = {
        f"mone_ref/{path.relative_to(ROOT / 'mone_ref').as_posix()}": path
        for path in (ROOT / "mone_ref").rglob("*")
        if path.is_file() and path.suffix != ".py" and path.parent.name != "__pycache__"
    }
    suite = {
        f"mone_ref/_data/{path.relative_to(ROOT).as_posix()}": path
        for path in (*(ROOT / "conformance").rglob("*"), *(ROOT / "fixtures").rglob("*"))
        if path.is_file() and path.parent.name != "__pycache__"
    }
    suite["mone_ref/_data/SPEC.md"] = ROOT / "SPEC.md"
    for name, path in (data | suite).items():
        assert packed.get(name) == path.read_bytes(), name
    assert "mone_ref/suite/report.schema.json" in data
    assert "mone_ref/py.typed" in data


def test_the_metadata_name_version_extras_and_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
        entry_points = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert metadata["Name"] == "mone-ref"
    assert metadata["Version"] == mone_ref.__version__
    assert metadata.get_all("Provides-Extra") == ["cli", "conformance", "dev", "transformers"]
    assert "mone-ref = mone_ref.cli:main" in entry_points
    needed = metadata.get_all("Requires-Dist")
    assert {re.split(r"[<>=\[ ]", line)[0] for line in needed if "extra ==" not in line} == {
        "numpy",
        "pyyaml",
        "safetensors",
        "torch",
    }
    assert "pytest>=8.3; extra == 'conformance'" in needed


def test_what_is_installed_is_the_wheel(stranger):
    done = stranger.run("python -c 'import mone_ref; print(mone_ref.__file__)'")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(stranger.environment)


def test_the_reference_is_judged_there(stranger):
    done = stranger.run("mone-ref conform --dtype float32 --case 'outputs/olmoe-*'")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "engine       reference" in done.stdout


# -- their engine


def test_every_step_of_the_workflow_succeeds(ci):
    told = {command: done.stdout + done.stderr for command, done in ci.items() if done.returncode}
    assert not told
    assert [command.split()[:2] for command in ci] == [
        ["pip", "install"],
        ["mone-ref", "conform"],
        ["mone-ref", "conform"],
        ["mone-ref", "report"],
    ]


def test_their_adapter_passes_the_smoke_run(ci):
    smoke = ci["mone-ref conform --backend=toy --smoke"].stdout.splitlines()
    assert all(line.startswith("ok ") for line in smoke[:-1])
    assert smoke[0].endswith("toy 0.3.0 on cpu: float32")
    assert smoke[-1].endswith("the engine is judged by: mone-ref conform --backend=toy")
    assert printed("mone-ref conform --backend=toy --smoke") == smoke


def test_their_engine_is_judged_with_the_files_that_it_ships(ci, stranger):
    (judged,) = (done.stdout for command, done in ci.items() if "--report" in command)
    told = [
        re.sub(r"numpy [\d.]+", f"numpy {np.__version__}", line)
        for line in printed("mone-ref conform --backend=toy")
        if line != "..."
    ]
    assert told[-1] == "verdict      CONFORMANT WITH ADVICE"
    assert [line for line in judged.splitlines() if line in told] == told
    read = report.read(stranger.directory / "conformance.jsonl")
    assert read.footer["verdict"] == "CONFORMANT WITH ADVICE"
    assert read.footer["expectation_problems"] == {}
    assert read.header["backend"]["name"] == "toy"
    declared = {
        line["case"]: line["outcome"] for line in read.results if line["status"] == "declared"
    }
    assert declared == DECLARED
    assert {line["status"] for line in read.results} == {"ok", "declared", "undecided"}
    assert "CONFORMANT WITH ADVICE" in (stranger.directory / "summary.md").read_text()


@pytest.mark.usefixtures("ci")
def test_a_change_that_nobody_declared_turns_their_ci_red(stranger):
    engine = stranger.directory / "toy_engine" / "declaration.py"
    right = engine.read_text()
    case = "--case format/id-negative"
    assert stranger.run(f"mone-ref conform --backend=toy {case}").returncode == 0
    engine.write_text(right.replace("0 <= expert", "-9 <= expert"))
    try:
        # The working copy, not what is installed of it.
        done = stranger.run(f"mone-ref conform --backend=toy {case}", PYTHONPATH=".")
    finally:
        engine.write_text(right)
    assert done.returncode == 1
    assert "format/id-negative float32: wrong-group, which is not declared" in done.stdout


LOG_SOFTMAX = """
        logits -= logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))
"""


@pytest.mark.usefixtures("ci")
@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("engine.py", LOG_SOFTMAX, "\n        return logits\n"),
        ("error_map.toml", "CHECKPOINT = ['BadCheckpoint: files: ']\n", ""),
    ],
)
def test_the_page_shows_what_is_told_about_a_slip(stranger, file, right, wrong):
    path = stranger.directory / "toy_engine" / file
    text = path.read_text()
    assert right in text
    path.write_text(text.replace(right, wrong))
    try:
        done = stranger.run("mone-ref conform --backend=toy --smoke", PYTHONPATH=".")
    finally:
        path.write_text(text)
    assert done.returncode == 1
    page = (ROOT / "docs" / "plug-in.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```console\n(FAIL .*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert [block in done.stdout for block in blocks].count(True) == 1


def test_their_engine_shares_no_code_with_the_oracle():
    for path in (REPOSITORY / "toy_engine").glob("*.py"):
        if path.name != "adapter.py":
            assert "mone_ref" not in path.read_text(encoding="utf-8").replace("mone-ref", "")
    adapter = (REPOSITORY / "toy_engine" / "adapter.py").read_text(encoding="utf-8")
    used = re.findall(r"(?:from|import) (mone_ref\S*)", adapter)
    assert used == ["mone_ref.backend", "mone_ref.backends"]
    assert "from mone_ref.backends import architectures\n" in adapter
    assert len(adapter.splitlines()) <= 100


# -- the pages


def printed(command: str) -> list[str]:
    """What the page about plugging in shows as the output of a command."""
    page = (ROOT / "docs" / "plug-in.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"^\$ {re.escape(command)}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return block.splitlines()


def shown(page: str) -> dict[str, str]:
    """Files that a page shows: a line with the path in backticks and a colon, then a block."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^`([^`\n]+)`:\n\n```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return dict(blocks)


@pytest.mark.parametrize(
    ("page", "files"),
    [
        (
            "plug-in.md",
            {
                "toy_engine/adapter.py",
                "pyproject.toml",
                "toy_engine/error_map.toml",
                "toy_engine/expectations.toml",
            },
        ),
        ("github-actions.md", {str(WORKFLOW)}),
    ],
)
def test_a_page_shows_the_files_that_are_tested(page, files):
    blocks = shown(page)
    assert blocks.keys() == files
    for name, text in blocks.items():
        assert text == (REPOSITORY / name).read_text(encoding="utf-8"), name


def test_the_pages_name_options_that_exist():
    from mone_ref.suite.options import WITH_VALUE

    for page in ("plug-in.md", "github-actions.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        for flag in re.findall(r"mone-ref conform[^`\n]*?(--[a-z-]+)", text):
            assert flag in {*WITH_VALUE, "--smoke"}, flag
