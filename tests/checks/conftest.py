"""An upstream with nothing wrong."""

from __future__ import annotations

import pytest

from llm_throttle.models import Tier, TierLimit, Upstream


@pytest.fixture
def upstream(db) -> Upstream:
    row = Upstream.objects.create(slug="anthropic", name="Anthropic", capacity=30)
    for slug in ("free", "gold"):
        is_for_all = slug == "free"
        tier = Tier.objects.create(
            slug=slug, name=slug.title(), is_default=is_for_all, is_anonymous=is_for_all
        )
        TierLimit.objects.create(upstream=row, tier=tier, wait_budget=5, queue_depth=100)
    return row
