"""What people write instead: two gates to measure against, under the same chat.

Both show their flaws on purpose. ``manage.py stampede --compare`` runs them; nothing else does.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

import redis.asyncio
from django.conf import settings
from django.http import HttpRequest, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.views import View

from demo_project.events import reply_events
from demo_project.replies import reply
from demo_project.seeds import TIERS
from demo_project.views import PromptFirst

POLL_SECONDS = 0.25
COUNTER_TTL = 60  # seconds
CAPACITY = settings.COMPARED_CAPACITY
LIMITS = {tier.slug: tier for tier in TIERS}

TAKE = """
local total = tonumber(redis.call('GET', KEYS[1]) or '0')
local own = tonumber(redis.call('GET', KEYS[2]) or '0')
if total >= tonumber(ARGV[1]) or own >= tonumber(ARGV[2]) then return 0 end
redis.call('INCR', KEYS[1]) redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('INCR', KEYS[2]) redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
"""


class ComparedChatView(PromptFirst, View, ABC):
    """A chat behind some other gate, with the headers that a measurement reads."""

    async def post(self, request: HttpRequest) -> HttpResponseBase:
        tier = await tier_of(request)
        started = time.monotonic()
        if not await self.take(tier):
            return JsonResponse({"reason": "wait_expired"}, status=503, headers={"Retry-After": 5})
        waited_ms = round((time.monotonic() - started) * 1000)
        return StreamingHttpResponse(
            self.stream(tier),
            content_type="text/event-stream",
            headers={"X-LLM-Throttle-Tier": tier, "X-LLM-Throttle-Waited-Ms": waited_ms},
        )

    async def stream(self, tier: str) -> AsyncIterator[bytes]:
        try:
            async for event in reply_events(reply(self.prompt), _ignore):
                yield event
        finally:
            await self.give_back(tier)

    @abstractmethod
    async def take(self, tier: str) -> bool:
        """Whether there is a slot within the tier's time."""

    @abstractmethod
    async def give_back(self, tier: str) -> None:
        """The slot is free again."""


class SemaphoreChatView(ComparedChatView):
    """A semaphore per process: the workers multiply the limit."""

    slots = asyncio.Semaphore(CAPACITY)

    async def take(self, tier: str) -> bool:
        try:
            async with asyncio.timeout(LIMITS[tier].wait_budget):
                return await self.slots.acquire()
        except TimeoutError:
            return False

    async def give_back(self, tier: str) -> None:
        self.slots.release()


class PolledCounterChatView(ComparedChatView):
    """Counters in Redis that every waiter asks again and again: whoever asks next gets the slot."""

    store: redis.asyncio.Redis | None = None

    async def take(self, tier: str) -> bool:
        deadline = time.monotonic() + LIMITS[tier].wait_budget
        script = self.counters().register_script(TAKE)
        keys, limits = counter_keys(tier), [CAPACITY, LIMITS[tier].cap, COUNTER_TTL]
        while not await script(keys=keys, args=limits):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    async def give_back(self, tier: str) -> None:
        async with self.counters().pipeline() as pipeline:
            for key in counter_keys(tier):
                pipeline.decr(key)
            await pipeline.execute()

    @classmethod
    def counters(cls) -> redis.asyncio.Redis:
        if cls.store is None:
            cls.store = redis.asyncio.from_url(settings.CACHES["default"]["LOCATION"])
        return cls.store


def counter_keys(tier: str) -> list[str]:
    return ["compared:total", f"compared:{tier}"]


async def tier_of(request: HttpRequest) -> str:
    user: Any = await request.auser()
    if not user.is_authenticated:
        return "guest"
    names = {group.name async for group in user.groups.all()}
    return next((tier.slug for tier in TIERS if tier.slug in names), "free")


def _ignore(status: int, retry_after: float | None) -> None:
    """Nobody listens to the provider here."""
