"""The process in which ``mone-ref conform`` lets pytest run."""

from __future__ import annotations

import sys

import pytest

from mone_ref import standard_output

if __name__ == "__main__":
    with standard_output.watched():
        sys.exit(pytest.main())
