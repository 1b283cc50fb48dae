"""The views behind the URLs: what they are guarded by, and what they would keep open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, register
from django.urls import URLResolver, get_resolver

from .findings import TAG, warning


@register(TAG)
def check_atomic_requests(**kwargs: Any) -> list[CheckMessage]:
    """No request waits, or streams, inside a transaction."""
    return [
        warning(
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


def check_named_upstreams(known: set[str]) -> Iterator[CheckMessage]:
    """Every upstream that a view in the URLs names exists."""
    if not known:
        return  # W006 says it
    named: dict[str, str] = {}
    for view in _views(get_resolver()):
        for upstream in _upstreams_of(view):
            named.setdefault(upstream, _name_of(view))
    for upstream, view in named.items():
        if upstream not in known:
            yield warning(
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
