"""System checks: what is wrong with the settings and the rows, and how to mend it.

``docs/checks.md`` has the same list for readers. No check connects to the store, and only those
that Django runs with ``--database`` (and before ``migrate``) read the database. Those are warnings
throughout: an error would keep ``migrate`` from making the very tables that are missing.
"""

from __future__ import annotations

from . import cache, rows, settings, views  # which registers the checks in them
from .findings import TAG

__all__ = ["TAG", "cache", "rows", "settings", "views"]
