"""Promises that hold after every step of any history (DESIGN: never above, never idle, ...).

Three workers of an upstream do whatever workers do: ask, leave, come back, hold, release late,
miss news, fall silent, die, thaw, sign off; an operator edits; the store forgets. After every
verb an auditor recomputes the books from the tickets alone.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from llm_throttle.scheduling import commands
from llm_throttle.scheduling.commands import Call, Command
from llm_throttle.scheduling.decisions import (
    Answer,
    BeatReply,
    Gone,
    Granted,
    Notice,
    Queued,
    Refused,
)
from llm_throttle.scheduling.policy import Policy, TierPolicy
from llm_throttle.scheduling.recovery import Timing
from llm_throttle.scheduling.scheduler import Scheduler

from .books import Auditor
from .room import Room

TIERS = ("gold", "free", "guest")
USERS = ("a", "b", "c", "d")
WORKERS = ("w1", "w2", "w3")


class WatchedRoom(Room):
    """A room whose books are audited after every verb, and whose workers may miss news."""

    def __init__(self, timing: Timing) -> None:
        super().__init__(timing=timing, workers=WORKERS)
        self.auditor = Auditor(self.scheduler)
        self.deaf: set[str] = set()
        self.told: Counter[str] = Counter()

    def say(self, command: Command, worker: str = "w1", **kwargs: object) -> Answer:
        answer = super().say(command, worker, **kwargs)
        self.auditor.check(has_more=self.reply.has_more)
        return answer

    def beat(self, worker: str = "w1", **kwargs: Any) -> BeatReply:
        """Beat, read the answer and do as it says."""
        answer = super().beat(worker, **kwargs)
        for ticket in answer.granted:
            if self.waiting.get(ticket) == worker:
                del self.waiting[ticket]
                self.held[ticket] = worker
        for ticket in answer.gone:
            self.held.pop(ticket, None)
        if answer.wants_waiting:
            mine = [ticket for ticket, owner in self.waiting.items() if owner == worker]
            lost = self.reassert(mine, worker)
            for ticket in lost.tickets if isinstance(lost, Gone) else ():
                self.waiting.pop(ticket, None)
        return answer

    def beat_in_vain(self, worker: str) -> None:
        """Beat, and never get the answer."""
        acked = self.acks[worker]
        super().beat(worker)
        self.acks[worker] = acked

    def _hear(self, notice: Notice) -> None:
        if notice.kind == "granted":
            self.told[notice.ticket] += 1
        if notice.worker not in self.deaf:
            super()._hear(notice)

    def forget(self) -> None:
        """The store comes back empty."""
        self.scheduler = Scheduler("sim", self.scheduler.ledger.timing)
        self.auditor = Auditor(self.scheduler)
        self.told.clear()


def mostly(usual: object, *others: object) -> st.SearchStrategy[Any]:
    """The usual value in about two of three draws."""
    return st.sampled_from([usual] * 2 * len(others) + list(others))


@st.composite
def policies(draw: st.DrawFn, version: int) -> Policy:
    slugs = draw(mostly(TIERS, TIERS[:1], TIERS[1:]))
    tiers = tuple(
        TierPolicy(
            slug,
            cap=draw(mostly(5, 0, 1, 2)),
            reserved=draw(mostly(0, 1, 2, 5)),
            weight=draw(st.sampled_from([1, 3, 10, 100, 1000])),
            wait_budget_ms=draw(mostly(60_000, 0, 500, 5_000)),
            queue_depth=draw(mostly(100, 0, 1, 3)),
            depth_per_user=draw(mostly(8, 1, 2)),
        )
        for slug in slugs
    )
    return Policy(
        version,
        draw(mostly(3, 0, 1, 2, 6)),
        tiers,
        queue_depth=draw(mostly(100, 0, 4, 12)),
        max_hold_ms=draw(mostly(300_000, 0, 3_000)),
        drain_ms=draw(st.sampled_from([50, 0, 500])),
        grace_ms=draw(mostly(15_000, 0, 2_000)),
        is_paused=draw(st.integers(0, 9)) == 9,
    )


class WaitingRoom(RuleBasedStateMachine):
    """See the head of this file."""

    room: WatchedRoom

    @initialize(recovery_ms=st.sampled_from([0, 1_500]))
    def open(self, recovery_ms: int) -> None:
        self.room = WatchedRoom(Timing(recovery_ms=recovery_ms))
        self.version = 1
        self.count = 0
        self.silent: set[str] = set()
        roomy = tuple(TierPolicy(slug, 5, 0, 3, 60_000, 100, 8) for slug in TIERS)
        self.room.edit(Policy(1, 3, roomy))
        for worker in WORKERS:
            self.room.beat(worker)
        self.room.wait(4_000)

    def _pick(self, data: st.DataObject, tickets: dict[str, str]) -> str:
        return data.draw(st.sampled_from(sorted(tickets)))

    # -- Requests -----------------------------------------------------------------------------

    @rule(
        worker=st.sampled_from(WORKERS),
        tier=st.sampled_from(TIERS),
        user=st.sampled_from(USERS),
        wait_ms=st.sampled_from([None, None, None, 0, 300, 3_000]),
        is_known=st.booleans(),
    )
    def ask(self, worker: str, tier: str, user: str, wait_ms: int | None, is_known: bool) -> None:
        self.count += 1
        self.room.now += self.count % 2
        ticket = f"{user}{self.count}"
        answer = self.room.ask(ticket, tier, worker=worker, wait_ms=wait_ms, is_known=is_known)
        if isinstance(answer, Granted | Queued):
            self._check_bounds(user, tier, answer)
        elif isinstance(answer, Refused):
            assert ticket not in self.room.scheduler.ledger.tickets
            assert answer.retry_ms <= 60_000

    @rule(
        tier=st.sampled_from(TIERS),
        users=st.lists(st.sampled_from(USERS), min_size=2, max_size=8),
    )
    def ask_in_a_crowd(self, tier: str, users: list[str]) -> None:
        for index, user in enumerate(users):
            self.ask(WORKERS[index % 3], tier, user, None, user < "c")

    @rule(seed=st.integers(0, 2**16))
    def bustle(self, seed: int) -> None:
        """A while of ordinary traffic."""
        rng = random.Random(seed)
        for _ in range(25):
            deed = rng.random()
            if deed < 0.40:
                wait_ms = rng.choice([None, None, None, 900])
                worker, tier, user = map(rng.choice, (WORKERS, TIERS, USERS))
                self.ask(worker, tier, user, wait_ms, rng.random() < 0.5)
            elif deed < 0.75 and self.room.held:
                ticket = rng.choice(list(self.room.held))
                self.room.release(ticket, is_abnormal=rng.random() < 0.3)
            elif deed < 0.83 and self.room.waiting:
                ticket = rng.choice(list(self.room.waiting))
                self.room.cancel(ticket, keep_place=rng.random() < 0.7)
            elif deed < 0.88 and self.room.asked:
                ticket = rng.choice(list(self.room.asked)[-12:])
                self.room.attach(ticket, worker=rng.choice(WORKERS))
            elif deed < 0.92:
                self.room.tick()
            else:
                self.room.wait(rng.choice([10, 300, 1_000]), silent=self.silent)

    def _check_bounds(self, user: str, slug: str, answer: Answer) -> None:
        ledger = self.room.scheduler.ledger
        assert ledger.policy is not None
        limits = ledger.policy.by_slug[slug]
        assert ledger.flows[user].depth <= limits.depth_per_user
        if isinstance(answer, Queued):
            assert ledger.tiers[slug].waiting <= limits.queue_depth
            assert ledger.waiting <= ledger.policy.queue_depth

    @precondition(lambda self: self.room.held)
    @rule(data=st.data(), is_abnormal=st.booleans())
    def release(self, data: st.DataObject, is_abnormal: bool) -> None:
        self.room.release(self._pick(data, self.room.held), is_abnormal=is_abnormal)

    @precondition(lambda self: self.room.held)
    @rule(data=st.data())
    def release_twice(self, data: st.DataObject) -> None:
        ticket = self._pick(data, self.room.held)
        worker = self.room.held[ticket]
        self.room.release(ticket)
        in_flight = self.room.scheduler.ledger.in_flight
        assert self.room.say(commands.Release(ticket), worker) == Gone((ticket,))
        assert self.room.scheduler.ledger.in_flight >= in_flight

    @precondition(lambda self: self.room.waiting)
    @rule(data=st.data(), keep_place=st.booleans(), has_expired=st.booleans())
    def cancel(self, data: st.DataObject, keep_place: bool, has_expired: bool) -> None:
        ticket = self._pick(data, self.room.waiting)
        self.room.cancel(ticket, keep_place=keep_place, has_expired=has_expired)

    @precondition(lambda self: self.room.held)
    @rule(data=st.data())
    def cancel_a_grant(self, data: st.DataObject) -> None:
        self.room.cancel(self._pick(data, self.room.held))

    @rule(worker=st.sampled_from(WORKERS), user=st.sampled_from(USERS))
    def cancel_before_asking(self, worker: str, user: str) -> None:
        self.count += 1
        ticket = f"{user}{self.count}"
        self.room.say(commands.Cancel(ticket), worker)
        late = commands.Enqueue(ticket, "free", user)
        assert isinstance(self.room.say(late, worker, seq=self.room.seqs[worker] - 1), Gone)

    @precondition(lambda self: self.room.asked)
    @rule(data=st.data(), worker=st.sampled_from(WORKERS))
    def attach(self, data: st.DataObject, worker: str) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.room.asked)[-12:]))
        self.room.attach(ticket, worker=worker)

    @precondition(lambda self: self.room.held)
    @rule(data=st.data(), force=st.booleans())
    def revoke(self, data: st.DataObject, force: bool) -> None:
        self.room.say(commands.Revoke(self._pick(data, self.room.held), force), "")

    # -- Workers ------------------------------------------------------------------------------

    @rule(worker=st.sampled_from(WORKERS))
    def miss_news(self, worker: str) -> None:
        self.room.deaf ^= {worker}

    @rule(worker=st.sampled_from(WORKERS), reads_answer=st.booleans())
    def beat(self, worker: str, reads_answer: bool) -> None:
        if reads_answer:
            self.room.beat(worker, seen=WORKERS)
        else:
            self.room.beat_in_vain(worker)

    @precondition(lambda self: self.room.held)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        ticket = self._pick(data, self.room.held)
        self.room.say(commands.Confirm((ticket,)), self.room.held[ticket])

    @rule(
        ms=st.sampled_from([1, 50, 400, 1_000, 1_000, 2_500, 6_000, 12_000]),
    )
    def wait(self, ms: int) -> None:
        self.room.wait(ms, silent=self.silent)
        self.room.tick()

    @rule(worker=st.sampled_from(WORKERS))
    def fall_silent_or_wake(self, worker: str) -> None:
        self.silent ^= {worker}

    @rule(worker=st.sampled_from(WORKERS))
    def sign_off_and_start_again(self, worker: str) -> None:
        self.room.say(commands.SignOff(), worker)
        for tickets in (self.room.held, self.room.waiting):
            for ticket in [ticket for ticket, owner in tickets.items() if owner == worker]:
                del tickets[ticket]
        self.room.beat(worker)

    # -- The operator, the store --------------------------------------------------------------

    @rule(data=st.data())
    def edit(self, data: st.DataObject) -> None:
        self.version += 1
        self.room.edit(data.draw(policies(self.version)))

    @rule()
    def tick(self) -> None:
        """Work that is left over comes to an end."""
        for _ in range(10):
            self.room.tick()
            if not self.room.reply.has_more:
                break
        assert not self.room.reply.has_more

    @precondition(lambda self: self.room.scheduler.ledger.timing.recovery_ms)
    @rule(ms=st.sampled_from([-60_000, -500, 30_000]))
    def step_the_clock(self, ms: int) -> None:
        self.room.now += ms
        self.room.tick()

    @precondition(lambda self: self.room.scheduler.ledger.timing.recovery_ms)
    @rule(data=st.data())
    def forget_everything(self, data: st.DataObject) -> None:
        self.room.forget()
        self.version += 1
        self.room.edit(data.draw(policies(self.version)))

    # -- Always -------------------------------------------------------------------------------

    @invariant()
    def nobody_is_told_twice(self) -> None:
        if hasattr(self, "room"):
            assert all(count == 1 for count in self.room.told.values())

    def teardown(self) -> None:
        """Everybody leaves; the last worker dies instead. Then nothing is left of them."""
        if not hasattr(self, "room"):
            return
        room = self.room
        for ticket in list(room.waiting):
            room.cancel(ticket)
        for ticket in list(room.held):
            room.release(ticket)
        for worker in WORKERS[:-1]:
            room.say(commands.SignOff(), worker)
        for _ in range(320):
            room.now += 1_000
            room.scheduler.apply(Call(room.now), commands.Tick())
        room.auditor.check_empty()


WaitingRoom.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestWaitingRoom = WaitingRoom.TestCase


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), recovery_ms=st.sampled_from([0, 1_500]))
def test_a_long_ordinary_day(seed: int, recovery_ms: int) -> None:
    """The same, with fewer surprises and more traffic."""
    rng = random.Random(seed)
    life = WaitingRoom()
    life.open(recovery_ms)
    for hour in range(24):
        life.bustle(rng.randrange(2**32))
        surprise = rng.random()
        if surprise < 0.15:
            life.fall_silent_or_wake(rng.choice(WORKERS))
        elif surprise < 0.25:
            life.miss_news(rng.choice(WORKERS))
        elif surprise < 0.35:
            limits = [TierPolicy(slug, rng.randint(1, 5), 0, 3, 60_000, 100, 8) for slug in TIERS]
            life.room.edit(Policy(hour + 2, rng.randint(1, 6), tuple(limits)))
        elif surprise < 0.45:
            life.wait(rng.choice([2_500, 6_000, 12_000]))
        elif surprise < 0.5 and recovery_ms:
            in_force = life.room.scheduler.ledger.policy
            life.room.forget()
            life.room.edit(in_force)
        life.nobody_is_told_twice()
    life.teardown()
