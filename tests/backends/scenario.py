"""Workers that talk to a waiting room: small integers in, commands of all kinds out.

Each action takes a few small integers. 0 is the plain case, so that a failing run shrinks to a
plain story; larger ones pick other workers, tickets, limits, or something rude. Hypothesis draws
them for the differential test, a seeded generator for the long runs and the mutations.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from llm_throttle.scheduling.commands import (
    Attach,
    Beat,
    Call,
    Cancel,
    Command,
    Confirm,
    Enqueue,
    HeldTicket,
    Positions,
    Reassert,
    Release,
    Revoke,
    SetPolicy,
    SignOff,
    Snapshot,
    Tick,
    WaitingTicket,
)
from llm_throttle.scheduling.decisions import BeatReply, NeedPolicy, Reply
from llm_throttle.scheduling.policy import Policy, TierPolicy
from llm_throttle.scheduling.recovery import Timing

from .twins import Twins

START = 1_700_000_000_000

TIMINGS = (
    Timing(recovery_ms=0),
    Timing(),
    Timing(beat_ms=500, worker_ttl_ms=3_000, recovery_ms=700, blind_ms=900),
)

TIERS = ("free", "pro", "Pro", "gäste", "fre")
FLOWS = ("ann", "bob", "c!d", "é:{x}")
WORKERS = ("w1", "w1-2", "W_3", "w1_")

STEPS_MS = (
    *(0, 0, 0, 0, 1, 5, 20, 50, 100, 200, 300, 400, 600, 900, 1_000, 1_000, 1_000, 1_300, 1_900),
    *(0, 0, 1, 10, 30, 50, 70, 150, 500, 700, 1_100, 1_500),
    *(-300, 2_500, 6_000, -4_000, 31_000, 400_000, 0),
)
"""Silences of more than two beats are rare, because they end in a recovery."""

WAITS_MS = (None, 60_000, 5_000, 0, 1_500, 1, 300, 90_000, -5)


def _policies() -> tuple[Policy, ...]:
    t = TierPolicy
    free = t("free", 2, weight=3, wait_budget_ms=12_000, queue_depth=5, depth_per_user=3)
    pro = t("pro", 3, weight=10, wait_budget_ms=45_000, depth_per_user=4)
    Pro = t("Pro", 3, reserved=1, weight=10, wait_budget_ms=45_000, depth_per_user=8)
    guest = t("gäste", 1, weight=1, wait_budget_ms=8_000, queue_depth=2, depth_per_user=2)
    fre = t("fre", 4, reserved=2, weight=1000, wait_budget_ms=30_000)
    four = (free, pro, Pro, guest)
    return (
        Policy(1, 3, four, queue_depth=8),
        Policy(1, 1, (replace(free, weight=50), pro), queue_depth=6, max_hold_ms=4_000),
        Policy(1, 6, (free, pro, Pro, guest, fre), queue_depth=40, max_hold_ms=0),
        Policy(1, 2, (pro, guest), grace_ms=2_000, drain_ms=0),
        Policy(1, 3, (Pro, fre), grace_ms=0, queue_depth=12, drain_ms=500),
        Policy(1, 3, four, is_paused=True),
        Policy(1, 0, four, queue_depth=8),
        Policy(1, 3, (t("free", 3, reserved=3, wait_budget_ms=5_000), pro, Pro)),
        Policy(1, 0),
        Policy(1, 4, (t("free", 4, weight=7, wait_budget_ms=9_000, depth_per_user=100), guest)),
        Policy(1, 2, (free, t("pro", 0, wait_budget_ms=4_000), fre), queue_depth=0),
    )


POLICIES = _policies()


@dataclass
class FakeWorker:
    """A worker's own numbers."""

    id: str
    seq: int = 0
    acked: int = 0
    ack: int = 0
    beat_at: int = 0
    seen: tuple[str, ...] = ()
    held: list[HeldTicket] = field(default_factory=list)  # what the store forgot, and so on
    waiting: list[WaitingTicket] = field(default_factory=list)


