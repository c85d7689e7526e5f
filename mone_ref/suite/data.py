"""Where the suite's data lie: in a checkout, or inside an installed wheel."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def root(package: Path = PACKAGE) -> Path:
    """The directory that holds ``SPEC.md``, ``conformance/`` and ``fixtures/``.

    A checkout wins, so that an editable install judges with the files being
    edited; a wheel carries the same three under ``_data``. Raises
    ``FileNotFoundError`` when neither place has them.
    """
    places = (package.parent, package / "_data")
    for place in places:
        if (place / "SPEC.md").is_file() and (place / "conformance").is_dir():
            return place
    tried = ", ".join(str(place) for place in places)
    raise FileNotFoundError(f"SPEC.md and conformance/ are in none of: {tried}")
