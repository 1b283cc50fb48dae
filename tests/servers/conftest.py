"""Marks what is here, and prints the table at the end of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.servers.table", "tests.servers.rig", "tests.servers.clients")

from .table import Cell, Result, drawn  # noqa: E402 - its asserts tell what they compared

HERE = Path(__file__).parent
RESULTS: dict[Cell, Result] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.servers)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if RESULTS:
        terminalreporter.section("slots freed, by server, view, body and ending")
        for line in drawn(RESULTS):
            terminalreporter.write_line(line)
