"""Rows become one frozen policy; an edit of them is announced once, after its commit.

Every edit bumps the version of the upstreams it touches in its own transaction. The row lock that
this takes makes the order of commits the order of versions, so that whoever follows the highest
version follows the last edit. Who publishes the policy listens to ``signals.policy_edited``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from asgiref.sync import sync_to_async
from django.db import models, router, transaction
from django.db.models import F, QuerySet
from django.db.models.functions import Greatest
from django.db.models.signals import m2m_changed, post_save, pre_delete, pre_save

from .exceptions import UnknownUpstream
from .models import (
    IMPLICIT_TIER,
    MAX_COUNT,
    MAX_DEPTH_PER_USER,
    MAX_DRAIN_MS,
    MAX_SECONDS,
    MAX_WEIGHT,
    Tier,
    TierAssignment,
    TierLimit,
    Upstream,
)
from .scheduling.policy import DEFAULT_DEPTH_PER_USER, UNLIMITED, Policy, TierPolicy
from .signals import policy_edited

READS = 3
"""Tries to read rows that belong together: edits that come between the queries are rare."""


# Reading


def load(slug: str) -> Policy:
    """The policy that the rows of one upstream spell out now.

    Raises ``UnknownUpstream`` where there is no such row. Never raises for what a row says.
    """
    for _ in range(READS):
        upstream = _upstream(slug)
        tiers = list(Tier.objects.all())
        limits = list(TierLimit.objects.filter(upstream=upstream))
        if _version(slug) == upstream.version:
            break
    return build(upstream, tiers, limits)


async def aload(slug: str) -> Policy:
    """``load`` for async callers."""
    return await sync_to_async(load)(slug)


def retired(version: int) -> Policy:
    """The policy of an upstream that was deleted: nobody is let in, nobody may wait."""
    return Policy(version=version, capacity=0)


def _upstream(slug: str) -> Upstream:
    try:
        return Upstream.objects.get(slug=slug)
    except Upstream.DoesNotExist:
        raise UnknownUpstream(f"No upstream has the slug {slug!r}.") from None


def _version(slug: str) -> int | None:
    return Upstream.objects.filter(slug=slug).values_list("version", flat=True).first()


# Building


def build(upstream: Upstream, tiers: Iterable[Tier], limits: Iterable[TierLimit]) -> Policy:
    """One frozen policy from rows, made safe where they came in past the validation."""
    capacity = _clamped(upstream.capacity, 0, MAX_COUNT)
    limit_of = {limit.tier_id: limit for limit in limits}
    tiers = list(tiers)
    built = [_tier_policy(tier.slug, limit_of.get(tier.pk), capacity) for tier in tiers]
    built = _fitting(built, capacity)
    if needs_implicit_tier(tiers):
        built.append(_implicit_tier(built, capacity))
    return Policy(
        version=upstream.version,
        capacity=capacity,
        tiers=tuple(built),
        queue_depth=_depth(upstream.queue_depth),
        max_hold_ms=_clamped(upstream.max_hold, 1, MAX_SECONDS) * 1000,
        drain_ms=_clamped(upstream.drain, 0, MAX_DRAIN_MS),
        grace_ms=_clamped(upstream.grace, 0, MAX_SECONDS) * 1000,
        is_paused=upstream.is_paused,
    )


def _tier_policy(slug: str, limit: TierLimit | None, capacity: int) -> TierPolicy:
    """A row's numbers within their ranges; no row counts as a row of empty cells."""
    if limit is None:
        return TierPolicy(slug, cap=capacity)
    limit.fill_empty_cells()
    cap = capacity if limit.cap is None else _clamped(limit.cap, 0, capacity)
    return TierPolicy(
        slug,
        cap=cap,
        reserved=_clamped(limit.reserved, 0, cap),
        weight=_clamped(limit.weight, 1, MAX_WEIGHT),
        wait_budget_ms=_clamped(limit.wait_budget, 0, MAX_SECONDS) * 1000,
        queue_depth=_depth(limit.queue_depth),
        depth_per_user=_clamped(limit.depth_per_user, 1, MAX_DEPTH_PER_USER),
    )


