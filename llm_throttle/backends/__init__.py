"""Where the shared state lives: one process, or a store that many share."""

from __future__ import annotations

from llm_throttle.conf import settings
from llm_throttle.scheduling.recovery import Timing

from .base import Backend, Stamp
from .connections import get_alias
from .locmem import LocMemBackend

__all__ = ["Backend", "Stamp", "make_backend"]


def make_backend() -> Backend:
    """A new backend as ``LLM_THROTTLE["CACHE"]`` says; nothing connects before its first use."""
    alias = get_alias()
    if alias.is_locmem:
        return LocMemBackend(timing())
    from .redis import RedisBackend  # the client library is not loaded where it is not used

    return RedisBackend(timing(), alias)


def timing() -> Timing:
    beat, connect, answer = settings.BEAT, settings.CONNECT_TIMEOUT, settings.SOCKET_TIMEOUT
    return Timing(
        beat_ms=round(beat * 1000),
        worker_ttl_ms=round(settings.WORKER_TTL * 1000),
        recovery_ms=round(settings.RECOVERY_WINDOW * 1000),
        blind_ms=round((beat + connect + answer + settings.BREAKER_INTERVAL) * 1000),
    )
