"""Who is asking: the tier that decides the share, and the flow that fairness is computed between.

Both are found by a resolver, a callable that takes a ``Caller`` and returns a string. The defaults
are below; ``TIER_RESOLVER`` and ``FLOW_RESOLVER`` name others, sync or async.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import Error as DatabaseError
from django.db.models import Case, Exists, OuterRef, Q, QuerySet, Subquery, Value, When
from django.db.models.functions import Coalesce
from django.utils import timezone
from django.utils.module_loading import import_string

from .conf import DEFAULTS, SETTING, settings
from .exceptions import ThrottleError
from .models import EMPTY_CELLS, IMPLICIT_TIER, Tier, TierAssignment, TierLimit

logger = logging.getLogger(__name__)

PREFIX_V6 = 64
"""A household or a server is given a whole /64 and could otherwise be 2^64 flows."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is asking, fixed when a request enters."""

    flow: str
    tier: str


@dataclass(frozen=True, slots=True)
class Caller:
    """What a resolver may look at.

    ``request`` is Django's or REST framework's, ``scope`` is Channels' or plain ASGI's; outside of
    a request both are None. ``user`` is None or anonymous where nobody is signed in.
    """

    upstream: str
    user: Any = None
    request: Any = None
    scope: Mapping[str, Any] | None = None

    @property
    def is_signed_in(self) -> bool:
        return bool(getattr(self.user, "is_authenticated", False))

    @property
    def session_key(self) -> str | None:
        """The key of the caller's session, None where there is none (yet)."""
        session = getattr(self.request, "session", None) or (self.scope or {}).get("session")
        key = getattr(session, "session_key", None)
        return str(key) if key else None

    @property
    def address(self) -> str | None:
        """The client's address as far as it can be trusted, None where it cannot be known."""
        forwarded = _forwarded(self._header("x-forwarded-for"), settings.TRUSTED_PROXIES)
        return _network(forwarded) or _network(self._peer())

    def _peer(self) -> str:
        """The address at the other end of the connection: the client's, or the last proxy's."""
        if self.request is not None:
            return str(self.request.META.get("REMOTE_ADDR") or "")
        client = (self.scope or {}).get("client")
        return str(client[0]) if client else ""

    def _header(self, name: str) -> str:
        if self.request is not None:
            return str(self.request.META.get(f"HTTP_{name.upper().replace('-', '_')}") or "")
        pairs = (self.scope or {}).get("headers") or ()
        values = [value for key, value in pairs if key.lower() == name.encode()]
        return b",".join(values).decode("latin-1")


# Asking the resolvers


def identify(caller: Caller) -> Identity:
    """The caller's flow and tier, by the resolvers that the settings name.

    Raises ``ImproperlyConfigured`` where a resolver cannot be used, raises or gives no string.
    Refusals, ``PermissionDenied`` and errors of the database pass through.
    """
    flow = _ask("FLOW_RESOLVER", caller)
    return Identity(flow, _known(_ask("TIER_RESOLVER", caller), caller))


async def aidentify(caller: Caller) -> Identity:
    """``identify`` for async callers: sync resolvers run in a thread, async ones in this loop."""
    return await sync_to_async(identify)(caller)


def _ask(setting: str, caller: Caller) -> str:
    resolver = resolver_for(setting)
    try:
        answer = resolver(caller)
    except (PermissionDenied, ThrottleError, DatabaseError):
        raise
    except Exception as error:
        raise _unusable(setting, f"raised {error!r}") from error
    if not isinstance(answer, str) or not answer:
        raise _unusable(setting, f"returned {answer!r} instead of a string that is not empty")
    return answer


def resolver_for(setting: str) -> Callable[[Caller], object]:
    """The resolver that a setting names, as a sync callable.

    Raises ``ImproperlyConfigured`` where it cannot be imported or called.
    """
    try:
        resolver = import_string(str(getattr(settings, setting)))
    except ImportError as error:
        raise _unusable(setting, f"cannot be imported: {error}") from error
    if not callable(resolver):
        raise _unusable(setting, "is not callable")
    method = getattr(resolver, "__call__", None)  # noqa: B004 - an object may have an async one
    is_async = iscoroutinefunction(resolver) or iscoroutinefunction(method)
    return _as_sync(resolver) if is_async else resolver


