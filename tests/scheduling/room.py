"""Workers as tests play them: they sign, remember what they hear, and beat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from llm_throttle.scheduling import commands
from llm_throttle.scheduling.commands import Call, Command
from llm_throttle.scheduling.decisions import (
    Answer,
    BeatReply,
    Granted,
    Notice,
    Overview,
    Place,
    Places,
    Queued,
    Reply,
)
from llm_throttle.scheduling.policy import Policy, TierPolicy
from llm_throttle.scheduling.recovery import Timing
from llm_throttle.scheduling.scheduler import Scheduler

LONG = 10**9
NO_RECOVERY = Timing(recovery_ms=0)


def tier(slug: str = "free", cap: int = 10_000, **limits: Any) -> TierPolicy:
    return TierPolicy(slug, cap, **{"wait_budget_ms": LONG, "depth_per_user": 100} | limits)


def policy(*tiers: TierPolicy, capacity: int = 1, version: int = 1, **limits: Any) -> Policy:
    return Policy(version, capacity, tiers or (tier(),), **{"max_hold_ms": 0} | limits)


class Room:
    """A waiting room and its workers. The flow of ticket ``a1`` is ``a`` where none is named."""

    def __init__(
        self,
        rules: Policy | None = None,
        *,
        timing: Timing = NO_RECOVERY,
        workers: Iterable[str] = ("w1",),
    ) -> None:
        self.now = 1_000_000
        self.scheduler = Scheduler("sim", timing)
        self.workers = list(workers)
        self.seqs: Counter[str] = Counter()
        self.acks: Counter[str] = Counter()
        self.asked: dict[str, tuple[str, str, str, int, int, int]] = {}
        self.held: dict[str, str] = {}
        self.waiting: dict[str, str] = {}
        self.notices: list[Notice] = []
        self.granted: list[str] = []
        self.reply = Reply(Places(()))
        if rules:
            for worker in self.workers:
                self.beat(worker)
            self.edit(rules)

    # -- What is said -------------------------------------------------------------------------

    def say(
        self,
        command: Command,
        worker: str = "w1",
        *,
        seq: int | None = None,
        acked: int = 0,
        server: str = "",
    ) -> Answer:
        if seq is None:
            self.seqs[worker] += 1
            seq = self.seqs[worker]
        self.reply = self.scheduler.apply(Call(self.now, worker, seq, acked, server), command)
        self.notices.extend(self.reply.notices)
        for notice in self.reply.notices:
            self._hear(notice)
        return self.reply.answer

    def _hear(self, notice: Notice) -> None:
        if notice.kind == "granted":
            self.granted.append(notice.ticket)
            if self.waiting.pop(notice.ticket, None):
                self.held[notice.ticket] = notice.worker
        elif notice.kind == "refused" or (
            notice.kind == "moved" and self.waiting.get(notice.ticket) == notice.worker
        ):
            self.waiting.pop(notice.ticket, None)

    def ask(
        self,
        ticket: str,
        tier: str = "free",
        *,
        flow: str | None = None,
        worker: str = "w1",
        wait_ms: int | None = None,
        is_known: bool = False,
        seq: int | None = None,
    ) -> Answer:
        flow = ticket.rstrip("0123456789") if flow is None else flow
        command = commands.Enqueue(ticket, tier, flow, wait_ms, is_known)
        answer = self.say(command, worker, seq=seq)
        self.asked[ticket] = (tier, flow, worker, self.now, seq or self.seqs[worker], is_known)
        if isinstance(answer, Granted) and ticket not in self.held:
            self.waiting.pop(ticket, None)
            self.held[ticket] = worker
            if ticket not in self.granted[-1:]:
                self.granted.append(ticket)
        elif isinstance(answer, Queued):
            self.waiting[ticket] = worker
        return answer

    def ask_all(self, tickets: Iterable[str], *args: Any, **kwargs: Any) -> None:
        for ticket in tickets:
            self.ask(ticket, *args, **kwargs)

    def release(self, ticket: str, *, is_abnormal: bool = False) -> list[str]:
        """End a call; the tickets that this brings a slot."""
        worker = self.held.pop(ticket)
        return self.grants(commands.Release(ticket, is_abnormal), worker)

    def cancel(self, ticket: str, **how: bool) -> Answer:
        worker = self.waiting.pop(ticket, None) or self.held.pop(ticket, "w1")
        return self.say(commands.Cancel(ticket, **how), worker)

    def attach(self, ticket: str, *, worker: str = "w1", flow: str | None = None) -> Answer:
        flow = ticket.rstrip("0123456789") if flow is None else flow
        answer = self.say(commands.Attach(ticket, flow), worker)
        if isinstance(answer, Queued):
            self.waiting[ticket] = worker
        return answer

    def grants(self, command: Command, worker: str = "w1") -> list[str]:
        self.say(command, worker)
        return [notice.ticket for notice in self.reply.notices if notice.kind == "granted"]

    def tick(self) -> list[str]:
        return self.grants(commands.Tick())

    def edit(self, rules: Policy) -> list[str]:
        return self.grants(commands.SetPolicy(rules))

    # -- Beats --------------------------------------------------------------------------------

    def beat(
        self,
        worker: str = "w1",
        *,
        held: Iterable[str] | None = None,
        waiting: int | None = None,
        ack: int | None = None,
        seen: Iterable[str] = (),
        seq: int | None = None,
        acked: int = 0,
        held_ms: int = 0,
    ) -> BeatReply:
        if held is None:
            held = [ticket for ticket, owner in self.held.items() if owner == worker]
        if waiting is None:
            waiting = sum(owner == worker for owner in self.waiting.values())
        items = tuple(
            commands.HeldTicket(ticket, *self.asked.get(ticket, ("free", "?"))[:2], held_ms)
            for ticket in held
        )
        ack = self.acks[worker] if ack is None else ack
        command = commands.Beat(items, waiting, ack, tuple(seen))
        answer = self.say(command, worker, seq=seq, acked=acked)
        assert isinstance(answer, BeatReply)
        self.acks[worker] = max(self.acks[worker], answer.number)
        return answer

    def reassert(
        self,
        tickets: Iterable[str],
        worker: str = "w1",
        *,
        after: str = "",
        upto: str = "~",
        is_last: bool = True,
        seq: int | None = None,
    ) -> Answer:
        items = []
        for ticket in sorted(tickets):
            slug, flow, _, since, asked_seq, is_known = self.asked[ticket]
            waited = self.now - since
            items.append(
                commands.WaitingTicket(
                    ticket, slug, flow, waited, LONG - waited, asked_seq, bool(is_known)
                )
            )
        return self.say(commands.Reassert(tuple(items), after, upto, is_last), worker, seq=seq)

    def wait(self, ms: int, *, silent: Iterable[str] = ()) -> None:
        """Let time pass; every worker that is not silent beats each second."""
        end = self.now + ms
        while self.now < end:
            self.now = min(end, (self.now // 1_000 + 1) * 1_000)
            if self.now % 1_000 == 0:
                for worker in self.workers:
                    if worker not in silent:
                        self.beat(worker)

    # -- What is seen -------------------------------------------------------------------------

    @property
    def overview(self) -> Overview:
        answer = self.scheduler.apply(Call(self.now), commands.Snapshot()).answer
        assert isinstance(answer, Overview)
        return answer

    @property
    def counts(self) -> tuple[int, int]:
        """Slots in flight and waiters."""
        overview = self.overview
        return overview.in_flight, overview.waiting

    def place(self, ticket: str) -> Place:
        answer = self.say(commands.Positions((ticket,)))
        assert isinstance(answer, Places)
        return answer.places[0]

    def ahead(self, ticket: str) -> int:
        return self.place(ticket).ahead

    def serve_all(self) -> list[str]:
        """Release what is held, oldest first, until nobody waits; the order of the grants."""
        before = len(self.granted)
        while self.waiting:
            self.release(next(iter(self.held)))
        return self.granted[before:]
