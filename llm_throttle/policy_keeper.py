"""Keeps the store's policy equal to the rows: after edits, and where an edit went unnoticed.

An edit publishes what it commits. Whatever went another way (bulk updates, a store that was down
or forgot, a restored database) is found by comparing stamps, in a thread of its own, because a
database that hangs must not stop the beat (PROTOCOL §7).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from django.db import connections

from . import policies
from .conf import settings
from .exceptions import BackendDown, UnknownUpstream
from .scheduling.commands import Command, SetPolicy
from .scheduling.decisions import Answer, PolicyStamp
from .scheduling.policy import Policy

logger = logging.getLogger(__name__)

Call = Callable[[str, Command], Answer]


class PolicyKeeper:
    """Compares and publishes policies.

    ``call`` carries a command to an upstream's store; ``forget`` is told of an upstream that has
    no row.
    """

    def __init__(self, call: Call, forget: Callable[[str], None]) -> None:
        self._call = call
        self._forget = forget
        self._checked_at: dict[str, float] = {}
        self._todo: queue.SimpleQueue[tuple[str, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def look_at(self, upstream: str, version: int, digest: str) -> None:
        """Check an upstream's policy where the last check is too long ago, or it has none."""
        now = time.monotonic()
        age = now - self._checked_at.setdefault(upstream, now)
        if age >= settings.POLICY_MAX_AGE or (version == 0 and age >= settings.BEAT):
            self._checked_at[upstream] = now
            self._start()
            self._todo.put((upstream, version))

    def publish(self, upstream: str) -> PolicyStamp:
        """Bring the rows of an upstream into force, with a higher version where need be.

        Raises ``UnknownUpstream``, ``BackendDown`` and what the database raises.
        """
        policy = policies.load(upstream)
        stamp = self._set(upstream, policy)
        if not stamp.is_current and (stamp.version, stamp.digest) != (
            policy.version,
            policy.digest,
        ):
            logger.warning(
                "The store has version %s of the policy of %s, the database %s: published anew",
                stamp.version,
                upstream,
                policy.version,
            )
            policies.bump(upstream, above=stamp.version)
            stamp = self._set(upstream, policies.load(upstream))
        return stamp

    def retire(self, upstream: str, version: int) -> None:
        """Let nobody into the waiting room of a deleted upstream."""
        self._set(upstream, policies.retired(version))

    def stop(self) -> None:
        self._todo.put(None)
        if self._thread is not None:
            self._thread.join()

    def _set(self, upstream: str, policy: Policy) -> PolicyStamp:
        stamp = self._call(upstream, SetPolicy(policy))
        assert isinstance(stamp, PolicyStamp)  # noqa: S101 - it has no other answer
        return stamp

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name="llm-throttle-policies", daemon=True
            )
            self._thread.start()

    def _work(self) -> None:
        while (item := self._todo.get()) is not None:
            upstream, version = item
            try:
                self._check(upstream, version)
            except BackendDown as error:
                logger.warning("The policy of %s was not checked: %s", upstream, error)
            except Exception:
                logger.exception("The policy of %s was not checked", upstream)
            finally:
                connections.close_all()

    def _check(self, upstream: str, version: int) -> None:
        try:
            self.publish(upstream)
        except UnknownUpstream:
            self.retire(upstream, version + 1)  # which also clears away what a beat has written
            self._forget(upstream)