def _as_sync(resolver: Callable[[Caller], Any]) -> Callable[[Caller], object]:
    ask = async_to_sync(resolver)

    def resolve(caller: Caller) -> object:
        # Django's users are lazy, and reading one from the database is not for the event loop.
        _ = caller.is_signed_in
        return ask(caller)

    return resolve


def _unusable(setting: str, what: str) -> ImproperlyConfigured:
    named = getattr(settings, setting)
    return ImproperlyConfigured(f'{SETTING}["{setting}"] = {named!r} {what}.')


def _known(slug: str, caller: Caller) -> str:
    """The slug, or the tier of callers without one where no tier has this slug."""
    reads_rows_itself = DEFAULTS["TIER_RESOLVER"] == settings.TIER_RESOLVER
    if reads_rows_itself or Tier.objects.filter(slug=slug).exists():
        return slug
    fallback = _marked("is_default" if caller.is_signed_in else "is_anonymous")
    if slug != IMPLICIT_TIER:
        _warn_unknown(slug, fallback)
    return fallback


@lru_cache(maxsize=64)
def _warn_unknown(slug: str, fallback: str) -> None:
    # Once per slug and not per request; bounded, because a resolver may invent endless slugs.
    logger.warning(
        "%s['TIER_RESOLVER'] gave the tier %r, which does not exist; %r is used instead.",
        SETTING,
        slug,
        fallback,
    )


# The default resolvers


def resolve_tier(caller: Caller) -> str:
    """The tier by assignment, then by group, then the one for signed-in users or for guests.

    Of several groups' tiers it is the one with the highest weight at the caller's upstream.
    """
    if not caller.is_signed_in:
        return _marked("is_anonymous")
    claim = Case(
        When(Exists(_assignments(caller.user)), then=3),
        When(Exists(_groups(caller.user)), then=2),
        When(is_default=True, then=1),
        default=0,
    )
    weight = Coalesce(Subquery(_weights(caller.upstream)), Value(EMPTY_CELLS["weight"]))
    claimed = Tier.objects.annotate(claim=claim, weight=weight).filter(claim__gt=0)
    best = claimed.order_by("-claim", "-weight", "slug").values_list("slug", flat=True)
    return best.first() or IMPLICIT_TIER


def _assignments(user: Any) -> QuerySet[TierAssignment]:
    unexpired = Q(expires_at=None) | Q(expires_at__gt=timezone.now())
    return TierAssignment.objects.filter(unexpired, user_id=user.pk, tier=OuterRef("pk"))


def _groups(user: Any) -> QuerySet[Any]:
    """The user's groups that place it in the outer query's tier."""
    through = Tier.groups.through.objects.filter(tier=OuterRef("pk"))
    if not hasattr(user, "groups"):  # a custom user model without permissions
        return through.none()
    return through.filter(group__in=user.groups.all())


def _weights(upstream: str) -> QuerySet[TierLimit, int]:
    limits = TierLimit.objects.filter(upstream__slug=upstream, tier=OuterRef("pk"))
    return limits.values_list("weight", flat=True)


def _marked(mark: str) -> str:
    tiers = Tier.objects.filter(**{mark: True})
    return tiers.values_list("slug", flat=True).first() or IMPLICIT_TIER


def resolve_flow(caller: Caller) -> str:
    """One flow per signed-in user, and one per client address for guests.

    Guests whose address cannot be known (a server behind a Unix socket) share one flow.
    """
    if caller.is_signed_in:
        return f"user:{caller.user.pk}"
    return f"ip:{caller.address or 'unknown'}"


# Reading addresses


def _forwarded(header: str, proxies: int) -> str:
    """The entry that the outermost trusted proxy wrote: the n-th from the right, "" if none.

    What stands further left came from the client and may be forged.
    """
    if proxies < 1:
        return ""
    entries = header.rsplit(",", proxies)[-proxies:]
    return entries[0].strip() if len(entries) == proxies else ""


def _network(text: str) -> str | None:
    """An address without its port and zone: IPv6 as its /64, None for what is no address."""
    try:
        address = ipaddress.ip_address(_bare(text))
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), PREFIX_V6), strict=False))


def _bare(text: str) -> str:
    """Without the port, brackets and zone that some proxies and servers write."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    return text.partition("%")[0]