@dataclass
class Scenario:
    """A story told to the twins, one action after the other."""

    twins: Twins
    now: int = START
    server: str = "run-1"
    version: int = 0
    workers: list[FakeWorker] = field(default_factory=lambda: [FakeWorker(id) for id in WORKERS])
    tickets: list[str] = field(default_factory=list)
    diligent: int = 0

    def act(self, name: str, **values: int) -> None:
        """One action; before it, the first ``diligent`` workers beat where that is due."""
        for who, worker in enumerate(self.workers[: self.diligent]):
            if self.now - worker.beat_at >= self.twins.timing.beat_ms:
                self.beat(who, 0, 0)
        getattr(self, name)(**values)

    # -- Actions: each parameter's bound is in ACTIONS ----------------------------------------

    def enqueue(self, who: int, tier: int, flow: int, wait: int, known: int, **manner: int) -> None:
        # Ids whose order is not that of their birth; one is the beginning of another.
        born = len(self.tickets)
        ticket = f"t{born * 7919 % 1009}"
        ticket += "!x\0" if born % 9 == 7 else "-x" if born % 5 == 4 else ""
        self.tickets.append(ticket)
        command = Enqueue(ticket, self._tier(tier), FLOWS[flow], WAITS_MS[wait], bool(known))
        reply = self._say(self.workers[who], command, **manner)
        if isinstance(reply.answer, NeedPolicy):
            self.set_policy(policy=0, newer=0)

    def enqueue_again(self, who: int, which: int, tier: int, flow: int, **manner: int) -> None:
        ticket = self._pick(which)
        worker = self._owner(ticket, who)
        self._say(worker, Enqueue(ticket, self._tier(tier), FLOWS[flow]), **manner)

    def confirm(self, who: int, which: int, more: int, **manner: int) -> None:
        tickets = tuple(self._pick(which + i) for i in range(more + 1))
        self._say(self._owner(tickets[0], who), Confirm(tickets), **manner)

    def release(self, who: int, which: int, abnormal: int, **manner: int) -> None:
        ticket = self._pick_held(which)
        self._say(self._owner(ticket, who), Release(ticket, bool(abnormal)), **manner)

    def cancel(self, who: int, which: int, keep: int, expired: int, **manner: int) -> None:
        ticket = self._pick_waiting(which)
        command = Cancel(ticket, bool(keep), bool(expired))
        self._say(self._owner(ticket, who), command, **manner)

    def attach(self, who: int, which: int, wrong: int, **manner: int) -> None:
        ticket = self._pick_waiting(which)
        known = self._ledger.tickets.get(ticket)
        flow = "nobody" if wrong == 3 else known.flow if known else FLOWS[0]
        self._say(self.workers[who], Attach(ticket, flow), **manner)

    def revoke(self, which: int, force: int, **manner: int) -> None:
        self._say(None, Revoke(self._pick_held(which), force == 1), **manner)

    def beat(self, who: int, lie: int, forget_ack: int, **manner: int) -> None:
        worker = self.workers[who]
        held = [ticket for ticket in self._owned(worker, "g") if ticket.is_confirmed or lie == 1]
        items = [self._held(ticket) for ticket in held] + worker.held
        waiting = len(self._owned(worker, "w")) + len(worker.waiting)
        worker.held = []
        if lie == 2:
            items = items[1:]
        elif lie == 3:
            items.append(HeldTicket(f"lost{worker.seq}", TIERS[worker.seq % 5], FLOWS[0], 800))
        elif lie == 4:
            waiting += 1
        elif lie == 5:
            ticket = self._ledger.tickets.get(self._pick(worker.seq))
            items += [self._held(ticket)] if ticket and ticket.flow else []
        ack = 0 if forget_ack else worker.ack
        command = Beat(tuple(items), waiting, ack, worker.seen, f"host {worker.id}")
        reply = self._say_late(who, command) if lie == 7 else self._say(worker, command, **manner)
        assert isinstance(reply.answer, BeatReply)
        worker.ack, worker.seen = reply.answer.number, reply.answer.workers
        worker.beat_at = self.now
        if reply.answer.wants_waiting and lie != 6:
            self.reassert(who, 0, 0, 0)

    def reassert(self, who: int, lie: int, cut: int, time: int = 0, rude: int = 0) -> None:
        worker = self.workers[who]
        items = [self._waiting(ticket) for ticket in self._owned(worker, "w")] + worker.waiting
        worker.waiting = []
        if lie == 1:
            items = items[1:]
        elif lie == 2:
            ticket = f"s{worker.seq}"
            self.tickets.append(ticket)
            born = max(0, worker.seq - 3)
            flow = FLOWS[worker.seq % 4]
            items.append(
                WaitingTicket(ticket, TIERS[born % 5], flow, 40 * born, 9_000, born, born % 2 == 1)
            )
        elif lie == 3:
            ticket = self._ledger.tickets.get(self._pick(worker.seq))
            items += [self._waiting(ticket)] if ticket and ticket.flow else []
        items.sort(key=lambda item: item.ticket)
        after, upto = ("", "~") if cut == 0 else ("t3", "~") if cut == 1 else ("", "t6")
        items = [item for item in items if after < item.ticket <= upto]
        command = Reassert(tuple(items), after, upto, cut != 2)
        self._say(worker, command, time=time, rude=rude)

    def positions(self, who: int, which: int, more: int, flows: int, **manner: int) -> None:
        tickets = tuple(self._pick(which + i) for i in range(more + 1))
        self._say(self.workers[who], Positions(tickets, FLOWS[:flows]), **manner)

    def tick(self, who: int, **manner: int) -> None:
        self._say(self.workers[who] if who else None, Tick(), **manner)

    def set_policy(self, policy: int, newer: int, time: int = 0, rude: int = 0) -> None:
        chosen = POLICIES[policy]
        version = max(1, self.version + (1, 1, 2, 0, -1)[newer])
        self.version = max(version, self.version)
        limits = {name: getattr(chosen, name) for name in POLICY_LIMITS}
        self._say(None, SetPolicy(Policy(version, **limits)), time=time, rude=rude)

    def sign_off(self, who: int, **manner: int) -> None:
        worker = self.workers[who]
        self._say(worker, SignOff(), **manner)
        if worker.seq % 2:  # a new process takes the place of the old one, or one that lingers
            self.workers[who] = FakeWorker(f"{WORKERS[who]}-{worker.seq}")

    def snapshot(self, **manner: int) -> None:
        self._say(None, Snapshot(), **manner)

    def forget(self, **manner: int) -> None:
        """The store loses everything; the workers remember, and say so in their next beats."""
        for worker in self.workers:
            worker.held += [self._held(ticket) for ticket in self._owned(worker, "g")]
            worker.waiting += [self._waiting(ticket) for ticket in self._owned(worker, "w")]
        self.twins.forget()

    # -- How it is said -----------------------------------------------------------------------

    def _say(
        self, worker: FakeWorker | None, command: Command, time: int = 0, rude: int = 0
    ) -> Reply:
        self.now += STEPS_MS[time]
        if rude == 46:
            self.server = f"run-{self.now % 3}"
        server = "" if rude == 45 else self.server
        if worker is None:
            return self.twins.do(Call(self.now, server=server), command)
        worker.seq += 1
        seq, acked = worker.seq, worker.acked
        if rude in (42, 43):
            seq = max(1, seq - 2 * (rude - 41))
        elif rude == 44:
            acked = seq + 3
        reply = self.twins.do(Call(self.now, worker.id, seq, acked, server), command)
        if rude != 41:
            worker.acked = worker.seq
        return reply

    def _say_late(self, who: int, command: Command) -> Reply:
        """Say what was put together before a request that overtook it."""
        worker = self.workers[who]
        worker.seq += 1
        call = Call(self.now, worker.id, worker.seq, worker.acked, self.server)
        self.enqueue(who, 0, who, 0, 0)
        return self.twins.do(call, command)

    # -- What there is to speak of ------------------------------------------------------------

    @property
    def _ledger(self) -> Any:
        return self.twins.scheduler.ledger

    def _tier(self, which: int) -> str:
        """One that the policy has; any for the last two of the numbers."""
        policy = self._ledger.policy
        if policy is None or not policy.tiers or which > 5:
            return TIERS[which % len(TIERS)]
        return str(policy.tiers[which % len(policy.tiers)].slug)

    def _pick(self, which: int) -> str:
        """A ticket, the latest first; one that nobody knows where there is none."""
        if not self.tickets:
            return "unknown"
        return self.tickets[-1 - which % len(self.tickets)]

    def _pick_held(self, which: int) -> str:
        return self._pick_of(("granted", "revoking", "draining"), which)

    def _pick_waiting(self, which: int) -> str:
        return self._pick_of(("waiting", "parked", "away"), which)

    def _pick_of(self, states: tuple[str, ...], which: int) -> str:
        """One of those in these states, mostly; any for the last two of the numbers."""
        found = [t.id for t in self._ledger.tickets.values() if str(t.state) in states]
        return found[which % len(found)] if found and which < 10 else self._pick(which)

    def _owner(self, ticket: str, other: int) -> FakeWorker:
        """The ticket's owner, or another worker for numbers from 1 on."""
        known = self._ledger.tickets.get(ticket)
        owners = [worker for worker in self.workers if known and worker.id == known.worker]
        return owners[0] if owners and not other else self.workers[other]

    def _owned(self, worker: FakeWorker, mark: str) -> list[Any]:
        marks = "g" if mark == "g" else "wp"
        return list(self._ledger.owned_by(worker.id, marks))

    def _held(self, ticket: Any) -> HeldTicket:
        held_ms = max(0, self._ledger.now - ticket.granted_at) if ticket.granted_at else 5
        return HeldTicket(ticket.id, ticket.tier, ticket.flow, held_ms)

    def _waiting(self, ticket: Any) -> WaitingTicket:
        now = self._ledger.now
        waited, left = now - (ticket.order_at or now), max(0, ticket.deadline_at - now)
        return WaitingTicket(
            ticket.id, ticket.tier, ticket.flow, waited, left, ticket.order_seq, ticket.is_known
        )


