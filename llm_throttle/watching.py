"""Where waiters stand: asked for in batches, told only when it changes.

All tickets that are watched in a process at one upstream are asked for together, by one thread,
once per ``PUSH_INTERVAL``. Subscribers are rung when there is something new for them and take the
latest of it, so that a slow one misses steps and never the last.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Iterator

from .alarms import Alarm, ring_all
from .conf import settings
from .exceptions import BackendDown
from .positions import Left, Look, News, Position, Shown
from .roster import Roster
from .scheduling.commands import Positions
from .scheduling.decisions import Place, Places

logger = logging.getLogger(__name__)

SLICE = 256
"""Tickets per command: about 1.5 ms in the store."""

GATHER_S = 0.02
"""Newcomers are gathered for so long before their first look."""

LULL_S = 1.0
"""Seconds between two looks where the last one found nothing new and nothing moved here."""

SAME_ROUND = 0.9
"""Who was looked for within this part of the interval, as a newcomer, waits for the next round."""

ANSWER_WITHIN_S = 5.0
"""A look that is not answered by then is given up; the courier's own time-outs are shorter."""


class Subscription:
    """One subscriber's tickets: those it names, and those of ``flow`` where that is not "".

    Whoever uses it keeps it alive; one that is dropped is no longer rung.
    """

    def __init__(self, watch: Watch, alarm: Alarm, flow: str = "") -> None:
        self.alarm = alarm
        self.flow = flow
        self.tickets: frozenset[str] = frozenset()
        self.looked_at = 0.0
        self._watch = watch
        self._unseen: set[str] = set()
        self._shown: dict[str, Shown] = {}
        self._news: dict[str, News] = {}
        self._lock = threading.Lock()

    def add(self, ticket: str) -> None:
        """Watch one more ticket; there is news of it soon."""
        with self._lock:
            self.tickets |= {ticket}
            self._unseen.add(ticket)
        self._watch.look_soon(self)

    def remove(self, ticket: str) -> None:
        with self._lock:
            self.tickets -= {ticket}
            self._shown.pop(ticket, None)

    def take(self) -> list[News]:
        """What is new since the last time, the latest of each ticket."""
        with self._lock:
            news, self._news = list(self._news.values()), {}
        return news

    def close(self) -> None:
        self._watch.forget(self)

    def hear(self, look: Look) -> bool:
        """Take in a look; whether that brought news."""
        with self._lock:
            found = self._find(look)
            news: list[News] = [
                each for place in found.values() if (each := self._update(place, look))
            ]
            if not look.is_recovering:  # a ticket that is missing may still come back
                news += self._left(found, look)
            self._news |= {each.ticket: each for each in news}
            return bool(news)

    def _find(self, look: Look) -> dict[str, Place]:
        found = {id: look.places[id] for id in self.tickets if id in look.places}
        if self.flow:
            found |= {place.ticket: place for place in look.by_flow.get(self.flow, ())}
        return found

    def _update(self, place: Place, look: Look) -> Position | None:
        shown = self._shown.get(place.ticket)
        if shown is None:
            shown = Shown(place.ahead + 1, look.version, look.recoveries)
            self._shown[place.ticket] = shown
        elif look.is_recovering:  # others may not be back yet: hold what was shown
            return None
        return shown.update(place, look)

    def _left(self, found: dict[str, Place], look: Look) -> list[Left]:
        news = []
        here = {id for id, shown in self._shown.items() if shown.is_here}
        for id in (here | self._unseen & look.asked) - set(found):
            news.append(Left(id, look.upstream, id in look.granted, id in here))
            if id in here:
                self._shown[id].is_here = False
            if id not in self.tickets:
                self._shown.pop(id, None)
        self._unseen -= look.asked
        return news


