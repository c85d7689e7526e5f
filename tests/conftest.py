"""Shared by all tests: where the pinned fixtures are, and the same conditions on every machine."""

import os
from pathlib import Path

import pytest

# What a process inherits from whoever runs the tests changes what it prints, or in how many
# parts it sums. Taken away before anything that reads it is imported.
FOREIGN = (
    *("CI", "GITHUB_ACTIONS", "PY_COLORS", "FORCE_COLOR", "NO_COLOR", "COLORTERM"),
    *("TTY_COMPATIBLE", "TTY_INTERACTIVE", "TERMINAL_WIDTH", "COLUMNS", "LINES"),
    *("PYTEST_ADDOPTS", "MALLOC_PERTURB_"),
)
for name in FOREIGN:
    os.environ.pop(name, None)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
torch.set_num_threads(1)

# A slow machine fails nothing, and a commit has one outcome: the examples follow from the test.
# ``--hypothesis-profile=default`` draws others.
settings.register_profile(
    "everywhere", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("everywhere")


@pytest.fixture(scope="session")
def fixtures() -> Path:
    return ROOT / "fixtures"


@pytest.fixture(scope="session")
def approx(fixtures: Path) -> Path:
    """The checkpoint of the plainest substituted fixture."""
    return fixtures / "olmoe-approx" / "checkpoint"
