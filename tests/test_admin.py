"""The operator's pages, by real posts: what is offered, saved, refused, announced."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Group, Permission, User
from django.test import Client
from django.urls import reverse
from django.utils import timezone
from django.utils.html import escape

from llm_throttle import policies
from llm_throttle.admin import guaranteed_with_heavier
from llm_throttle.models import Tier, TierAssignment, TierLimit, Upstream
from llm_throttle.scheduling.policy import Policy, TierPolicy

pytestmark = pytest.mark.django_db

ADD = "/admin/llm_throttle/upstream/add/"
LIST = "/admin/llm_throttle/upstream/"


@pytest.fixture
def tiers() -> list[Tier]:
    return [
        Tier.objects.create(slug="free", name="Free", is_default=True),
        Tier.objects.create(slug="gold", name="Gold"),
        Tier.objects.create(slug="guest", name="Guest", is_anonymous=True),
    ]


@pytest.fixture
def upstream(tiers) -> Upstream:
    row = Upstream.objects.create(slug="anthropic", name="Anthropic", capacity=30)
    caps = {"gold": (30, 100), "free": (15, 3), "guest": (5, 1)}
    for tier in tiers:
        cap, weight = caps[tier.slug]
        TierLimit.objects.create(upstream=row, tier=tier, cap=cap, weight=weight, wait_budget=10)
    return row


def change(row: Upstream) -> str:
    return reverse("admin:llm_throttle_upstream_change", args=[row.pk])


def filled(client: Client, url: str, **cells: object) -> dict[str, object]:
    """The form as a browser would send it, with some cells changed: ``gold__cap=5``."""
    context = client.get(url).context
    form, formset = context["adminform"].form, context["inline_admin_formsets"][0].formset
    data: dict[str, object] = {}
    for part in (form, formset.management_form, *formset.forms):
        for field in part:
            value = field.value()
            data[field.html_name] = "" if value is None or value is False else value
    for cell, value in cells.items():
        tier, _, name = cell.rpartition("__")
        data[f"{prefix_of(formset, tier)}-{name}" if tier else name] = value
    return data


def prefix_of(formset, slug: str) -> str:
    pk = str(Tier.objects.get(slug=slug).pk)
    return next(form.prefix for form in formset.forms if str(form["tier"].value()) == pk)


def errors_of(response) -> str:
    assert response.status_code == 200, "it was saved"
    formset = response.context["inline_admin_formsets"][0].formset
    form = response.context["adminform"].form
    return " ".join(map(str, [form.errors, *formset.errors, formset.non_form_errors()]))


# Adding an upstream


def test_a_new_upstream_is_offered_with_a_row_of_defaults_for_every_tier(admin_client, tiers):
    formset = admin_client.get(ADD).context["inline_admin_formsets"][0].formset
    offered = [[form[name].value() for name in form.fields] for form in formset.forms]
    assert [row[:7] for row in offered] == [[t.pk, None, 0, 1, 0, None, 8] for t in tiers]


def test_the_rows_are_stored_as_they_were_shown_also_where_nothing_was_changed(admin_client, tiers):
    data = filled(admin_client, ADD, slug="anthropic", capacity=30, gold__weight=100)
    assert admin_client.post(ADD, data).status_code == 302
    row = Upstream.objects.get()
    assert (row.capacity, row.max_hold, row.drain, row.grace) == (30, 300, 50, 15)
    weights = dict(row.limits.values_list("tier__slug", "weight"))
    assert weights == {"free": 1, "gold": 100, "guest": 1}


def test_empty_cells_are_stored_with_their_meaning(admin_client, tiers):
    cells = ("reserved", "weight", "wait_budget", "queue_depth", "depth_per_user", "cap")
    empty = {f"gold__{cell}": "" for cell in cells}
    data = filled(admin_client, ADD, slug="anthropic", capacity=30, **empty)
    assert admin_client.post(ADD, data).status_code == 302
    gold = TierLimit.objects.get(tier__slug="gold")
    assert (gold.cap, gold.reserved, gold.weight) == (None, 0, 1)
    assert (gold.wait_budget, gold.queue_depth, gold.depth_per_user) == (0, None, 8)


def test_an_upstream_can_be_added_before_there_is_any_tier(admin_client):
    data = filled(admin_client, ADD, slug="anthropic", capacity=1)
    assert admin_client.post(ADD, data).status_code == 302
    assert policies.load("anthropic").usable_slots("default") == 1


@pytest.mark.parametrize("slug", ["my llm", "a:b", "{a}", "naïve"])
def test_an_unsafe_slug_is_refused_with_what_to_use_instead(admin_client, tiers, slug):
    data = filled(admin_client, ADD, slug=slug, capacity=30)
    assert "no spaces, colons, braces" in errors_of(admin_client.post(ADD, data))
    url = "/admin/llm_throttle/tier/add/"
    response = admin_client.post(url, {"slug": slug})
    assert "no spaces, colons, braces" in str(response.context["adminform"].form.errors)


# Editing one


def test_an_edit_of_many_rows_is_announced_once(
    admin_client, upstream, announced, django_capture_on_commit_callbacks
):
    data = filled(
        admin_client, change(upstream), capacity=20, gold__cap=20, free__cap=10, guest__cap=2
    )
    with django_capture_on_commit_callbacks(execute=True):
        assert admin_client.post(change(upstream), data).status_code == 302
    assert announced == [("anthropic", False, Upstream.objects.get().version)]
    assert [tier.cap for tier in policies.load("anthropic")] == [10, 20, 2]


def test_a_tier_that_came_later_gets_a_row_of_its_own_and_the_others_are_not_offered_twice(
    admin_client, upstream
):
    pro = Tier.objects.create(slug="pro", name="Pro")
    data = filled(admin_client, change(upstream), pro__weight=10)
    assert (data["limits-INITIAL_FORMS"], data["limits-TOTAL_FORMS"]) == (3, 4)
    assert admin_client.post(change(upstream), data).status_code == 302
    assert upstream.limits.get(tier=pro).weight == 10
    assert upstream.limits.count() == 4


def test_the_slug_is_for_reading_only_once_it_is_saved(admin_client, upstream):
    data = filled(admin_client, change(upstream)) | {"slug": "renamed"}
    assert admin_client.post(change(upstream), data).status_code == 302
    assert Upstream.objects.get().slug == "anthropic"
    tier = Tier.objects.get(slug="gold")
    url = reverse("admin:llm_throttle_tier_change", args=[tier.pk])
    assert admin_client.post(url, {"slug": "silver", "name": "G"}).status_code == 302
    assert Tier.objects.get(pk=tier.pk).slug == "gold"


def test_two_forms_opened_at_once_never_set_the_version_back(admin_client, upstream):
    mine, yours = (filled(admin_client, change(upstream), name=name) for name in ("a", "b"))
    seen = []
    for data in (mine, yours, mine):
        assert admin_client.post(change(upstream), data).status_code == 302
        seen.append(Upstream.objects.get().version)
    assert seen == sorted(set(seen))


def test_capacity_and_caps_may_be_lowered_in_one_step(admin_client, upstream):
    data = filled(
        admin_client, change(upstream), capacity=3, gold__cap=3, free__cap="", guest__cap=1
    )
    assert admin_client.post(change(upstream), data).status_code == 302
    assert [tier.cap for tier in policies.load("anthropic")] == [3, 3, 1]


def test_a_capacity_of_0_is_saved_without_touching_the_tiers(admin_client, upstream):
    data = filled(admin_client, change(upstream), capacity=0)
    assert admin_client.post(change(upstream), data).status_code == 302
    assert policies.load("anthropic").capacity == 0
    assert TierLimit.objects.get(tier__slug="gold").cap == 30


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"capacity": 10}, "Tier “Gold” has a cap of 30, more than the capacity of 10"),
        ({"capacity": ""}, "This field is required"),
        ({"capacity": -1}, "greater than or equal to 0"),
        ({"capacity": 10**9}, "less than or equal to 1000000"),
        ({"queue_depth": -1}, "greater than or equal to 0"),
        ({"drain": 501}, "less than or equal to 500"),
        ({"max_hold": 0}, "greater than or equal to 1"),
        ({"gold__cap": 0}, "Tier “Gold” could never be served with a cap of 0"),
        ({"gold__cap": 31}, "Tier “Gold” has a cap of 31, more than the capacity of 30"),
        ({"gold__cap": -1}, "greater than or equal to 0"),
        ({"guest__reserved": 6}, "Tier “Guest” reserves 6 slots, more than its cap of 5"),
        ({"gold__reserved": 31}, "Tier “Gold” reserves 31 slots, more than the capacity of 30"),
        ({"gold__reserved": -1}, "greater than or equal to 0"),
        (
            {"gold__reserved": 20, "free__reserved": 11},
            "add up to 31 slots (Gold 20, Free 11), more than the capacity of 30",
        ),
        (
            {"gold__reserved": 30},
            "Tiers “Free”, “Guest” could never be served: they reserve nothing, and the "
            "reservations of the others (Gold 30) fill the capacity of 30",
        ),
        (
            {"gold__reserved": 25, "guest__reserved": 5},
            "Tier “Free” could never be served: it reserves nothing, and the reservations of "
            "the others (Gold 25, Guest 5) fill the capacity of 30",
        ),
        ({"gold__weight": 0}, "greater than or equal to 1"),
        ({"gold__weight": 1001}, "less than or equal to 1000"),
        ({"gold__wait_budget": -1}, "greater than or equal to 0"),
        ({"gold__wait_budget": 10**9}, "less than or equal to 86400"),
        ({"gold__queue_depth": -1}, "greater than or equal to 0"),
        ({"gold__depth_per_user": 0}, "greater than or equal to 1"),
        ({"gold__depth_per_user": 101}, "less than or equal to 100"),
        ({"gold__cap": "many"}, "Enter a whole number"),
    ],
)
def test_numbers_that_cannot_hold_are_refused_with_the_tier_and_the_numbers(
    admin_client, upstream, cells, words
):
    before = Upstream.objects.get().version
    response = admin_client.post(change(upstream), filled(admin_client, change(upstream), **cells))
    found = re.sub(r"\s+", " ", errors_of(response))
    assert escape(words) in found or words in found
    assert Upstream.objects.get().version == before


@pytest.mark.parametrize(
    "cells",
    [
        {"capacity": 1, "gold__cap": "", "free__cap": 1, "guest__cap": 1},
        {"queue_depth": 0},
        {"queue_depth": ""},
        {"gold__queue_depth": 0},
        {"gold__wait_budget": 0},
        {"gold__cap": 1},
        {"guest__depth_per_user": 1},
        {"gold__reserved": 29},
        {"gold__reserved": 20, "free__reserved": 5, "guest__reserved": 5},
    ],
)
def test_numbers_at_their_edges_are_accepted(admin_client, upstream, cells):
    response = admin_client.post(change(upstream), filled(admin_client, change(upstream), **cells))
    assert response.status_code == 302
    assert all(policies.load("anthropic").usable_slots(t.slug) for t in Tier.objects.all())


def test_a_post_that_names_a_tier_twice_or_none_that_exists_is_refused(admin_client, upstream):
    data = filled(admin_client, change(upstream))
    gold = next(key for key, value in data.items() if key.endswith("-tier"))
    for value in (Tier.objects.get(slug="guest").pk, 9999, "x"):
        assert errors_of(admin_client.post(change(upstream), data | {gold: value}))
    assert upstream.limits.count() == 3


# What the page tells


def test_the_page_tells_the_true_guarantee_and_the_turn_of_each_tier(admin_client, upstream):
    page = admin_client.get(change(upstream)).content.decode()
    # Free 15 and guest 5 can take 20 of 30: gold is sure of 10, not of its cap.
    assert re.findall(r"(\d+ slots?)", page)[-3:] == ["10 slots", "0 slots", "0 slots"]
    assert "25 with the heavier tiers" in page
    for tier in policies.load("anthropic"):
        bound = policies.load("anthropic").starvation_bound(tier.slug)
        assert f"{bound} others at most" in page


def test_tiers_are_sure_together_of_what_the_lighter_ones_cannot_take():
    policy = Policy(
        version=1,
        capacity=30,
        tiers=(
            TierPolicy("premium", cap=30, weight=100),
            TierPolicy("pro", cap=20, weight=10),
            TierPolicy("free", cap=15, weight=3),
            TierPolicy("guest", cap=5, weight=1),
        ),
    )
    together = {tier.slug: guaranteed_with_heavier(policy, tier.slug) for tier in policy}
    assert together == {"premium": 0, "pro": 10, "free": 25, "guest": 30}


def test_a_tier_that_got_in_without_a_chance_is_shown_as_never_served(admin_client, upstream):
    TierLimit.objects.filter(tier__slug="guest").update(cap=0)
    assert "never served" in admin_client.get(change(upstream)).content.decode()


def test_the_page_tells_where_callers_without_a_tier_go(admin_client, upstream):
    page = admin_client.get(change(upstream)).content.decode()
    assert "Signed-in users: Free. Guests: Guest." in page
    Tier.objects.update(is_anonymous=False)
    page = admin_client.get(change(upstream)).content.decode()
    assert "Guests: the built-in tier “default” (weight 1, never waits)." in page


def test_the_list_tells_which_upstreams_let_callers_in(admin_client, upstream):
    Upstream.objects.create(slug="paused", capacity=3, is_paused=True)
    Upstream.objects.create(slug="shut", capacity=0)
    page = admin_client.get(LIST).content.decode()
    assert (page.count("icon-yes"), page.count("icon-no")) == (1, 2)


# Actions and deletion


@pytest.mark.parametrize(("action", "is_paused"), [("pause", True), ("resume", False)])
def test_pausing_and_resuming_are_announced_and_logged(
    admin_client, upstream, announced, django_capture_on_commit_callbacks, action, is_paused
):
    other = Upstream.objects.create(slug="other", capacity=1, is_paused=is_paused)
    Upstream.objects.filter(pk=upstream.pk).update(is_paused=not is_paused)
    before = Upstream.objects.get(pk=upstream.pk).version
    with django_capture_on_commit_callbacks(execute=True):
        response = admin_client.post(
            LIST, {"action": action, "_selected_action": [upstream.pk, other.pk]}, follow=True
        )
    assert [slug for slug, _, _ in announced] == ["anthropic"]  # the other one was so already
    assert policies.load("anthropic").is_paused is is_paused
    assert Upstream.objects.get(pk=upstream.pk).version > before
    assert f"1 upstream is {action}d" in response.content.decode()
    assert LogEntry.objects.get().object_id == str(upstream.pk)


def test_whoever_may_only_look_can_neither_pause_nor_edit(client, upstream):
    viewer = User.objects.create_user("viewer", password="x", is_staff=True)
    viewer.user_permissions.set(Permission.objects.filter(codename__startswith="view_"))
    client.force_login(viewer)
    assert client.get(change(upstream)).status_code == 200
    assert client.post(change(upstream), {}).status_code == 403
    client.post(LIST, {"action": "pause", "_selected_action": [upstream.pk]})
    assert not Upstream.objects.get().is_paused


def test_deleting_an_upstream_or_a_tier_takes_their_limits_along(admin_client, upstream):
    tier = Tier.objects.get(slug="guest")
    TierAssignment.objects.create(user=User.objects.create_user("someone"), tier=tier)
    url = reverse("admin:llm_throttle_tier_delete", args=[tier.pk])
    assert admin_client.get(url).status_code == 200
    assert admin_client.post(url, {"post": "yes"}).status_code == 302
    assert TierLimit.objects.count() == 2
    url = reverse("admin:llm_throttle_upstream_delete", args=[upstream.pk])
    assert admin_client.post(url, {"post": "yes"}).status_code == 302
    assert (Upstream.objects.count(), TierLimit.objects.count()) == (0, 0)


# Tiers and assignments


def test_a_tier_is_added_with_its_groups(admin_client):
    group = Group.objects.create(name="paying")
    data = {"slug": "gold", "name": "Gold", "groups": [group.pk], "is_default": "on"}
    assert admin_client.post("/admin/llm_throttle/tier/add/", data).status_code == 302
    assert list(Tier.objects.get().groups.all()) == [group]
    assert "paying" in admin_client.get("/admin/llm_throttle/tier/").content.decode()


def test_a_second_default_tier_is_refused_at_its_box(admin_client, tiers):
    response = admin_client.post(
        "/admin/llm_throttle/tier/add/", {"slug": "x", "is_default": "on", "is_anonymous": "on"}
    )
    errors = response.context["adminform"].form.errors
    assert "“Free” has this mark already" in errors["is_default"][0]
    assert "“Guest” has this mark already" in errors["is_anonymous"][0]


def test_an_assignment_is_made_for_a_user_found_by_search(admin_client, tiers):
    someone = User.objects.create_user("someone")
    add = "/admin/llm_throttle/tierassignment/add/"
    assert "admin-autocomplete" in admin_client.get(add).content.decode()
    data = {
        "user": someone.pk,
        "tier": tiers[1].pk,
        "expires_at_0": "2020-01-01",
        "expires_at_1": "12:00",
    }
    assert admin_client.post(add, data).status_code == 302
    page = admin_client.get("/admin/llm_throttle/tierassignment/?q=someone").content.decode()
    assert "icon-no" in page  # it has expired
    TierAssignment.objects.update(expires_at=timezone.now() + timedelta(days=1))
    page = admin_client.get("/admin/llm_throttle/tierassignment/?q=someone").content.decode()
    assert "icon-yes" in page


def test_a_second_assignment_of_the_same_user_is_refused(admin_client, tiers):
    someone = User.objects.create_user("someone")
    TierAssignment.objects.create(user=someone, tier=tiers[0])
    add = "/admin/llm_throttle/tierassignment/add/"
    response = admin_client.post(add, {"user": someone.pk, "tier": tiers[1].pk})
    assert "already exists" in str(response.context["adminform"].form.errors)


def test_where_users_have_no_page_of_their_own_an_assignment_takes_an_id(
    admin_client, tiers, monkeypatch
):
    monkeypatch.delitem(admin.site._registry, User)
    page = admin_client.get("/admin/llm_throttle/tierassignment/add/").content.decode()
    assert "admin-autocomplete" not in page
    assert 'name="user"' in page
