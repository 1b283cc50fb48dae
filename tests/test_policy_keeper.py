"""Policies that always arrive: whatever way the rows were edited, the store follows them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.core.management import call_command
from django.db import DatabaseError, connections, transaction
from django.utils import timezone

from llm_throttle import admit, policies, worker
from llm_throttle.admission import snapshot
from llm_throttle.exceptions import Refused, UnknownUpstream
from llm_throttle.identity import Identity
from llm_throttle.models import Tier, TierAssignment, TierLimit, Upstream
from llm_throttle.scheduling.commands import SetPolicy
from llm_throttle.scheduling.policy import Policy, TierPolicy
from llm_throttle.worker import current

from .waiting_room import eventually

pytestmark = pytest.mark.django_db(transaction=True)

WITHIN = 3.0
"""Seconds for an edit that nobody announced: POLICY_MAX_AGE and a beat, on a busy machine."""


@pytest.fixture(autouse=True)
def rows(backend: str, settings: Any) -> Iterator[Upstream]:
    """``sim`` with 3 slots; this process takes part in its beats."""
    settings.LLM_THROTTLE |= {"POLICY_MAX_AGE": 0.3, "BEAT": 0.1}
    upstream = Upstream.objects.create(slug="sim", capacity=3)
    for slug, marks in {"gold": {}, "free": {"is_default": True}}.items():
        tier = Tier.objects.create(slug=slug, **marks)
        TierLimit.objects.create(upstream=upstream, tier=tier, depth_per_user=50)
    worker.reset()
    with admit("sim", identity=Identity("first", "gold")):
        pass
    yield upstream
    worker.reset()


def capacity() -> int:
    """How many slots the store really hands out."""
    held = []
    try:
        while len(held) < 20:
            admission = admit("sim", identity=Identity(f"user:{len(held)}", "gold"), wait=0)
            admission.__enter__()
            held.append(admission)
    except (Refused, UnknownUpstream):
        pass
    finally:
        for admission in held:
            admission.__exit__(None, None, None)
    return len(held)


def becomes(number: int, within: float = WITHIN) -> bool:
    return eventually(lambda: snapshot("sim").in_flight == 0 and capacity() == number, within)


def in_another_thread(edit: Callable[[], object]) -> None:
    def run() -> None:
        edit()
        connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def version_in_force() -> int:
    stamp = current().keeper.publish("sim")
    return stamp.version


# Edits that are announced


def test_a_saved_edit_binds_the_next_decision() -> None:
    upstream = Upstream.objects.get()
    for number in (5, 1, 4):
        upstream.capacity = number
        upstream.save()
        assert capacity() == number


def test_a_rolled_back_edit_binds_nobody(rows: Upstream) -> None:
    with pytest.raises(DatabaseError), transaction.atomic():
        rows.capacity = 9
        rows.save()
        assert capacity() == 3
        raise DatabaseError
    assert not becomes(9, within=1)
    assert capacity() == 3


def test_an_edit_within_a_transaction_binds_when_it_commits(rows: Upstream) -> None:
    with transaction.atomic():
        rows.capacity = 2
        rows.save()
        assert capacity() == 3
    assert capacity() == 2


def test_a_fixture_binds_when_it_is_loaded(rows: Upstream, tmp_path: Path) -> None:
    fixture = tmp_path / "limits.json"
    call_command("dumpdata", "llm_throttle.upstream", output=fixture)
    objects = json.loads(fixture.read_text())
    objects[0]["fields"]["capacity"] = 2
    fixture.write_text(json.dumps(objects))
    call_command("loaddata", fixture, verbosity=0)
    assert becomes(2)


def test_a_change_of_tier_binds_the_next_request() -> None:
    ann = User.objects.create_user("ann")

    def tier() -> str:
        with admit("sim", user=ann) as lease:
            return lease.tier

    assert tier() == "free"
    gold = Tier.objects.get(slug="gold")
    group = Group.objects.create(name="payers")
    gold.groups.add(group)
    ann.groups.add(group)
    assert tier() == "gold"
    ann.groups.clear()
    assert tier() == "free"
    assignment = TierAssignment.objects.create(user=ann, tier=gold)
    assert tier() == "gold"
    assignment.expires_at = timezone.now()
    assignment.save()
    assert tier() == "free"


# Edits that bypass save()


def test_a_bulk_update_is_found_within_the_maximum_age() -> None:
    before = version_in_force()
    in_another_thread(lambda: Upstream.objects.update(capacity=5))
    assert becomes(5)
    assert version_in_force() > before, "the same version with other content is given a new one"


def test_a_bulk_update_of_limits_is_found_too() -> None:
    in_another_thread(lambda: TierLimit.objects.update(cap=1))
    assert becomes(1)


def test_rows_deleted_behind_our_back_are_found() -> None:
    def delete() -> None:
        TierLimit.objects.all()._raw_delete(using="default")
        Upstream.objects.all()._raw_delete(using="default")

    in_another_thread(delete)
    assert becomes(0)


def test_rows_that_come_back_are_found() -> None:
    Upstream.objects.get().delete()
    assert capacity() == 0
    tier = Tier.objects.get(slug="gold")
    upstream = Upstream.objects.bulk_create([Upstream(slug="sim", capacity=4)])[0]
    TierLimit.objects.bulk_create([TierLimit(upstream=upstream, tier=tier, depth_per_user=50)])

    def asks_until_served() -> bool:
        try:
            with admit("sim", identity=Identity("first", "gold"), wait=0):
                return True
        except (Refused, UnknownUpstream):
            return False

    current().keeper.publish("sim")
    assert eventually(asks_until_served, WITHIN)
    assert becomes(4)


# The database and the store disagree


def put_in_force(version: int, slots: int) -> None:
    """As if another database's policy, or a later one, had been published."""
    tier = TierPolicy("gold", cap=slots, depth_per_user=50)
    current().call("sim", SetPolicy(Policy(version, slots, (tier,))))


def test_a_database_behind_the_store_wins_with_a_higher_version(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A restored backup: its version is lower than what the store has seen."""
    put_in_force(5000, slots=1)
    assert capacity() == 1
    assert becomes(3)
    assert Upstream.objects.get().version > 5000
    assert "published anew" in caplog.text


def test_the_same_version_with_other_content_is_republished(rows: Upstream) -> None:
    rows.refresh_from_db()
    put_in_force(rows.version, slots=1)
    assert becomes(3)


def test_what_agrees_is_left_alone(rows: Upstream) -> None:
    rows.refresh_from_db()
    assert not eventually(lambda: Upstream.objects.get().version != rows.version, 1.0)


def test_a_database_that_is_away_changes_nothing_and_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(slug: str) -> Policy:
        raise DatabaseError("the database is away")

    load = policies.load
    monkeypatch.setattr(policies, "load", away)
    assert eventually(lambda: "The policy of sim was not checked" in caplog.text, WITHIN)
    assert capacity() == 3
    monkeypatch.setattr(policies, "load", load)
    in_another_thread(lambda: Upstream.objects.update(capacity=2))
    assert becomes(2)
