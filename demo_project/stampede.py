"""The scenario that the app was made for: a crowd of free users and guests, and paying users in it.

Who comes when, and what the answers come to. The command of the same name runs it.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from demo_project.load_client import Client, Outcome
from demo_project.seeds import TIERS
from demo_project.tables import table

CROWD = ("free", "guest")
ORDERS = ("random", "crowd-first")
SHARES = (50, 95, 99)


def arrivals(
    sessions: Mapping[str, Sequence[str]],
    counts: Mapping[str, int],
    *,
    order: str,
    arrive: float,
    seed: int,
) -> list[Client]:
    """One client per session, at uniform times over *arrive* seconds.

    In the order ``crowd-first`` the crowd has the earliest of those times.
    """
    chance = random.Random(seed)  # noqa: S311 - arrivals, not secrets
    clients = [
        (tier, session) for tier, count in counts.items() for session in sessions[tier][:count]
    ]
    times = sorted(chance.uniform(0, arrive) for _ in clients)
    chance.shuffle(clients)
    if order == "crowd-first":
        clients.sort(key=lambda client: client[0] not in CROWD)
    return [Client(tier, session, at) for (tier, session), at in zip(clients, times, strict=True)]


@dataclass(frozen=True, slots=True)
class Result:
    """What one run came to."""

    gate: str
    capacity: int
    outcomes: list[Outcome]
    stats: Mapping[str, int]
    service_ms: float
    left: Mapping[str, int]

    @property
    def unanswered(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.is_answered]

    def problems(self) -> list[str]:
        """Why the run failed; empty if it did not."""
        found = []
        if self.stats["peak"] > self.capacity:
            found.append(f"{self.stats['peak']} calls at a time, more than {self.capacity}")
        if self.stats["refused_429"]:
            found.append(f"the provider answered 429 to {self.stats['refused_429']} calls")
        if self.unanswered:
            reasons = Counter(outcome.reason or "broken off" for outcome in self.unanswered)
            found.append(f"{len(self.unanswered)} clients got no whole answer: {dict(reasons)}")
        if any(self.left.values()):
            found.append(f"left in the store: {dict(self.left)}")
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "gate": self.gate,
            "tiers": dict(self.by_tier()),
            "upstream": {
                "capacity": self.capacity,
                "peak": self.stats["peak"],
                "refused_429": self.stats["refused_429"],
            },
            "left": dict(self.left),
            "service_ms": self.service_ms,
            "unanswered": len(self.unanswered),
            "problems": self.problems(),
        }

    def by_tier(self) -> Iterable[tuple[str, dict[str, Any]]]:
        for tier in TIERS:
            own = [outcome for outcome in self.outcomes if outcome.tier == tier.slug]
            if own:
                yield tier.slug, {**figures(own), "budget_ms": tier.wait_budget * 1000}

    def as_text(self) -> str:
        head = [
            "tier",
            "offered",
            "granted",
            "broken",
            "wait p50",
            "p95",
            "p99",
            "max",
            "first token p50",
            "p95",
            "p99",
            "refused",
        ]
        rows = [text_row(tier, figures) for tier, figures in self.by_tier()]
        return (
            f"{self.gate}\n{table(head, rows, left=(0, 11))}\n"
            f"provider: peak {self.stats['peak']} of {self.capacity}, "
            f"{self.stats['refused_429']} times 429, mean service {self.service_ms / 1000:.2f} s. "
            f"Left: {self.left.get('in_flight', '-')} in flight, "
            f"{self.left.get('waiting', '-')} waiting. "
            f"Without a whole answer: {len(self.unanswered)}."
        )


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One tier's numbers: ``wait_ms`` of the granted, ``refused_ms`` until a refusal."""
    granted = [outcome for outcome in outcomes if outcome.is_granted]
    refused = [outcome for outcome in outcomes if not outcome.is_granted and outcome.is_answered]
    first_tokens = [o.first_token_ms for o in granted if o.first_token_ms is not None]
    return {
        "offered": len(outcomes),
        "granted": len(granted),
        "broken": sum(not outcome.is_answered for outcome in granted),
        "refused": dict(Counter(outcome.reason for outcome in refused)),
        "wait_ms": spread([outcome.waited_ms for outcome in granted]),
        "refused_ms": spread([outcome.waited_ms for outcome in refused]),
        "ttft_ms": spread(first_tokens),
    }


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Percentiles by nearest rank, and the greatest; None where there is nothing."""
    ordered = sorted(values)
    ranks = {f"p{share}": math.ceil(len(ordered) * share / 100) - 1 for share in SHARES}
    at = {**ranks, "max": len(ordered) - 1}
    return {name: round(ordered[rank], 1) if ordered else None for name, rank in at.items()}


def text_row(tier: str, figures: Mapping[str, Any]) -> list[object]:
    wait, first = figures["wait_ms"], figures["ttft_ms"]
    refused = ", ".join(f"{count} {reason}" for reason, count in figures["refused"].items())
    return [
        tier,
        figures["offered"],
        figures["granted"],
        figures["broken"],
        *(seconds(wait[name]) for name in ("p50", "p95", "p99", "max")),
        *(seconds(first[name]) for name in ("p50", "p95", "p99")),
        refused,
    ]


def seconds(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds / 1000:.2f}"
