"""Rigs for the scenarios, one per module where they can share it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .rig import Rig

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.servers)


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """The module says in RIG what it needs."""
    with Rig(**request.module.RIG) as rig:
        yield rig
