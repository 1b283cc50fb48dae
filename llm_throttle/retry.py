"""When to come back: what ``Retry-After`` says, the same in header and body."""

from __future__ import annotations

import math
import random

from .conf import settings

TOP_SHARE = 2 / 3
"""The part of the longest Retry-After that estimates may fill; the rest is for spreading."""


def retry_after(reason: str, retry_ms: int) -> int | None:
    """When to come back, in whole seconds from 1 to ``RETRY_AFTER_MAX``; None = never.

    Rounded up and spread at random, so that those refused together do not return together.
    """
    if reason == "moved":
        return None
    ceiling = int(settings.RETRY_AFTER_MAX)
    seconds = max(1, math.ceil(min(_estimate(reason, retry_ms), ceiling * TOP_SHARE)))
    spread = random.randint(0, max(1, seconds // 2))  # noqa: S311 - spreading, not secrecy
    return max(1, min(seconds + spread, ceiling))


def _estimate(reason: str, retry_ms: int) -> float:
    """Seconds until it may be worth while to come back."""
    if retry_ms:
        return retry_ms / 1000
    fixed = {
        "paused": settings.RETRY_AFTER_PAUSED,
        "unserviceable": settings.RETRY_AFTER_PAUSED,
        "backend_down": settings.BREAKER_INTERVAL,
        "shutting_down": 1,
    }
    return float(fixed.get(reason, settings.RETRY_AFTER_DEFAULT))