POLICY_LIMITS = (
    "capacity",
    "tiers",
    "queue_depth",
    "max_hold_ms",
    "drain_ms",
    "grace_ms",
    "is_paused",
)

MANNER = {"time": len(STEPS_MS) - 1, "rude": 50}

ACTIONS: dict[str, dict[str, int]] = {
    "enqueue": {"who": 3, "tier": 7, "flow": 3, "wait": len(WAITS_MS) - 1, "known": 1},
    "enqueue_again": {"who": 3, "which": 9, "tier": 7, "flow": 3},
    "confirm": {"who": 3, "which": 9, "more": 2},
    "release": {"who": 3, "which": 11, "abnormal": 1},
    "cancel": {"who": 3, "which": 11, "keep": 1, "expired": 1},
    "attach": {"who": 3, "which": 11, "wrong": 3},
    "revoke": {"which": 11, "force": 2},
    "beat": {"who": 3, "lie": 7, "forget_ack": 1},
    "reassert": {"who": 3, "lie": 3, "cut": 2},
    "positions": {"who": 3, "which": 9, "more": 4, "flows": 3},
    "tick": {"who": 3},
    "set_policy": {"policy": len(POLICIES) - 1, "newer": 4},
    "sign_off": {"who": 3},
    "snapshot": {},
    "forget": {},
}
"""The actions and the largest value of each of their parameters."""

