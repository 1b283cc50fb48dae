"""The tables and the rows in them, which only ``--database`` has read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from django.apps import apps
from django.core.checks import CheckMessage, Tags, Warning, register
from django.core.exceptions import ValidationError
from django.db import DatabaseError, connections, router

from llm_throttle.models import IMPLICIT_TIER, Tier, Upstream

from .findings import warning
from .views import check_named_upstreams


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
    return warning(
        5,
        f'The database "{alias}" has no tables for llm_throttle, or not its newest ones.',
        "Run: manage.py migrate",
    )


def _check_upstreams(alias: str) -> Iterator[CheckMessage]:
    upstreams = list(Upstream.objects.using(alias).prefetch_related("limits__tier"))
    yield from check_named_upstreams({upstream.slug for upstream in upstreams})
    if not upstreams:
        yield warning(
            6,
            "There is no upstream: a throttled view has nothing to wait for.",
            "Add one in the admin, under LLM throttle.",
        )
    else:
        yield from _check_who_is_placed(alias)
    for upstream in upstreams:
        yield from _check_policy(upstream)
        yield from _check_queue_depth(upstream)
        yield from _check_somebody_waits(upstream)


def _check_who_is_placed(alias: str) -> Iterator[CheckMessage]:
    """Callers whom nothing places are in a tier that somebody has thought about."""
    tiers = Tier.objects.using(alias)
    marks = {
        "signed-in users": tiers.filter(is_default=True),
        "guests": tiers.filter(is_anonymous=True),
    }
    nowhere = [who for who, marked in marks.items() if not marked.exists()]
    if nowhere:
        yield warning(
            10,
            f"No tier is the one for {' or '.join(nowhere)}: they get the built-in tier "
            f"“{IMPLICIT_TIER}”, which has weight 1 and never waits.",
            "Mark a tier in the admin, or silence this where everybody has a tier.",
        )


def _check_somebody_waits(upstream: Upstream) -> Iterator[CheckMessage]:
    """A waiting room in which nobody waits is most likely one whose cells were left as they are."""
    limits = list(upstream.limits.all())
    if any(limit.wait_budget > 0 for limit in limits):
        return
    yield warning(
        11,
        f"Upstream “{upstream}” lets nobody wait: who finds all slots taken is refused at once.",
        "Give its tiers a wait budget in the admin, or silence this if that is what you want.",
    )


def _check_policy(upstream: Upstream) -> Iterator[CheckMessage]:
    for message in dict.fromkeys(_wrong_with(upstream)):
        yield warning(
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
    yield warning(
        7,
        f"Upstream “{upstream}” has a queue depth of {upstream.queue_depth}, but those of its "
        f"tiers {words}: a crowd of one tier can fill the queue for all.",
        "Raise the upstream's queue depth, or lower those of the tiers.",
    )
