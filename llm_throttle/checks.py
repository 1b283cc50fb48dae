"""System checks: what is wrong with the settings and the rows, and how to mend it.

``docs/checks.md`` has the same list for readers. No check connects to the store, and only those
that Django runs with ``--database`` (and before ``migrate``) read the database. Those are warnings
throughout: an error would keep ``migrate`` from making the very tables that are missing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from django.apps import apps
from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.db import DatabaseError, connections, router
from django.urls import URLResolver, get_resolver
from django.utils.module_loading import import_string

from .conf import DEFAULTS, SETTING
from .identity import resolver_for
from .models import Upstream

TAG = "llm_throttle"

REDIS = {"django_redis.cache.RedisCache", "django.core.cache.backends.redis.RedisCache"}
LOCMEM = {"django.core.cache.backends.locmem.LocMemCache"}
"""The cache backends that can hold the waiting room; a class derived from one of them will do."""

BEATS_PER_TTL = 4
"""A worker is suspect after 2 silent beats; it must have time to come back before it is dead."""

SAFE_RECOVERY_WINDOW = 1.5
"""Seconds: shorter than this and a worker that is only late could be left out of the count."""

LONGEST = 3600.0
"""Seconds. A setting above an hour is more likely meant as milliseconds."""


# What a value must be


Rule = tuple[Callable[[Any], bool], str]


def _whole(low: int, high: int) -> Rule:
    def fits(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    return fits, f"a whole number from {low} to {high}"


def _seconds(low: float) -> Rule:
    def fits(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and low <= value <= LONGEST

    return fits, f"a number of seconds from {low:g} to {LONGEST:g}"


def _one_of(*names: str) -> Rule:
    return (lambda value: value in names), "one of " + ", ".join(repr(name) for name in names)


def _or_none(rule: Rule) -> Rule:
    fits, words = rule
    return (lambda value: value is None or fits(value)), f"None or {words}"


TEXT: Rule = (lambda value: isinstance(value, str) and value != ""), "a string that is not empty"
YES_OR_NO: Rule = (lambda value: isinstance(value, bool)), "True or False"

RULES: dict[str, Rule] = {
    "CACHE": TEXT,
    "TIER_RESOLVER": TEXT,
    "FLOW_RESOLVER": TEXT,
    "TRUSTED_PROXIES": _whole(0, 32),
    "ON_BACKEND_DOWN": _one_of("local", "reject", "open"),
    "WORKER_TTL": _seconds(0.1),
    "BEAT": _seconds(0.01),
    "RECOVERY_WINDOW": _seconds(0),
    "POLICY_MAX_AGE": _seconds(0.1),
    "CONNECT_TIMEOUT": _seconds(0.01),
    "SOCKET_TIMEOUT": _seconds(0.01),
    "BREAKER_INTERVAL": _seconds(0.01),
    "START_GRACE": _seconds(0.01),
    "IDLE_STREAM": _seconds(0.01),
    "SYNC_WAITERS": _or_none(_whole(0, 100_000)),
    "KEEP_ALIVE": _seconds(0.01),
    "PUSH_INTERVAL": _seconds(0.01),
    "RETRY_AFTER_MAX": _whole(1, 3600),
    "RETRY_AFTER_DEFAULT": _whole(1, 3600),
    "RETRY_AFTER_PAUSED": _whole(1, 3600),
    "SHOW_USERS": YES_OR_NO,
    "METRICS_TOKEN": _or_none(TEXT),
}


def _fits(name: str, value: Any) -> bool:
    return RULES[name][0](value)


def _error(number: int, message: str, hint: str) -> Error:
    return Error(message, hint=hint, id=f"llm_throttle.E{number:03}")


def _warning(number: int, message: str, hint: str) -> Warning:
    return Warning(message, hint=hint, id=f"llm_throttle.W{number:03}")


def _given() -> Any:
    return getattr(django_settings, SETTING, None) or {}


def _is_readable() -> bool:
    return isinstance(_given(), Mapping)


def _value(name: str) -> Any:
    """A setting's value, None where E001 or E003 has said already that it cannot be used."""
    if not _is_readable():
        return None
    value = _given().get(name, DEFAULTS[name])
    return value if _fits(name, value) else None


# The settings


@register(TAG)
def check_settings(**kwargs: Any) -> list[CheckMessage]:
    """The setting is a dictionary with known keys and values within their ranges."""
    if not _is_readable():
        return [
            _error(1, f"{SETTING} is not a dictionary.", f'Write {SETTING} = {{"KEY": value}}.')
        ]
    unknown = [_unknown(str(name)) for name in _given() if name not in DEFAULTS]
    wrong = [
        _error(
            3,
            f'{SETTING}["{name}"] is {value!r}; it must be {RULES[name][1]}.',
            f"Leave it out to get the default, {DEFAULTS[name]!r}.",
        )
        for name, value in _given().items()
        if name in DEFAULTS and not _fits(name, value)
    ]
    return [*unknown, *wrong]


