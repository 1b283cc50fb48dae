"""``manage.py demo --check``: real chats of every tier, a burst, and what the provider counted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from demo_project.load_client import Address, Answer, chat, sign_in, visit
from demo_project.prompts import SDKS
from demo_project.seeds import TIERS, TierSeed
from demo_project.stack import Stack
from demo_project.tables import table
from demo_project.witness import Witness, left

# One and a half times the capacity of 30, from every tier; nobody has to wait beyond a budget.
BURST = {"premium": 10, "pro": 15, "free": 15, "guest": 5}
NOTHING = "-"
SYNC_PATHS = ("/chat/sync/", "/api/chat/")
QUEUED_MS = 150  # asking for a slot takes some of them, and nobody ends within 500 ms
SETTLED_SECONDS = 1.0  # by then nothing may be left of the last client


@dataclass(frozen=True, slots=True)
class Chat:
    """One chat of the check and what came back."""

    tier: str
    sdk: str
    answer: Answer

    @property
    def is_good(self) -> bool:
        headers = self.answer.headers
        return (
            self.answer.status == 200
            and self.answer.is_complete
            and bool(self.answer.text)
            and headers.get("x-llm-throttle-tier") == self.tier
            and bool(headers.get("x-llm-throttle-ticket"))
        )

    @property
    def outcome(self) -> str:
        answer = self.answer
        failed = next((event for event in answer.events if event.get("type") == "error"), None)
        if failed:
            return str(failed["detail"])
        return answer.text or answer.error or f"{answer.status} {answer.reason}"

    def as_json(self) -> dict[str, Any]:
        return {
            "tier": self.tier,
            "sdk": self.sdk,
            "status": self.answer.status,
            "ticket": self.answer.headers.get("x-llm-throttle-ticket"),
            "tier_header": self.answer.headers.get("x-llm-throttle-tier"),
            "waited_ms": self.answer.waited_ms,
            "reply": self.outcome,
            "ok": self.is_good,
        }


@dataclass(slots=True)
class Report:
    """Everything that the check has seen."""

    capacity: int
    chats: list[Chat] = field(default_factory=list)
    sync: list[Chat] = field(default_factory=list)
    """By the views that are not async."""
    burst: list[Chat] = field(default_factory=list)
    upstream: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)

    @property
    def by_hand(self) -> list[Chat]:
        return [*self.chats, *self.sync]

    def problems(self) -> list[str]:
        """What should not have happened; empty if all is well."""
        found = [
            f"{one.tier} by {one.sdk}: {one.outcome}" for one in self.by_hand if not one.is_good
        ]
        found += [f"burst, {chat.tier}: {chat.outcome}" for chat in self.burst if not chat.is_good]
        if self.burst and not self.waited():
            found.append("nobody waited in the burst")
        if self.upstream and self.upstream["peak"] > self.capacity:
            found.append(f"the provider saw {self.upstream['peak']} calls at a time")
        if self.upstream and self.upstream["refused_429"]:
            found.append(f"the provider refused {self.upstream['refused_429']} calls")
        if any(self.left.values()):
            found.append(f"left in the store: {self.left}")
        return found

    def waited(self) -> list[int]:
        """The waits of those that found no free slot."""
        waits = [one.answer.waited_ms for one in self.burst]
        return [wait for wait in waits if wait >= QUEUED_MS]

    def as_json(self) -> dict[str, Any]:
        return {
            "chats": [chat.as_json() for chat in self.chats],
            "sync": [chat.as_json() for chat in self.sync],
            "burst": {
                "offered": len(self.burst),
                "granted": sum(chat.is_good for chat in self.burst),
                "waited": len(self.waited()),
                "longest_wait_ms": max(self.waited(), default=0),
            },
            "upstream": {"capacity": self.capacity, **self.upstream},
            "left": self.left,
            "problems": self.problems(),
        }

    def as_text(self) -> str:
        return "\n\n".join(filter(None, [self._chats(), self._burst(), self._verdict()]))

    def _chats(self) -> str:
        head = ["tier", "sdk", "ticket", "waited", "reply"]
        rows = [
            [
                chat.answer.headers.get("x-llm-throttle-tier", NOTHING),
                chat.sdk,
                chat.answer.headers.get("x-llm-throttle-ticket", NOTHING),
                f"{chat.answer.waited_ms} ms",
                chat.outcome,
            ]
            for chat in self.by_hand
        ]
        return table(head, rows, left=(0, 1, 2, 4))

    def _burst(self) -> str:
        if not self.burst:
            return "No burst and no witness: UPSTREAM_URL names a provider that is not ours."
        granted, waited = sum(chat.is_good for chat in self.burst), self.waited()
        return (
            f"A burst of {len(self.burst)} calls at a capacity of {self.capacity}: "
            f"{granted} answered, {len(waited)} of them after a wait, "
            f"the longest {max(waited, default=0) / 1000:.1f} s.\n"
            f"The provider counted a peak of {self.upstream['peak']} calls in flight, "
            f"served {self.upstream['served']} and refused {self.upstream['refused_429']}.\n"
            f"One second later the store holds {self.left['in_flight']} in flight "
            f"and {self.left['waiting']} waiting."
        )

    def _verdict(self) -> str:
        problems = self.problems()
        return (
            "\n".join(["Not as it should be:", *problems]) if problems else "All as it should be."
        )


async def check(stack: Stack) -> Report:
    """Chat with a running stack; its provider is asked for its count if it is our own."""
    report = Report(stack.setup.capacity)
    sessions = await sessions_by_hand(stack.address)
    report.chats = await gather(
        stack.address, [(tier, sdk, session) for tier, session in sessions.items() for sdk in SDKS]
    )
    report.sync = await by_sync_views(stack.address, sessions["premium"])
    if stack.provider_address is not None:
        calls = [
            (tier, SDKS[number % len(SDKS)], session)
            for tier, count in BURST.items()
            for number, session in enumerate(stack.sessions[tier][-count:])
        ]
        report.burst = await gather(stack.address, calls)
        report.upstream = await Witness(stack.provider_address).stats()
    await asyncio.sleep(SETTLED_SECONDS)
    report.left = await left(stack.address, stack.sessions["admin"][0])
    return report


async def by_sync_views(address: Address, session: str) -> list[Chat]:
    """One chat through each of the views that are not async."""
    answers = await asyncio.gather(
        *(chat(address, f"Hello by {path}", session=session, path=path) for path in SYNC_PATHS)
    )
    return [Chat("premium", SDKS[0], answer) for answer in answers]


async def sessions_by_hand(address: Address) -> dict[str, str]:
    """One session per tier, got as a person gets it: by the log-in page, or as a guest."""
    return {tier.slug: await session_of(address, tier) for tier in TIERS}


async def session_of(address: Address, tier: TierSeed) -> str:
    if tier.signs_in:
        return await sign_in(address, tier.slug, tier.slug)
    return await visit(address)


async def gather(address: Address, calls: list[tuple[str, str, str]]) -> list[Chat]:
    """All *calls* (tier, SDK, session) at the same time."""
    answers = await asyncio.gather(
        *(
            chat(address, f"Hello from {tier} by {sdk}", session=session, sdk=sdk)
            for tier, sdk, session in calls
        )
    )
    return [Chat(tier, sdk, answer) for (tier, sdk, _), answer in zip(calls, answers, strict=True)]
