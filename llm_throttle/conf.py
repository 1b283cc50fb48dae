"""The settings, one line each: ``LLM_THROTTLE`` in the project's settings, every key optional."""

from __future__ import annotations

from functools import cache
from typing import Any

from django.conf import settings as django_settings
from django.core.signals import setting_changed

SETTING = "LLM_THROTTLE"

DEFAULTS: dict[str, Any] = {
    "CACHE": "default",  # alias in CACHES; django-redis → many workers, LocMemCache → one process
    "TIER_RESOLVER": "llm_throttle.identity.resolve_tier",
    "FLOW_RESOLVER": "llm_throttle.identity.resolve_flow",
    "TRUSTED_PROXIES": 0,  # proxies in front of us that add to X-Forwarded-For; 0 = none
    "ON_BACKEND_DOWN": "local",  # "local" | "reject" | "open"; for now each refuses: backend_down
    "WORKER_TTL": 10.0,  # seconds of silence after which a worker counts as dead
    "BEAT": 1.0,  # seconds between two beats of a worker
    "RECOVERY_WINDOW": 1.5,  # seconds that a recovery lasts at the least
    "POLICY_MAX_AGE": 10.0,  # seconds until an edit that bypassed save() is noticed
    "CONNECT_TIMEOUT": 0.5,  # seconds
    "SOCKET_TIMEOUT": 1.0,  # seconds
    "BREAKER_INTERVAL": 1.0,  # seconds between two tries while the store is down
    "START_GRACE": 5.0,  # seconds until a body that nobody started gives its slot back
    "IDLE_STREAM": 60.0,  # seconds until a stream that nobody reads is ended
    "SYNC_WAITERS": None,  # waiters of one sync process; None = half of its threads, if known
    "KEEP_ALIVE": 15.0,  # seconds between two keep-alives in a silent stream
    "PUSH_INTERVAL": 0.5,  # seconds between two position messages to one client
    "RETRY_AFTER_MAX": 60,  # seconds, the ceiling of every Retry-After
    "RETRY_AFTER_DEFAULT": 5,  # seconds, where nothing has been measured yet
    "RETRY_AFTER_PAUSED": 30,  # seconds
    "SHOW_USERS": False,  # whether operators' pages and metrics name users
    "METRICS_TOKEN": None,
}


class Settings:
    """The settings as attributes, read when used."""

    def __getattr__(self, name: str) -> Any:
        try:
            return values()[name]
        except KeyError:
            raise AttributeError(f"{SETTING} has no key {name!r}") from None


@cache
def values() -> dict[str, Any]:
    return DEFAULTS | given()


def given() -> dict[str, Any]:
    """What the project's settings say, unchecked (the system checks judge it)."""
    return dict(getattr(django_settings, SETTING, None) or {})


def _forget(*, setting: str, **kwargs: object) -> None:
    if setting == SETTING:
        values.cache_clear()


setting_changed.connect(_forget)
settings = Settings()