WEIGHTS = {
    "enqueue": 14,
    "release": 6,
    "beat": 7,
    "cancel": 4,
    "confirm": 2,
    "tick": 2,
    "attach": 3,
}

PACES = (range(10), range(19), range(31), range(len(STEPS_MS)), (0, 14))
"""From hurried to slow; in the last one all happens on the second, so that instants meet."""

BY_OWNER = ("release", "cancel", "confirm", "enqueue_again")
"""Actions on a ticket that its owner takes, most of the time."""


def tell(scenario: Scenario, seed: int, length: int) -> None:
    """A story by a seeded generator; most of it plain, as real workers speak."""
    chance = random.Random(seed)
    names = [name for name in ACTIONS for _ in range(WEIGHTS.get(name, 1))]
    scenario.diligent = chance.choice((0, 3, 3, 4))
    pace = chance.choice(PACES)
    for _ in range(length):
        name = chance.choice(names)
        values = {key: chance.randint(0, most) for key, most in ACTIONS[name].items()}
        if name in BY_OWNER and chance.random() < 0.8:
            values["who"] = 0
        if name == "set_policy" and chance.random() < 0.7:
            values |= {"policy": chance.randint(0, 5), "newer": 0}
        values["time"] = chance.choice(pace)
        values["rude"] = chance.randint(41, 46) if chance.random() < 0.03 else 0
        scenario.act(name, **values)
