"""Each fault of the tables and the rows with its id; without ``--database`` nobody looks."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import call_command
from django.db import connection

from llm_throttle.models import Tier, TierLimit, Upstream

from .found import REDIS, in_database


def test_no_check_reads_the_database_or_the_store_unasked(settings):
    # Without the django_db mark a query would raise; nobody listens on this store's port.
    settings.CACHES = {"default": REDIS}
    call_command("check", verbosity=0)
    call_command("check", deploy=True, verbosity=0, stderr=StringIO())


@pytest.mark.django_db(transaction=True)
def test_W005_tables_that_are_missing_which_migrate_itself_survives():
    with connection.schema_editor() as editor:
        editor.delete_model(TierLimit)
    try:
        assert set(in_database()) == {"W005"}
        assert "manage.py migrate" in in_database()["W005"]
        call_command("migrate", verbosity=0, skip_checks=False, plan=True)
    finally:
        with connection.schema_editor() as editor:
            editor.create_model(TierLimit)


@pytest.mark.django_db(transaction=True)
def test_W005_a_column_that_is_missing():
    grace = Upstream._meta.get_field("grace")
    Upstream.objects.create(slug="anthropic", capacity=1)
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE llm_throttle_upstream RENAME COLUMN grace TO other")
    try:
        assert set(in_database()) == {"W005"}
    finally:
        with connection.cursor() as cursor:
            cursor.execute(
                f"ALTER TABLE llm_throttle_upstream RENAME COLUMN other TO {grace.column}"
            )


@pytest.mark.django_db
def test_W006_no_upstream():
    assert set(in_database()) == {"W006"}


def test_rows_that_are_in_order_are_not_mentioned(upstream):
    assert in_database() == {}


def test_W007_a_queue_that_one_tier_can_fill_for_all(upstream):
    Upstream.objects.update(queue_depth=199)
    assert "queue depth of 199, but those of its tiers add up to 200" in in_database()["W007"]
    Upstream.objects.update(queue_depth=200)
    assert in_database() == {}
    TierLimit.objects.filter(tier__slug="free").update(queue_depth=None)
    assert "have no bound" in in_database()["W007"]
    # A tier that never waits fills no queue, and alone it takes nobody's place.
    TierLimit.objects.filter(tier__slug="free").update(wait_budget=0)
    assert in_database() == {}


def test_W008_rows_that_got_in_past_the_validation(upstream):
    TierLimit.objects.filter(tier__slug="gold").update(reserved=25)
    TierLimit.objects.filter(tier__slug="free").update(reserved=10)
    words = in_database()["W008"]
    assert "Upstream “Anthropic”: The reservations add up to 35 slots" in words
    TierLimit.objects.update(reserved=0, cap=0)
    assert "could never be served with a cap of 0" in in_database()["W008"]
    TierLimit.objects.update(cap=None)
    Upstream.objects.update(slug="a b")
    assert "no spaces, colons, braces" in in_database()["W008"]


def test_W010_callers_whom_nothing_places(upstream):
    Tier.objects.update(is_anonymous=False)
    assert "is the one for guests: they get" in in_database()["W010"]
    Tier.objects.update(is_default=False)
    assert "for signed-in users or guests" in in_database()["W010"]


def test_W011_a_waiting_room_in_which_nobody_waits(upstream):
    TierLimit.objects.filter(tier__slug="free").update(wait_budget=0)
    assert in_database() == {}
    TierLimit.objects.update(wait_budget=0)
    assert set(in_database()) == {"W011"}
    TierLimit.objects.all().delete()
    assert "Upstream “Anthropic” lets nobody wait" in in_database()["W011"]


def test_the_rows_are_checked_only_where_the_tables_belong(upstream, settings):
    settings.DATABASE_ROUTERS = [f"{__name__}.ElsewhereRouter"]
    assert in_database() == {}


class ElsewhereRouter:
    def allow_migrate(self, db: str, app_label: str, **hints: object) -> bool:
        return app_label != "llm_throttle"
