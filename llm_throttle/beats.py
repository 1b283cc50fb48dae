"""The beat: what a worker tells the store regularly, and what it learns that way.

News is the fast path and may get lost; what a beat finds is the truth (docs/protocol.md).
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from .entries import Hold, Waiter
from .roster import START_WITHIN_BEATS, Roster
from .scheduling.commands import Beat, Reassert
from .scheduling.decisions import BeatReply, Gone

CONFIRM_WITHIN_BEATS = 2.0
"""A call is closed when the confirmation of its grant is still unanswered at this age of the last
beat, because a silent worker's unconfirmed grants are passed on from then."""

REASSERT_SLICE = 128


class Beats:
    """Keeps one roster and the store agreed."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self._number = 0
        self._seen: tuple[str, ...] = ()

    def beat(self, label: str) -> BeatReply:
        """Tell the store what is true here and learn what is not known here.

        Raises ``BackendDown``.
        """
        roster = self.roster
        sent_at = time.monotonic()
        with roster.lock:
            stamp = roster.sign()
            told = dict(roster.held)
            beat = Beat(
                held=tuple(hold.as_told(sent_at) for hold in told.values()),
                waiting=sum(waiter.is_queued for waiter in roster.waiting.values()),
                ack=self._number,
                seen=self._seen,
                label=label,
            )
        answer = roster.call(stamp, beat)
        assert isinstance(answer, BeatReply)  # noqa: S101 - a beat has no other
        with roster.lock:
            if roster.beat_age > START_WITHIN_BEATS:
                self._doubt_news(told)
            roster.beat_sent_at = sent_at
            self._number, self._seen = answer.number, answer.workers
            for ticket in told.keys() - {*answer.gone, *answer.lost, *answer.revoked}:
                told[ticket].is_confirmed = True
            unheard = roster.take_unheard()
        roster.know_workers(answer.workers)
        self._act_on(answer)
        for command in unheard:
            roster.finish(command)
        return answer

    def _doubt_news(self, told: dict[str, Hold]) -> None:
        """After a silence, in which grants may have been passed on: news of them may be on its way.

        ``told`` are the slots that the beat named, which the store has judged.
        """
        for waiter in self.roster.waiting.values():
            waiter.is_doubtful = True
        for ticket, hold in self.roster.held.items():
            hold.is_doubtful = ticket not in told

    def _act_on(self, answer: BeatReply) -> None:
        for ticket in answer.granted:
            self.roster.hear_grant(ticket)
        for ticket in answer.revoked:
            self.roster.lose(ticket, "revoked")
        for ticket in answer.gone:
            self.roster.lose(ticket, "gone")
        for ticket in answer.lost:
            self.roster.lose(ticket, "presumed_dead")
        if answer.wants_waiting:
            self._reassert()

    def _reassert(self) -> None:
        """Send the full waiting list, slice by slice in ticket order."""
        roster = self.roster
        with roster.lock:
            queued = sorted((t, w) for t, w in roster.waiting.items() if w.is_queued)
        after = ""
        for last, part in _slices([waiter for _, waiter in queued], REASSERT_SLICE):
            upto = "~" if last else part[-1].ticket
            now = time.monotonic()
            items = tuple(waiter.as_told(now) for waiter in part)
            stamp = roster.sign()
            answer = roster.call(stamp, Reassert(items, after, upto, last))
            for ticket in answer.tickets if isinstance(answer, Gone) else ():
                roster.hear_end(ticket, Gone((ticket,)))
            after = upto

    def give_up_unconfirmed(self) -> None:
        """Close the calls whose slots a silent store may pass on."""
        roster = self.roster
        if roster.beat_age < CONFIRM_WITHIN_BEATS:
            return
        with roster.lock:
            doubtful = [hold.ticket for hold in roster.held.values() if not hold.is_confirmed]
        for ticket in doubtful:
            roster.lose(ticket, "unconfirmed")


def _slices(items: list[Waiter], size: int) -> Iterator[tuple[bool, list[Waiter]]]:
    for start in range(0, max(1, len(items)), size):
        yield start + size >= len(items), items[start : start + size]
