"""A waiting room for views: rows in the database, the store in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User

from llm_throttle import worker
from llm_throttle.models import Tier, TierLimit, Upstream
from tests.conftest import SETTINGS

from . import kinds


@pytest.fixture(autouse=True)
def rows(settings: Any, transactional_db: None) -> Iterator[Upstream]:
    """``sim`` with two slots; signed-in users are ``free``, others ``guest``."""
    settings.ROOT_URLCONF = "tests.views.kinds"
    settings.LLM_THROTTLE = SETTINGS | {"CACHE": "locmem"}
    settings.TEMPLATES = [
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "OPTIONS": {
                "loaders": [("django.template.loaders.locmem.Loader", {"views/page.html": "plain"})]
            },
        }
    ]
    upstream = Upstream.objects.create(slug="sim", capacity=2)
    for slug, marks in {
        "gold": {},
        "free": {"is_default": True},
        "guest": {"is_anonymous": True},
    }.items():
        tier = Tier.objects.create(slug=slug, **marks)
        TierLimit.objects.create(upstream=upstream, tier=tier, wait_budget=5, depth_per_user=2)
    worker.reset()
    kinds.SEEN.clear()
    yield upstream
    worker.reset()


@pytest.fixture
def user() -> User:
    return User.objects.create_user("ann")


class Complaints:
    """What was logged as a warning or worse, but for Django's lines on the answers it gives."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING)
        self._caplog = caplog

    @property
    def records(self) -> list[logging.LogRecord]:
        return [record for record in self._caplog.records if record.name != "django.request"]

    def __bool__(self) -> bool:
        return bool(self.records)

    def __repr__(self) -> str:
        return repr([record.getMessage() for record in self.records])


@pytest.fixture
def complaints(caplog: pytest.LogCaptureFixture) -> Complaints:
    return Complaints(caplog)
