"""Finding a backend, and the files that it brings along: each mistake is one clear line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import fake_engines as fakes
import pytest

from mone_ref import backends
from mone_ref.backends import BackendError
from mone_ref.suite.run import Run, Settings

ROOT = Path(__file__).resolve().parent.parent


def install(place: Path, package: str, entry_point: str) -> None:
    """What an installer leaves behind for a package with one entry point."""
    info = place / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{backends.GROUP}]\n{entry_point}\n")


def test_an_installed_package_gives_its_engine_a_name(tmp_path, monkeypatch):
    install(tmp_path, "acme", "acme = fake_engines:Honest")
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(backends.find("acme"), fakes.Honest)
    with pytest.raises(BackendError, match="known are acme, grouped, reference, server"):
        backends.find("acne")


def test_a_built_in_name_cannot_be_taken_over(tmp_path, monkeypatch):
    install(tmp_path, "acme", "reference = fake_engines:Honest")
    monkeypatch.syspath_prepend(tmp_path)
    assert not isinstance(backends.find("reference"), fakes.Honest)


def test_two_packages_that_give_one_name(tmp_path, monkeypatch):
    install(tmp_path, "acme", "acme = fake_engines:Honest")
    install(tmp_path, "emca", "acme = fake_engines:Hangs")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendError) as caught:
        backends.find("acme")
    named, _, both = str(caught.value).partition(": ")
    assert named == "two installed packages name a backend acme"
    assert set(both.split(" and ")) == {"fake_engines:Honest", "fake_engines:Hangs"}


@pytest.mark.parametrize(
    ("target", "flaw"),
    [
        ("fake_engines", "backend acme: its entry point is 'fake_engines', not module:Class"),
        ("absent.adapter:X", "backend acme cannot be made: ModuleNotFoundError: No module named"),
        ("fake_engines:Absent", "backend acme cannot be made: AttributeError"),
        ("fake_engines:ROOT", "backend acme cannot be made"),
        ("leaves:X", "backend acme cannot be made: SystemExit: no licence"),
    ],
)
def test_an_entry_point_that_leads_nowhere(target, flaw, tmp_path, monkeypatch):
    (tmp_path / "leaves.py").write_text("raise SystemExit('no licence')\n")
    install(tmp_path, "acme", f"acme = {target}")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(BackendError) as caught:
            backends.find("acme")
    finally:
        sys.modules.pop("leaves", None)
    assert str(caught.value).startswith(flaw)
    assert "\n" not in str(caught.value)


# -- files that an adapter brings along


def shipping(**files) -> fakes.Honest:
    return type("Ships", (fakes.Honest,), files)()


def test_they_are_used_without_any_option_and_an_option_comes_first(tmp_path):
    own, other = tmp_path / "own.toml", tmp_path / "other.toml"
    own.write_text("CHECKPOINT = ['own words']\n")
    other.write_text("CHECKPOINT = ['other words']\n")
    backend = shipping(error_map=own)
    assert Run(Settings("x"), backend, ROOT).error_map.find("own words") == "CHECKPOINT"
    run = Run(Settings("x", error_map=other), backend, ROOT)
    assert run.error_map.find("own words") is None
    assert run.error_map.find("other words") == "CHECKPOINT"


def test_declarations_that_an_adapter_brings_along_are_held_to(tmp_path):
    declared = tmp_path / "e.toml"
    declared.write_text(
        '[[deviation]]\nid = "outputs/olmoe-top20"\noutcome = "mismatch"\nreason = "known"\n'
    )
    settings = Settings("x", patterns=("outputs/olmoe-top20",))
    run = Run(settings, shipping(expectations=declared), ROOT)
    result = run.judge(*run.planned[0])
    assert run.problem(result) == "declared mismatch, found ok"
    assert not run.passes()


@pytest.mark.parametrize(
    ("name", "value", "flaw"),
    [
        ("error_map", "words.toml", "Ships.error_map is str, expected a pathlib.Path or None"),
        ("expectations", Path("/none.toml"), "/none.toml: [Errno 2] No such file"),
    ],
)
def test_a_file_that_is_not_there_is_told_before_the_first_case(name, value, flaw):
    with pytest.raises(ValueError, match=re.escape(flaw)):
        Run(Settings("x"), shipping(**{name: value}), ROOT)
