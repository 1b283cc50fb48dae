"""The threads of a sync server are a hidden queue: bound how many of them may wait.

A waiting request under WSGI occupies its thread. Were all of them to wait, the process could
serve nothing else, not even a health check, and the waiting room's own bounds would never be
reached (the rest of the crowd would stand in the server's backlog, unseen). Where the bound is
reached the lightest tier makes room: a crowd of free users must not take all threads.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from . import policies
from .conf import settings
from .exceptions import UnknownUpstream
from .identity import Identity
from .signals import policy_edited

TRIES = 3
"""Times to send somebody away: each may have been served at that moment."""


class Sitting(Protocol):
    """A request that waits in a thread."""

    upstream: str
    identity: Identity

    def send_away(self) -> bool:
        """Refuse it; False where it has been answered already."""


_sitting: list[Sitting] = []  # in the order in which they came
_lock = threading.Lock()
_weights: dict[str, tuple[float, dict[str, int]]] = {}


@contextmanager
def a_thread_may_wait(request: Sitting) -> Iterator[bool]:
    """Count a waiting thread; False where as many wait already as may, all of them as heavy."""
    may_wait = _sit_down(request)
    try:
        yield may_wait
    finally:
        with _lock:
            if request in _sitting:
                _sitting.remove(request)


def _sit_down(request: Sitting) -> bool:
    most = bound()
    for _ in range(TRIES):
        with _lock:
            if most is None or len(_sitting) < most:
                _sitting.append(request)
                return True
            others = [other for other in _sitting if _share(other) != _share(request)]
        if not others:
            return False
        lightest = min(reversed(others), key=_weight)  # of several, the last to come
        if _weight(lightest) >= _weight(request):
            return False
        lightest.send_away()
        with _lock:
            if lightest in _sitting:
                _sitting.remove(lightest)
    return False


def _share(request: Sitting) -> tuple[str, str]:
    return request.upstream, request.identity.tier


def _weight(request: Sitting) -> int:
    """The weight of a request's tier, as the rows say it."""
    read_at, weights = _weights.get(request.upstream, (0.0, {}))
    now = time.monotonic()
    if not weights or now - read_at > settings.POLICY_MAX_AGE:
        try:
            policy = policies.load(request.upstream)
        except UnknownUpstream:  # deleted; who waits for it is about to be refused
            return 0
        weights = {tier.slug: tier.weight for tier in policy.tiers}
        _weights[request.upstream] = now, weights
    return weights.get(request.identity.tier, 0)


def _forget_weights(**kwargs: object) -> None:
    _weights.clear()


policy_edited.connect(_forget_weights, dispatch_uid="llm_throttle.sync_waiters")


def bound() -> int | None:
    """How many threads of this process may wait: the setting, or half of those that are known."""
    given = settings.SYNC_WAITERS
    if given is not None:
        return int(given)
    threads = known_threads()
    return None if threads is None else max(1, threads // 2)


def known_threads() -> int | None:
    """The threads of a gunicorn worker as its command line says; None where nothing does."""
    if "gunicorn" not in sys.modules:
        return None
    words = " ".join([*sys.argv, os.environ.get("GUNICORN_CMD_ARGS", "")])
    found = re.search(r"--threads[ =](\d+)", words)
    return int(found.group(1)) if found else None
