"""Reference implementation and conformance suite for expert substitution (MoNE).

``load(path)`` gives the oracle for one checkpoint. Importing the package is cheap:
torch is imported by the first call that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mone_ref.version import VERSION

if TYPE_CHECKING:
    from mone_ref.loading import Model, load

__version__ = VERSION
__all__ = ["Model", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """Import ``load`` and ``Model`` on first use."""
    if name in ("load", "Model"):
        from mone_ref import loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