def _unknown(name: str) -> Error:
    near = difflib.get_close_matches(name.upper(), DEFAULTS, n=1, cutoff=0.5)
    hint = f'Did you mean "{near[0]}"?' if near else f"Known keys: {', '.join(DEFAULTS)}."
    return _error(2, f'{SETTING} has an unknown key "{name}".', hint)


@register(TAG)
def check_times(**kwargs: Any) -> list[CheckMessage]:
    """The times fit together."""
    return [*_check_recovery_window(), *_check_worker_ttl()]


def _check_recovery_window() -> Iterator[CheckMessage]:
    window = _value("RECOVERY_WINDOW")
    if window is None or window >= SAFE_RECOVERY_WINDOW:
        return
    if window == 0:
        yield _warning(
            4,
            f'{SETTING}["RECOVERY_WINDOW"] is 0: after a restart of the store the capacity '
            "may be exceeded.",
            f"0 is for unit tests. Use {SAFE_RECOVERY_WINDOW} or more everywhere else.",
        )
    else:
        yield _error(
            7,
            f'{SETTING}["RECOVERY_WINDOW"] is {window}, too short for every worker to report '
            "what it holds.",
            f"Use {SAFE_RECOVERY_WINDOW} seconds or more.",
        )


def _check_worker_ttl() -> Iterator[CheckMessage]:
    ttl, beat = _value("WORKER_TTL"), _value("BEAT")
    if ttl is None or beat is None or ttl >= BEATS_PER_TTL * beat:
        return
    yield _error(
        8,
        f'{SETTING}["WORKER_TTL"] is {ttl} with a BEAT of {beat}: a worker that is late for a '
        "moment would count as dead and lose its slots.",
        f"Make WORKER_TTL at least {BEATS_PER_TTL} beats ({BEATS_PER_TTL * beat:g} seconds).",
    )


@register(TAG)
def check_resolvers(**kwargs: Any) -> list[CheckMessage]:
    """Both resolvers can be imported and called."""
    return [error for name in ("TIER_RESOLVER", "FLOW_RESOLVER") for error in _check_resolver(name)]


def _check_resolver(name: str) -> Iterator[CheckMessage]:
    if _value(name) is None:
        return
    try:
        resolver_for(name)
    except ImproperlyConfigured as error:
        yield _error(6, str(error), "Name a callable that takes a Caller and returns a string.")


# The store's cache alias


