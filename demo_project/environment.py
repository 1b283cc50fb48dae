"""What the demo reads from the environment, turned into settings or into a sentence that helps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

REDIS = "redis://127.0.0.1:6379/0"
REDIS_SCHEMES = {"redis", "rediss", "unix"}
IN_PROCESS = "locmem"  # REDIS_URL=locmem:// keeps the store in the one server process
UPSTREAM = "http://127.0.0.1:8001"
POSTGRES_SCHEMES = {"postgres", "postgresql"}
SQLITE_OPTIONS = {
    # Several workers write sessions: readers must not block them, and a writer waits its turn.
    "timeout": 20,
    "transaction_mode": "IMMEDIATE",
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
}


def database(url: str, base: Path) -> dict[str, Any]:
    """``DATABASE_URL`` as an entry of DATABASES; a relative SQLite path starts at *base*."""
    if not url:
        url = "sqlite:///db.sqlite3"
    parts = urlsplit(url)
    name = unquote(parts.path[1:])
    if parts.scheme == "sqlite" and name and not parts.netloc:
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": base / name,
            "OPTIONS": SQLITE_OPTIONS,
        }
    if parts.scheme in POSTGRES_SCHEMES and name:
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": name,
            "USER": unquote(parts.username or ""),
            "PASSWORD": unquote(parts.password or ""),
            "HOST": parts.hostname or "",
            "PORT": str(parts.port or ""),
        }
    raise ImproperlyConfigured(
        "DATABASE_URL must look like sqlite:///relative/path, sqlite:////absolute/path or "
        f"postgres://user:password@host:5432/name, not like {_without_password(url)}."
    )


def cache(url: str, key_prefix: str = "") -> dict[str, Any]:
    """``REDIS_URL`` as an entry of CACHES."""
    scheme = urlsplit(url or REDIS).scheme
    if scheme == IN_PROCESS:
        return {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}
    if scheme in REDIS_SCHEMES:
        return {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": url or REDIS,
            "KEY_PREFIX": key_prefix,
        }
    raise ImproperlyConfigured(
        "REDIS_URL must look like redis://127.0.0.1:6379/0, rediss://… or unix://…, "
        f"not like {_without_password(url)}."
    )


def channel_layer(url: str) -> dict[str, Any]:
    """``REDIS_URL`` as an entry of CHANNEL_LAYERS."""
    if urlsplit(url or REDIS).scheme == IN_PROCESS:
        return {"BACKEND": "channels.layers.InMemoryChannelLayer"}
    return {
        # The other layer of channels_redis closes idle sockets on redis-py 8.
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        "CONFIG": {"hosts": [url or REDIS]},
    }


def upstream(url: str) -> str:
    """``UPSTREAM_URL`` without what the SDKs add themselves."""
    address = (url or UPSTREAM).rstrip("/").removesuffix("/v1")
    parts = urlsplit(address)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ImproperlyConfigured(
            f"UPSTREAM_URL must look like https://api.anthropic.com, not like {url}."
        )
    return address


def number(
    environ: Mapping[str, str], name: str, default: int, *, low: int = 1, high: int = 65535
) -> int:
    """A whole number from the variable *name*, within *low* and *high*."""
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise ImproperlyConfigured(
            f"{name} must be a whole number from {low} to {high}, not {text!r}."
        )
    return int(text)


def _without_password(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"…@{tail}" if at and head else repr(url)
