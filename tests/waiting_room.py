"""What tests see of the waiting room ``sim``, and a slot of it that somebody else holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from llm_throttle import aadmit
from llm_throttle.admission import snapshot
from llm_throttle.identity import Identity
from llm_throttle.scheduling.decisions import Overview
from llm_throttle.scheduling.policy import TierPolicy

ALONE = TierPolicy("gold", cap=1, wait_budget_ms=20_000, queue_depth=1000, depth_per_user=100)
"""One at a time, and nobody is refused for want of room or time."""


def overview() -> Overview:
    return snapshot("sim")


def eventually(is_so, within: float = 3.0) -> bool:
    """Look again until it is so; for what another thread brings about."""
    give_up_at = time.monotonic() + within
    while time.monotonic() < give_up_at:
        if is_so():
            return True
        time.sleep(0.005)
    return False


def is_empty() -> bool:
    seen = overview()
    return (seen.in_flight, seen.waiting) == (0, 0)


async def settled() -> bool:
    """Whether all have left, or soon will have."""
    return await asyncio.to_thread(eventually, is_empty)


@asynccontextmanager
async def held(flow: str = "user:0") -> AsyncIterator[None]:
    """A slot held by another task."""
    has_begun, end = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with aadmit("sim", identity=Identity(flow, "gold")):
            has_begun.set()
            await end.wait()

    task = asyncio.create_task(hold())
    await has_begun.wait()
    try:
        yield
    finally:
        end.set()
        await task
