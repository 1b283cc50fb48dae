"""Rigs for the scenarios, one per module where they can share it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.postgres import a_postgres

from .rig import Rig

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.servers)


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """The module says in RIG what it needs, and in ON_POSTGRES whether SQLite would not do."""
    with ExitStack() as stack:
        options = dict(request.module.RIG)
        if getattr(request.module, "ON_POSTGRES", False):
            options["postgres"] = stack.enter_context(a_postgres("acceptance"))
        yield stack.enter_context(Rig(**options))
