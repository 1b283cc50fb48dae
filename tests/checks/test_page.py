"""The page for readers has every check."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_id_is_documented_and_none_that_does_not_exist():
    modules = (ROOT / "llm_throttle" / "checks").glob("*.py")
    source = "".join(module.read_text() for module in modules)
    ids = {
        f"{'E' if kind == 'error' else 'W'}{int(number):03}"
        for kind, number in re.findall(r"\b(error|warning)\(\s*(\d+),", source)
    }
    page = (ROOT / "docs" / "checks.md").read_text()
    assert set(re.findall(r"^### `llm_throttle\.([EW]\d{3})`", page, re.M)) == ids
    assert len(ids) == 19
