"""Many processes: the Lua twin of the Scheduler in one Redis or Valkey."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from llm_throttle.conf import settings
from llm_throttle.exceptions import BackendDown
from llm_throttle.scheduling.commands import Command
from llm_throttle.scheduling.decisions import Notice, Reply
from llm_throttle.scheduling.recovery import Timing

from . import script
from .base import Backend, Listener, Stamp
from .connections import Alias
from .courier import Courier, Errand
from .wire import Prepared, Wire

logger = logging.getLogger(__name__)

INBOX_WAIT_S = 2
"""How long one blocking read lasts, and so how long closing an inbox may take."""

MAX_NEWS = 100


class RedisBackend(Backend):
    """The waiting rooms in the store that a cache alias names."""

    def __init__(self, timing: Timing, alias: Alias) -> None:
        super().__init__(timing)
        self._prefix = alias.prefix
        self._workers: defaultdict[str, tuple[str, ...]] = defaultdict(tuple)
        pool = alias.pool(socket_timeout=settings.SOCKET_TIMEOUT)
        self._courier = Courier(
            Wire(lambda: pool), self._prepare, self._conclude, settings.BREAKER_INTERVAL
        )
        self._direct = Wire(lambda: pool)
        self._direct_lock = threading.Lock()
        self._patient = alias.pool(socket_timeout=INBOX_WAIT_S + settings.SOCKET_TIMEOUT)
        self._inboxes: dict[str, Inbox] = {}

    def submit(self, upstream: str, stamp: Stamp, command: Command) -> Future[Reply]:
        return self._courier.send(Errand(upstream, stamp, command))

    def call(self, upstream: str, stamp: Stamp, command: Command) -> Reply:
        errand = Errand(upstream, stamp, command)
        with self._direct_lock:
            self._direct.connect()
            [answer] = self._direct.run([self._prepare(errand, self._direct.server)])
            self._courier.reopen()
            reply = self._conclude(errand, _checked(answer), self._direct)
        return reply

    def listen(self, upstream: str, worker: str, listener: Listener) -> None:
        key = script.inbox_key(self._prefix, upstream, worker)
        self._inboxes[upstream] = Inbox(Wire(lambda: self._patient), key, worker, listener)
        self._inboxes[upstream].open()

    def unlisten(self, upstream: str) -> None:
        if inbox := self._inboxes.pop(upstream, None):
            inbox.close()

    def know_workers(self, upstream: str, workers: Iterable[str]) -> None:
        self._workers[upstream] = tuple(workers)

    def close(self) -> None:
        for inbox in self._inboxes.values():
            inbox.close()
        self._courier.close()
        self._direct.close()

    def _prepare(self, errand: Errand, server: str) -> Prepared:
        workers = self._workers[errand.upstream]
        keys = script.keys(self._prefix, errand.upstream, workers)
        call = errand.stamp.call(server=server)
        return keys, script.encode(call, errand.command, self.timing, workers)

    def _conclude(self, errand: Errand, answer: Any, wire: Wire) -> Reply:
        reply = script.decode(answer, errand.command)
        strangers = [notice for notice in reply.notices if notice.worker != errand.stamp.worker]
        if strangers:
            self._post(wire, errand.upstream, strangers)
        return reply

    def _post(self, wire: Wire, upstream: str, notices: list[Notice]) -> None:
        """Take news to workers that are so new that the script was not told of their inboxes."""
        posts: list[tuple[Any, ...]] = []
        for notice in notices:
            key = script.inbox_key(self._prefix, upstream, notice.worker)
            posts.append(("RPUSH", key, script.encode_notice(notice)))
            posts.append(("PEXPIRE", key, 2 * self.timing.worker_ttl_ms))
        wire.execute(posts)


class Inbox:
    """The news for one worker at one upstream, read by one thread on one blocking connection.

    It is the fast path: what is lost when it drops, the next beat brings. One connection per
    upstream, because in a cluster two upstreams live on two servers.
    """

    def __init__(self, wire: Wire, key: str, worker: str, listener: Listener) -> None:
        self._wire = wire
        self._key = key
        self._worker = worker
        self._listener = listener
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._read, name="llm-throttle-inbox", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()

    def _read(self) -> None:
        while not self._is_closed.is_set():
            try:
                for item in self._next_news():
                    self._listener(script.decode_notice(item, self._worker))
            except BackendDown:
                self._is_closed.wait(settings.BREAKER_INTERVAL)
            except Exception:
                logger.exception("Reading the inbox failed; going on")
                self._is_closed.wait(settings.BREAKER_INTERVAL)
        self._wire.close()

    def _next_news(self) -> list[Any]:
        [first] = self._wire.execute([("BLPOP", self._key, INBOX_WAIT_S)])
        if not first:
            return []
        [rest] = self._wire.execute([("LPOP", self._key, MAX_NEWS)])
        return [_checked(first)[1], *(_checked(rest) or ())]


def _checked(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise BackendDown(str(answer)) from answer
    return answer
