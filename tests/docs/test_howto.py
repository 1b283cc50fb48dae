"""The pages of docs/howto: their Python code runs, and does what the page says.

What follows a block in a ``<!-- test`` comment is run too, and asserts it. Pages without such
comments show fragments, which are at least Python; tests of what they tell are elsewhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llm_throttle import worker
from llm_throttle.admission import snapshot
from llm_throttle.models import Tier, TierLimit, Upstream
from tests.conftest import SETTINGS
from tests.waiting_room import eventually

HOWTO = Path(__file__).resolve().parents[2] / "docs" / "howto"
PAGES = sorted(path.name for path in HOWTO.glob("*.md"))
RUN = ["drf.md", "servers.md", "tasks.md", "views.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```$|^<!-- test\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)")

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def rows(settings: Any) -> Iterator[None]:
    """The upstream and the tiers that the pages speak of."""
    settings.LLM_THROTTLE = SETTINGS | {"CACHE": "locmem"}
    settings.TASKS = {"default": {"BACKEND": tasks_backend()}}
    upstream = Upstream.objects.create(slug="anthropic", capacity=2)
    marks = {"premium": {}, "free": {"is_default": True}, "guest": {"is_anonymous": True}}
    for slug, mark in marks.items():
        tier = Tier.objects.create(slug=slug, **mark)
        TierLimit.objects.create(upstream=upstream, tier=tier, wait_budget=10)
    worker.reset()
    yield
    worker.reset()


def tasks_backend() -> str:
    try:
        import django.tasks  # noqa: F401 - from Django 6.0 on
    except ImportError:
        return "django_tasks.backends.immediate.ImmediateBackend"
    return "django.tasks.backends.immediate.ImmediateBackend"


def in_flight() -> int:
    return snapshot("anthropic").in_flight


def test_every_page_that_asserts_something_is_run() -> None:
    asserting = [page for page in PAGES if "<!-- test" in (HOWTO / page).read_text()]
    assert set(asserting) <= set(RUN) <= set(PAGES)


@pytest.mark.parametrize("page", sorted(set(PAGES) - set(RUN)))
def test_fragments_are_python(page: str) -> None:
    for found in BLOCK.finditer((HOWTO / page).read_text()):
        compile(found[1], page, "exec")


@pytest.mark.parametrize("page", RUN)
def test_the_code_of_the_page_runs(page: str) -> None:
    text = (HOWTO / page).read_text()
    name = f"howto_{Path(page).stem}"
    module = ModuleType(name)
    sys.modules[name] = module  # classes, tasks and pickles look for their module
    module.in_flight = in_flight
    module.eventually_free = lambda: eventually(lambda: in_flight() == 0)
    try:
        for found in BLOCK.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            code = "\n" * line + (found[1] or found[2])  # so that an error names the page's line
            exec(compile(code, str(HOWTO / page), "exec"), vars(module))
    finally:
        del sys.modules[name]


@pytest.mark.parametrize("page", PAGES)
def test_the_links_between_pages_lead_somewhere(page: str) -> None:
    for target in LINK.findall((HOWTO / page).read_text()):
        assert (HOWTO / target).exists(), target
