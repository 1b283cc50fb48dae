"""A fair, bounded waiting room in front of an LLM provider, for Django."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .admission import aadmit, admit

__all__ = ["aadmit", "admit"]


def __getattr__(name: str) -> Any:
    """Import the entrances when used: Django reads this package before the apps are ready."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import admission

    return getattr(admission, name)
