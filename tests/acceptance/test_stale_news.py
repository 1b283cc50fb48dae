"""News of a grant that was passed on while its worker stood still starts no call."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from llm_throttle.backends.base import Backend, Stamp
from llm_throttle.beats import Beats
from llm_throttle.entries import Waiter
from llm_throttle.lease import Lease
from llm_throttle.roster import Roster
from llm_throttle.scheduling import commands
from llm_throttle.scheduling.commands import Command
from llm_throttle.scheduling.decisions import BeatReply, Done, Gone, Granted, Notice, Queued, Reply
from llm_throttle.scheduling.recovery import Timing

NEWS = Notice("w", "granted", "t")


class Store(Backend):
    """Answers as a store does that has passed the ticket on, or has not."""

    def __init__(self, *, passed_on: bool) -> None:
        super().__init__(Timing())
        self.passed_on = passed_on
        self.during_beat = lambda: None
        self.heard: list[Command] = []

    def submit(self, upstream: str, stamp: Stamp, command: Command) -> Future[Reply]:
        future: Future[Reply] = Future()
        future.set_result(self.call(upstream, stamp, command))
        return future

    def call(self, upstream: str, stamp: Stamp, command: Command) -> Reply:
        self.heard.append(command)
        if isinstance(command, commands.Enqueue):
            return Reply(Queued(command.ticket, 0, 60_000))
        if isinstance(command, commands.Beat):
            self.during_beat()
            is_listed = any(item.ticket == "t" for item in command.held)
            gone = ("t",) if is_listed and self.passed_on else ()
            return Reply(BeatReply(stamp.seq, gone=gone))
        is_gone = isinstance(command, commands.Confirm) and self.passed_on
        return Reply(Gone(("t",)) if is_gone else Done())


def waiting(store: Store) -> tuple[Roster, Waiter]:
    """A worker with one waiter, which has not beaten for a while."""
    roster = Roster("sim", "w", store, lambda roster, delay: None)
    waiter = Waiter("t", "gold", "u")
    roster.enqueue(waiter, None)
    roster.beat_sent_at -= 10
    return roster, waiter


def starts(roster: Roster, waiter: Waiter) -> bool:
    """Whether the request goes on to its call."""
    if not isinstance(waiter.outcome.result(0), Granted):
        return False
    lease = Lease(roster, "t", "gold", 0.0)
    has_started = roster.start("t", lease)
    lease.release()
    return has_started


@pytest.mark.parametrize("when", ["before the beat", "during the beat", "after the beat"])
def test_a_grant_that_was_passed_on_is_not_used(when: str) -> None:
    store = Store(passed_on=True)
    roster, waiter = waiting(store)
    if when == "before the beat":
        roster.deliver(NEWS)
    elif when == "during the beat":
        store.during_beat = lambda: roster.deliver(NEWS)
    Beats(roster).beat("")
    if when == "after the beat":
        roster.deliver(NEWS)
    assert not starts(roster, waiter)
    assert roster.is_empty


def test_a_true_grant_after_a_silence_is_used() -> None:
    store = Store(passed_on=False)
    roster, waiter = waiting(store)
    Beats(roster).beat("")
    roster.deliver(NEWS)
    assert starts(roster, waiter)


def test_without_a_silence_a_grant_is_used_at_once() -> None:
    store = Store(passed_on=False)
    roster, waiter = waiting(store)
    roster.beat_sent_at += 10
    Beats(roster).beat("")
    roster.deliver(NEWS)
    assert not [command for command in store.heard if isinstance(command, commands.Confirm)]
    assert starts(roster, waiter)
