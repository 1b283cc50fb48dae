"""From an alias in Django's ``CACHES`` to connections with time limits of our own.

django-redis keeps one pool per URL, with the options of whoever came first, and redis-py 8 sets
its own timeouts and retries. So the alias says where the store is and how to log in, and never
how long to wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from llm_throttle.conf import settings

DJANGO_REDIS = "django_redis.cache.RedisCache"
DJANGO_OWN = "django.core.cache.backends.redis.RedisCache"
LOCMEM = "django.core.cache.backends.locmem.LocMemCache"


@dataclass(frozen=True)
class Alias:
    """One entry of ``CACHES``."""

    name: str
    config: dict[str, Any]

    @property
    def is_django_redis(self) -> bool:
        return self._is_a(DJANGO_REDIS)

    @property
    def is_redis(self) -> bool:
        return self._is_a(DJANGO_REDIS) or self._is_a(DJANGO_OWN)

    @property
    def is_locmem(self) -> bool:
        return self._is_a(LOCMEM)

    def _is_a(self, path: str) -> bool:
        """Whether the alias uses this cache class or one derived from it."""
        named = str(self.config.get("BACKEND", ""))
        return named == path or issubclass(import_string(named), import_string(path))

    @property
    def prefix(self) -> str:
        return str(self.config.get("KEY_PREFIX", ""))

    @property
    def url(self) -> str:
        """The first address: that of the primary, where the alias lists replicas behind it."""
        location = self.config.get("LOCATION", "")
        if isinstance(location, str):
            location = location.split(",") if self.is_django_redis else [location]
        return str(location[0]).strip()

    def pool(self, *, socket_timeout: float | None) -> Any:
        """A new pool of connections with this time limit for an answer, None = wait for ever."""
        from redis import ConnectionPool
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        limits = {
            "socket_connect_timeout": settings.CONNECT_TIMEOUT,
            "socket_timeout": socket_timeout,
            "retry": Retry(NoBackoff(), 0),
        }
        if self.is_django_redis:
            return self._django_redis_pool(limits)
        options = dict(self.config.get("OPTIONS", {}))
        options.pop("pool_class", None)
        options.pop("parser_class", None)
        return ConnectionPool.from_url(self.url, **options | limits)

    def _django_redis_pool(self, limits: dict[str, Any]) -> Any:
        """By the alias's own connection factory, which knows Sentinel, TLS and passwords."""
        from django_redis.pool import get_connection_factory

        options = dict(self.config.get("OPTIONS", {}))
        own = dict(options.get("CONNECTION_POOL_KWARGS", {})) | limits
        own.pop("decode_responses", None)
        factory = get_connection_factory(options=options | {"CONNECTION_POOL_KWARGS": own})
        params = factory.make_connection_params(self.url)
        return factory.get_connection_pool(params | limits)


def get_alias() -> Alias:
    """The alias that ``LLM_THROTTLE["CACHE"]`` names.

    Raises ``ImproperlyConfigured`` where there is none, or where it can hold no waiting room.
    """
    name = settings.CACHE
    if name not in django_settings.CACHES:
        raise ImproperlyConfigured(
            f'LLM_THROTTLE["CACHE"] names the alias {name!r}, which is not in CACHES.'
        )
    alias = Alias(name, dict(django_settings.CACHES[name]))
    if not (alias.is_redis or alias.is_locmem):
        raise ImproperlyConfigured(
            f"The cache alias {name!r} uses {alias.config.get('BACKEND')}. The waiting room needs "
            f"{DJANGO_REDIS} (several workers) or {LOCMEM} (one process)."
        )
    return alias
