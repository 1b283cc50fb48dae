"""The cache alias that the waiting room is kept under."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, register
from django.utils.module_loading import import_string

from llm_throttle.conf import SETTING

from .findings import TAG, error, warning
from .settings import value_of

REDIS = {"django_redis.cache.RedisCache", "django.core.cache.backends.redis.RedisCache"}
LOCMEM = {"django.core.cache.backends.locmem.LocMemCache"}
"""The cache backends that can hold the waiting room; a class derived from one of them will do."""


@register(TAG)
def check_cache(**kwargs: Any) -> list[CheckMessage]:
    """The cache alias exists and its backend can hold the waiting room."""
    alias = value_of("CACHE")
    if alias is None:
        return []
    if alias not in django_settings.CACHES:
        known = ", ".join(sorted(django_settings.CACHES))
        return [
            error(
                4,
                f'{SETTING}["CACHE"] names the cache "{alias}", which CACHES does not have.',
                f"Add it to CACHES, or name one of these: {known}.",
            )
        ]
    return list(_check_backend(alias))


def _check_backend(alias: str) -> Iterator[CheckMessage]:
    path = str(django_settings.CACHES[alias].get("BACKEND", ""))
    backends = _backend_and_bases(path)
    if LOCMEM & backends:
        if not django_settings.DEBUG:
            yield _only_one_process(alias)
    elif not REDIS & backends:
        yield error(
            5,
            f'The cache "{alias}" has the backend "{path}", which cannot hold the waiting room.',
            "Use django_redis.cache.RedisCache for any number of processes, or "
            "django.core.cache.backends.locmem.LocMemCache for a single one.",
        )


def _only_one_process(alias: str) -> CheckMessage:
    return warning(
        1,
        f'The cache "{alias}" is kept in the memory of one process: with N server processes the '
        "upstream gets N times its capacity.",
        "Use django_redis.cache.RedisCache, or run one process only and silence this.",
    )


@register(TAG, deploy=True)
def check_cache_is_for_many(**kwargs: Any) -> list[CheckMessage]:
    """As above, where somebody asks about production with the settings for development."""
    cache = django_settings.CACHES.get(value_of("CACHE"), {})
    is_local = LOCMEM & _backend_and_bases(str(cache.get("BACKEND", "")))
    if not (is_local and django_settings.DEBUG):
        return []
    return [_only_one_process(value_of("CACHE"))]


def _backend_and_bases(path: str) -> set[str]:
    """The dotted paths of a cache backend's class and of those it is derived from."""
    try:
        backend = import_string(path)
    except ImportError:
        return set()
    return {f"{base.__module__}.{base.__qualname__}" for base in getattr(backend, "__mro__", ())}


@register(TAG, deploy=True)
def check_cache_is_not_shared(**kwargs: Any) -> list[CheckMessage]:
    """Nothing else is kept where ``cache.clear()`` would wipe the waiting room."""
    alias = value_of("CACHE")
    if alias not in django_settings.CACHES:
        return []
    here = django_settings.CACHES[alias]
    if not REDIS & _backend_and_bases(str(here.get("BACKEND", ""))):
        return []
    sharing = [
        other
        for other, cache in django_settings.CACHES.items()
        if other != alias and cache.get("LOCATION") == here.get("LOCATION")
    ]
    if alias != "default" and not sharing:
        return []
    what = (
        f"share its server with {', '.join(map(repr, sharing))}" if sharing else "be used for more"
    )
    return [
        warning(
            2,
            f'The cache "{alias}" holds the waiting room and seems to {what}: cache.clear() '
            "would wipe the waiting room too.",
            "Give the waiting room an alias and a database number of its own (redis://host/1). It "
            "survives a wipe, but lets nobody in for a few seconds.",
        )
    ]
