"""The threads of a sync server are a hidden queue: bound how many of them may wait.

A waiting request under WSGI occupies its thread. Were all of them to wait, the process could
serve nothing else, not even a health check, and the waiting room's own bounds would never be
reached (the rest of the crowd would stand in the server's backlog, unseen).
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .conf import settings

_count = 0
_lock = threading.Lock()


@contextmanager
def a_thread_may_wait() -> Iterator[bool]:
    """Count a waiting thread; False where as many wait already as may."""
    global _count
    most = bound()
    with _lock:
        may_wait = most is None or _count < most
        _count += may_wait
    try:
        yield may_wait
    finally:
        with _lock:
            _count -= may_wait


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