def _fitting(tiers: list[TierPolicy], capacity: int) -> list[TierPolicy]:
    """The tiers with reservations cut in proportion where they add up to more than there is."""
    total = sum(tier.reserved for tier in tiers)
    if total <= capacity:
        return tiers
    return [replace(tier, reserved=tier.reserved * capacity // total) for tier in tiers]


def needs_implicit_tier(tiers: Iterable[Tier]) -> bool:
    """Whether some caller may end up in no row's tier."""
    tiers = list(tiers)
    if any(tier.slug == IMPLICIT_TIER for tier in tiers):
        return False
    marked = any(tier.is_default for tier in tiers) and any(tier.is_anonymous for tier in tiers)
    return not marked


def _implicit_tier(named: list[TierPolicy], capacity: int) -> TierPolicy:
    """The tier of callers without one: never better than any named tier, and it never waits."""
    return TierPolicy(
        IMPLICIT_TIER,
        cap=min((tier.cap for tier in named), default=capacity),
        depth_per_user=min([DEFAULT_DEPTH_PER_USER, *(tier.depth_per_user for tier in named)]),
    )


def _clamped(number: int, low: int, high: int) -> int:
    return max(low, min(number, high))


def _depth(number: int | None) -> int:
    return UNLIMITED if number is None else _clamped(number, 0, UNLIMITED)


# Editing


class _Edited(threading.local):
    """The upstreams edited on this thread's connections and not announced yet.

    Each edit asks for an announcement at commit, since it cannot know whether the savepoint of
    an earlier one was rolled back. The first that runs takes the upstream out of here and the
    others find nothing to do. What a rollback leaves behind here has nobody to announce it.
    """

    def __init__(self) -> None:
        self.versions: dict[tuple[str, str], int] = {}


_edited = _Edited()


def bump(slug: str, above: int = 0) -> int:
    """Give an upstream a version of its own again, and announce it: the new version.

    ``above`` is a version that must be passed too: the store's, where the database is older than
    the store (a restored backup). Raises ``UnknownUpstream``.
    """
    rows = Upstream.objects.filter(slug=slug)
    versions = _bump(rows, router.db_for_write(Upstream), above)
    if slug not in versions:
        raise UnknownUpstream(f"No upstream has the slug {slug!r}.")
    return versions[slug]


def _bump(rows: QuerySet[Upstream], using: str, above: int = 0) -> dict[str, int]:
    with transaction.atomic(using=using):
        rows = rows.using(using).order_by("pk")
        # Locked in one order, so that two edits of several upstreams cannot block each other.
        pks = [pk for (pk,) in rows.select_for_update().values_list("pk")]
        locked = Upstream.objects.using(using).filter(pk__in=pks)
        locked.update(version=Greatest(F("version"), above) + 1)
        versions = dict(locked.values_list("slug", "version"))
        for slug, version in versions.items():
            _announce_on_commit(slug, version, using)
    return versions


def _announce_on_commit(slug: str, version: int, using: str) -> None:
    def announce() -> None:  # not a partial: Django logs a failure under the function's name
        _announce(slug, using)

    _edited.versions[using, slug] = version
    transaction.on_commit(announce, using=using, robust=True)


def _announce(slug: str, using: str) -> None:
    last = _edited.versions.pop((using, slug), None)
    if last is None:
        return
    rows = Upstream.objects.using(using).filter(slug=slug)
    version = rows.values_list("version", flat=True).first()
    policy_edited.send_robust(
        sender=Upstream,
        upstream=slug,
        deleted=version is None,
        version=last + 1 if version is None else version,
    )


# The edits that count


def connect() -> None:
    """Listen to every edit that a policy, or the tier that a caller is given, depends on.

    Wherever the upstream is there already it is bumped, and so locked, before the other row is
    written: everybody takes the locks in the same order, as the admin does.
    """
    uid = "llm_throttle.policies"
    for signal in (post_save, pre_delete):
        signal.connect(_upstream_edited, sender=Upstream, dispatch_uid=uid)
    for signal in (pre_save, pre_delete):
        signal.connect(_limit_edited, sender=TierLimit, dispatch_uid=uid)
        signal.connect(_all_edited, sender=Tier, dispatch_uid=uid)
        signal.connect(_all_edited, sender=TierAssignment, dispatch_uid=uid)
    m2m_changed.connect(_groups_edited, sender=Tier.groups.through, dispatch_uid=uid)


def _upstream_edited(instance: Upstream, using: str, **kwargs: Any) -> None:
    versions = _bump(Upstream.objects.filter(pk=instance.pk), using)
    instance.version = versions.get(instance.slug, instance.version)
    if instance.loaded_slug not in (None, instance.slug):
        # Renamed past the validation: whoever waits under the old slug must get an answer.
        _announce_on_commit(str(instance.loaded_slug), instance.version, using)


def _limit_edited(instance: TierLimit, using: str, **kwargs: Any) -> None:
    _bump(Upstream.objects.filter(pk=instance.upstream_id), using)


def _all_edited(instance: models.Model, using: str, **kwargs: Any) -> None:
    _bump(Upstream.objects.all(), using)


def _groups_edited(action: str, using: str, **kwargs: Mapping[str, Any]) -> None:
    if action.startswith("pre_"):
        _bump(Upstream.objects.all(), using)