@register(TAG)
def check_cache(**kwargs: Any) -> list[CheckMessage]:
    """The cache alias exists and its backend can hold the waiting room."""
    alias = _value("CACHE")
    if alias is None:
        return []
    if alias not in django_settings.CACHES:
        known = ", ".join(sorted(django_settings.CACHES))
        return [
            _error(
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
            yield _warning(
                1,
                f'The cache "{alias}" is kept in the memory of one process: with N server '
                "processes the upstream gets N times its capacity.",
                "Use django_redis.cache.RedisCache, or run one process only and silence this.",
            )
    elif not REDIS & backends:
        yield _error(
            5,
            f'The cache "{alias}" has the backend "{path}", which cannot hold the waiting room.',
            "Use django_redis.cache.RedisCache for any number of processes, or "
            "django.core.cache.backends.locmem.LocMemCache for a single one.",
        )


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
    alias = _value("CACHE")
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
        _warning(
            2,
            f'The cache "{alias}" holds the waiting room and seems to {what}: cache.clear() '
            "would wipe the waiting room too.",
            "Give the waiting room an alias and a database number of its own (redis://host/1). It "
            "survives a wipe, but lets nobody in for a few seconds.",
        )
    ]


# The databases


@register(TAG)
def check_atomic_requests(**kwargs: Any) -> list[CheckMessage]:
    """No request waits, or streams, inside a transaction."""
    return [
        _warning(
            3,
            f'The database "{alias}" has ATOMIC_REQUESTS: a request that waits for a slot '
            "keeps a transaction and its connection open.",
            "Decorate the throttled views with django.db.transaction.non_atomic_requests.",
        )
        for alias, database in django_settings.DATABASES.items()
        if database.get("ATOMIC_REQUESTS") and not _all_are_exempt(alias)
    ]


def _all_are_exempt(alias: str) -> bool:
    """Whether there are guarded views in the URLs and none of them runs in a transaction."""
    exempt = [
        alias in getattr(view, "_non_atomic_requests", ())
        for view in _views(get_resolver())
        if _upstreams_of(view)
    ]
    return bool(exempt) and all(exempt)


@register(Tags.database)
def check_rows(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """The tables are there and the rows in them can be honoured as they are."""
    ours = [alias for alias in databases or () if router.allow_migrate_model(alias, Upstream)]
    return [message for alias in ours for message in _check_database(alias)]


def _check_database(alias: str) -> list[CheckMessage]:
    tables = {model._meta.db_table for model in apps.get_app_config("llm_throttle").get_models()}
    missing = tables - set(connections[alias].introspection.table_names())
    try:
        return [_unmigrated(alias)] if missing else list(_check_upstreams(alias))
    except DatabaseError:  # a table is there, a column of it is not
        return [_unmigrated(alias)]


def _unmigrated(alias: str) -> Warning:
    return _warning(
        5,
        f'The database "{alias}" has no tables for llm_throttle, or not its newest ones.',
        "Run: manage.py migrate",
    )


def _check_upstreams(alias: str) -> Iterator[CheckMessage]:
    upstreams = list(Upstream.objects.using(alias).prefetch_related("limits__tier"))
    yield from _check_views({upstream.slug for upstream in upstreams})
    if not upstreams:
        yield _warning(
            6,
            "There is no upstream: a throttled view has nothing to wait for.",
            "Add one in the admin, under LLM throttle.",
        )
    for upstream in upstreams:
        yield from _check_policy(upstream)
        yield from _check_queue_depth(upstream)


def _check_policy(upstream: Upstream) -> Iterator[CheckMessage]:
    for message in dict.fromkeys(_wrong_with(upstream)):
        yield _warning(
            8,
            f"Upstream “{upstream}”: {message}",
            "Mend it in the admin. Until then the nearest safe numbers are used.",
        )


def _wrong_with(upstream: Upstream) -> Iterator[str]:
    yield from _messages(upstream.clean_fields)
    yield from _messages(upstream.clean)
    for limit in upstream.limits.all():
        yield from _messages(limit.clean_fields)


def _messages(clean: Callable[[], None]) -> Iterable[str]:
    try:
        clean()
    except ValidationError as error:
        return error.messages
    return ()


def _check_queue_depth(upstream: Upstream) -> Iterator[CheckMessage]:
    """One tier's crowd must not be able to fill the queue for all."""
    waiting = [limit for limit in upstream.limits.all() if limit.wait_budget > 0]
    if upstream.queue_depth is None or len(waiting) < 2:
        return
    depths = [limit.queue_depth for limit in waiting]
    together = None if None in depths else sum(depth or 0 for depth in depths)
    if together is not None and together <= upstream.queue_depth:
        return
    words = "have no bound" if together is None else f"add up to {together}"
    yield _warning(
        7,
        f"Upstream “{upstream}” has a queue depth of {upstream.queue_depth}, but those of its "
        f"tiers {words}: a crowd of one tier can fill the queue for all.",
        "Raise the upstream's queue depth, or lower those of the tiers.",
    )


# The views


def _check_views(known: set[str]) -> Iterator[CheckMessage]:
    """Every upstream that a view in the URLs names exists."""
    if not known:
        return  # W006 says it
    named: dict[str, str] = {}
    for view in _views(get_resolver()):
        for upstream in _upstreams_of(view):
            named.setdefault(upstream, _name_of(view))
    for upstream, view in named.items():
        if upstream not in known:
            yield _warning(
                9,
                f'{view} names the upstream "{upstream}", which does not exist: everybody is '
                "refused there.",
                f"Add it in the admin, or name another: {', '.join(sorted(known))}.",
            )


def _views(resolver: URLResolver) -> Iterator[Any]:
    """The callables behind the URLs; none where the URLs cannot be read, which Django reports."""
    try:
        patterns = resolver.url_patterns
    except Exception:
        return
    for pattern in patterns:
        if isinstance(pattern, URLResolver):
            yield from _views(pattern)
        else:
            yield pattern.callback


def _upstreams_of(view: Any) -> set[str]:
    """What a view is guarded by: as a whole, or in one of its class's methods."""
    its_class = _class_of(view)
    methods = [getattr(its_class, name, None) for name in dir(its_class)] if its_class else []
    found = {getattr(part, "throttled_upstream", None) for part in (view, *methods)}
    return {upstream for upstream in found if isinstance(upstream, str)}


def _class_of(view: Any) -> Any:
    return getattr(view, "view_class", None) or getattr(view, "cls", None)


def _name_of(view: Any) -> str:
    named = _class_of(view) or view
    return f"{named.__module__}.{named.__qualname__}"
