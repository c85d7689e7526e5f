"""Shared by all tests: where the pinned fixtures are, and one thread for small products."""

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def fixtures() -> Path:
    return ROOT / "fixtures"


@pytest.fixture(scope="session")
def approx(fixtures: Path) -> Path:
    """The checkpoint of the plainest substituted fixture."""
    return fixtures / "olmoe-approx" / "checkpoint"