class Watch:
    """The subscribers of one upstream, and the thread that looks for them.

    The thread starts with the first subscriber and ends when there is none.
    """

    def __init__(self, roster: Roster) -> None:
        self._upstream = roster.upstream
        self._roster = weakref.ref(roster)
        self._subscriptions: weakref.WeakSet[Subscription] = weakref.WeakSet()
        self._new: weakref.WeakSet[Subscription] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._looked_at = 0.0
        self._new_at = 0.0
        self._is_lull = False
        self._has_moved = False
        self._recoveries = 0
        self._was_recovering = False
        self._is_failing = False
        roster.on_move = self.stir

    def subscribe(self, alarm: Alarm, *, ticket: str = "", flow: str = "") -> Subscription:
        subscription = Subscription(self, alarm, flow)
        if ticket:
            subscription.add(ticket)
        else:
            self.look_soon(subscription)
        return subscription

    def look_soon(self, subscription: Subscription) -> None:
        """Have a first look for somebody without waiting for the next round."""
        with self._changed:
            if not self._new:
                self._new_at = time.monotonic() + GATHER_S
            self._new.add(subscription)
            self._subscriptions.add(subscription)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="llm-throttle-positions", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def forget(self, subscription: Subscription) -> None:
        with self._changed:
            self._subscriptions.discard(subscription)
            self._new.discard(subscription)

    def stir(self) -> None:
        """Something moves: the next look need not wait for the end of a lull."""
        self._has_moved = True
        if self._is_lull:
            with self._changed:
                self._is_lull = False
                self._changed.notify()

    # -- The thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while self._work():
            pass

    def _work(self) -> bool:
        """One look; False when there is nobody left. Between two, no subscriber is held."""
        subscriptions = self._wait_for_work()
        if subscriptions is None:
            return False
        try:
            self._look_for(subscriptions)
        except BackendDown:
            self._is_lull = True
        except Exception:
            logger.exception("Looking for positions at %s failed; going on", self._upstream)
        return True

    def _wait_for_work(self) -> list[Subscription] | None:
        """Wait until it is time to look; for whom, None when there is nobody left."""
        with self._changed:
            while True:
                if not self._subscriptions or self._roster() is None:
                    self._thread = None
                    return None
                now = time.monotonic()
                if now >= self._next_round():
                    self._looked_at = now
                    return self._due(now)
                if self._new and now >= self._new_at:
                    return self._newcomers()
                first = min(self._next_round(), self._new_at) if self._new else self._next_round()
                self._changed.wait(first - now)

    def _due(self, now: float) -> list[Subscription]:
        """Newcomers, and all whose last look is not from just now."""
        newcomers = self._newcomers()
        past = now - float(settings.PUSH_INTERVAL) * SAME_ROUND
        others = (each for each in self._subscriptions if each.looked_at <= past)
        return list({*newcomers, *others})

    def _newcomers(self) -> list[Subscription]:
        new, self._new = list(self._new), weakref.WeakSet()
        return new

    def _next_round(self) -> float:
        interval = float(settings.PUSH_INTERVAL)
        return self._looked_at + (max(interval, LULL_S) if self._is_lull else interval)

    def _look_for(self, subscriptions: list[Subscription]) -> None:
        self._is_lull = self._has_moved = False  # what moves from here on is for the next look
        look = self._look(subscriptions)
        rung = [each.alarm for each in subscriptions if each.hear(look)]
        self._is_lull = not rung and len(subscriptions) == len(self._subscriptions)
        if self._has_moved:
            self._is_lull = False
        ring_all(rung)

    def _look(self, subscriptions: list[Subscription]) -> Look:
        """Ask the store, a slice at a time."""
        look = Look(self._upstream)
        tickets = {ticket for each in subscriptions for ticket in each.tickets}
        flows = {each.flow for each in subscriptions if each.flow}
        look.asked = tickets
        now = time.monotonic()
        for each in subscriptions:
            each.looked_at = now
        wanted = [*((ticket, True) for ticket in tickets), *((flow, False) for flow in flows)]
        for part in _batched(wanted, SLICE):
            command = Positions(
                tuple(id for id, is_ticket in part if is_ticket),
                tuple(id for id, is_ticket in part if not is_ticket),
            )
            look.add(self._ask(command))
        if self._was_recovering and not look.is_recovering:
            self._recoveries += 1
        self._was_recovering = look.is_recovering
        look.recoveries = self._recoveries
        return look

    def _ask(self, command: Positions) -> Places:
        roster = self._roster()
        if roster is None:
            raise BackendDown("This process is no longer a worker.")
        try:
            answer = roster.ask(command).result(ANSWER_WITHIN_S)
        except TimeoutError as error:
            raise BackendDown("The store did not answer.") from error
        assert isinstance(answer, Places)  # noqa: S101 - it has no other answer
        return answer


def _batched(items: list[tuple[str, bool]], size: int) -> Iterator[list[tuple[str, bool]]]:
    iterator = iter(items)
    while part := list(itertools.islice(iterator, size)):
        yield part


_watches: weakref.WeakKeyDictionary[Roster, Watch] = weakref.WeakKeyDictionary()
_watches_lock = threading.Lock()


def watch(roster: Roster) -> Watch:
    """The watch over a roster's upstream."""
    with _watches_lock:
        found = _watches.get(roster)
        if found is None:
            found = _watches[roster] = Watch(roster)
        return found
