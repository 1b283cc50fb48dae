"""Who is asking: tiers by assignment, group and mark; flows by user or address; own resolvers."""

from __future__ import annotations

import logging
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.contrib.auth.models import AnonymousUser, Group, User
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.test import RequestFactory
from django.utils import timezone

from llm_throttle import identity, policies
from llm_throttle.identity import Caller, Identity, aidentify, identify, resolve_flow, resolve_tier
from llm_throttle.models import Tier, TierAssignment, TierLimit, Upstream

pytestmark = pytest.mark.django_db


@pytest.fixture
def tiers() -> dict[str, Tier]:
    """Weights: premium 100, pro 10, free 3 (default), guest 1 (anonymous)."""
    row = Upstream.objects.create(slug="anthropic", capacity=30)
    rows = {}
    for slug, weight in {"premium": 100, "pro": 10, "free": 3, "guest": 1}.items():
        rows[slug] = Tier.objects.create(
            slug=slug, is_default=slug == "free", is_anonymous=slug == "guest"
        )
        TierLimit.objects.create(upstream=row, tier=rows[slug], weight=weight)
        rows[slug].groups.add(Group.objects.create(name=slug))
    return rows


def user(*groups: str) -> User:
    row = User.objects.create_user(f"user{User.objects.count()}")
    row.groups.set(Group.objects.filter(name__in=groups))
    return row


def tier_of(user: object, upstream: str = "anthropic") -> str:
    return resolve_tier(Caller(upstream, user))


# The default tier resolver


def test_a_group_places_its_members(tiers):
    assert tier_of(user("pro")) == "pro"


def test_of_several_groups_the_heaviest_tier_at_this_upstream_counts(tiers):
    member = user("free", "pro", "premium")
    assert tier_of(member) == "premium"
    other = Upstream.objects.create(slug="openai", capacity=5)
    TierLimit.objects.create(upstream=other, tier=tiers["pro"], weight=50)
    # Premium has no row there and so a weight of 1.
    assert tier_of(member, "openai") == "pro"


def test_equal_weights_are_told_apart_the_same_way_every_time(tiers):
    TierLimit.objects.update(weight=5)
    assert tier_of(user("pro", "premium")) == "premium"


def test_a_group_counts_more_than_the_default_tier_even_if_it_is_lighter(tiers):
    TierLimit.objects.filter(tier__slug="free").update(weight=500)
    assert tier_of(user("pro")) == "pro"


def test_an_assignment_overrides_groups_until_it_expires(tiers):
    member = user("premium")
    assignment = TierAssignment.objects.create(user=member, tier=tiers["free"])
    assert tier_of(member) == "free"
    assignment.expires_at = timezone.now() + timedelta(minutes=1)
    assignment.save()
    assert tier_of(member) == "free"
    assignment.expires_at = timezone.now()
    assignment.save()
    assert tier_of(member) == "premium"


def test_somebody_elses_assignment_does_not_count(tiers):
    TierAssignment.objects.create(user=user(), tier=tiers["premium"])
    assert tier_of(user()) == "free"


def test_a_signed_in_user_without_a_group_gets_the_default_tier(tiers):
    assert tier_of(user()) == "free"


@pytest.mark.parametrize("nobody", [None, AnonymousUser()])
def test_guests_get_the_anonymous_tier(tiers, nobody):
    assert tier_of(nobody) == "guest"


def test_the_tier_costs_one_query(tiers, django_assert_num_queries):
    member = user("free", "pro", "premium")
    with django_assert_num_queries(1):
        tier_of(member)
    with django_assert_num_queries(1):
        tier_of(None)


def test_a_user_model_without_groups_gets_the_default_tier(tiers):
    assert tier_of(SimpleNamespace(pk=1, is_authenticated=True)) == "free"


def test_where_no_tier_is_marked_callers_land_in_the_built_in_one_which_the_policy_has():
    Upstream.objects.create(slug="anthropic", capacity=30)
    Tier.objects.create(slug="gold")
    for caller in (None, user()):
        assert tier_of(caller) == "default"
    assert "default" in policies.load("anthropic").by_slug


@pytest.mark.parametrize("mark", ["is_default", "is_anonymous", None])
def test_whatever_is_marked_the_policy_has_the_tier_that_is_found(tiers, mark):
    if mark:
        Tier.objects.filter(**{mark: True}).update(**{mark: False})
    known = policies.load("anthropic").by_slug
    for caller in (None, user(), user("pro")):
        assert tier_of(caller) in known


# The default flow resolver


def flow_from(address: str, forwarded: str | None = None) -> str:
    headers = {} if forwarded is None else {"X-Forwarded-For": forwarded}
    request = RequestFactory(headers=headers, REMOTE_ADDR=address).get("/")
    scope = {
        "client": (address, 4242) if address else None,
        "headers": [] if forwarded is None else [(b"x-forwarded-for", forwarded.encode())],
    }
    flows = {
        resolve_flow(Caller("u", AnonymousUser(), request=request)),
        resolve_flow(Caller("u", None, scope=scope)),
    }
    assert len(flows) == 1  # a socket's flow is that of the same client's requests
    return flows.pop()


def test_a_signed_in_user_is_one_flow_wherever_it_comes_from():
    member = user()
    request = RequestFactory(REMOTE_ADDR="10.0.0.1").get("/")
    assert resolve_flow(Caller("u", member, request=request)) == f"user:{member.pk}"
    assert resolve_flow(Caller("u", member)) == f"user:{member.pk}"


def test_guests_are_told_apart_by_address():
    assert flow_from("203.0.113.7") == "ip:203.0.113.7"


@pytest.mark.parametrize(
    ("address", "flow"),
    [
        ("2001:db8:1:2:3:4:5:6", "ip:2001:db8:1:2::/64"),
        ("2001:DB8:1:2::9", "ip:2001:db8:1:2::/64"),
        ("fe80::1%eth0", "ip:fe80::/64"),
        ("::ffff:203.0.113.7", "ip:203.0.113.7"),
        ("", "ip:unknown"),
        ("nonsense", "ip:unknown"),
    ],
)
def test_addresses_are_normalised(address, flow):
    assert flow_from(address) == flow


def test_no_header_is_trusted_unless_proxies_are_configured():
    assert flow_from("10.0.0.1", "203.0.113.7") == "ip:10.0.0.1"


@pytest.mark.parametrize(
    ("proxies", "header", "flow"),
    [
        (1, "203.0.113.7", "ip:203.0.113.7"),
        (1, "6.6.6.6, 203.0.113.7", "ip:203.0.113.7"),
        (1, "6.6.6.6,, , 203.0.113.7", "ip:203.0.113.7"),
        (2, "6.6.6.6, 203.0.113.7, 10.9.9.9", "ip:203.0.113.7"),
        (1, "203.0.113.7:51234", "ip:203.0.113.7"),
        (1, "[2001:db8:1:2::9]:443", "ip:2001:db8:1:2::/64"),
        (1, "2001:db8:1:2::9%eth1", "ip:2001:db8:1:2::/64"),
        # What cannot be right falls back to the other end of the connection.
        (1, "", "ip:10.0.0.1"),
        (1, "unknown", "ip:10.0.0.1"),
        (1, "203.0.113.7, ", "ip:10.0.0.1"),
        (2, "203.0.113.7", "ip:10.0.0.1"),
        (2, "6.6.6.6, 999.1.1.1, 10.9.9.9", "ip:10.0.0.1"),
        (1, "127.1", "ip:10.0.0.1"),
        (1, "203.0.113.7" * 500, "ip:10.0.0.1"),
    ],
)
def test_of_a_forwarded_header_only_what_a_trusted_proxy_wrote_counts(
    settings, proxies, header, flow
):
    settings.LLM_THROTTLE = {"TRUSTED_PROXIES": proxies}
    assert flow_from("10.0.0.1", header) == flow


def test_a_forwarded_header_in_several_lines_is_read_as_one(settings):
    settings.LLM_THROTTLE = {"TRUSTED_PROXIES": 1}
    lines = [(b"X-Forwarded-For", b"6.6.6.6"), (b"x-forwarded-for", b"203.0.113.7")]
    assert Caller("u", scope={"client": ("10.0.0.1", 1), "headers": lines}).address == "203.0.113.7"


def test_outside_of_a_request_a_guest_has_no_address_and_no_session():
    caller = Caller("u")
    assert (caller.address, caller.session_key, caller.is_signed_in) == (None, None, False)
    assert resolve_flow(caller) == "ip:unknown"


def test_the_session_key_is_that_of_the_request_or_the_scope():
    session = SimpleNamespace(session_key="abc")
    request = RequestFactory().get("/")
    assert Caller("u", request=request).session_key is None
    request.session = session
    assert Caller("u", request=request).session_key == "abc"
    assert Caller("u", scope={"session": session}).session_key == "abc"
    assert Caller("u", scope={"session": SimpleNamespace(session_key=None)}).session_key is None


# Resolvers of one's own


def flow_by_key(caller: Caller) -> str:
    return f"key:{caller.upstream}"


async def async_tier(caller: Caller) -> str:
    tier = await Tier.objects.filter(slug="pro").afirst()
    return tier.slug if tier else "nobody"


class AsyncCallable:
    async def __call__(self, caller: Caller) -> str:
        return "premium"


async_object = AsyncCallable()


def raises(caller: Caller) -> str:
    raise KeyError("plan")


def refuses(caller: Caller) -> str:
    raise PermissionDenied


def unknown(caller: Caller) -> str:
    return "platinum"


def built_in(caller: Caller) -> str:
    return "default"


def nothing(caller: Caller) -> None:
    return None


def empty(caller: Caller) -> str:
    return ""


not_callable = "text"


def use(settings, **resolvers: str) -> None:
    paths = {f"{kind.upper()}_RESOLVER": f"{__name__}.{name}" for kind, name in resolvers.items()}
    settings.LLM_THROTTLE = paths


def test_by_default_a_caller_is_identified_by_the_rows(tiers):
    member = user("pro")
    assert identify(Caller("anthropic", member)) == Identity(f"user:{member.pk}", "pro")


@pytest.mark.parametrize("tier", ["async_tier", "async_object"])
def test_own_resolvers_may_be_sync_or_async_for_sync_callers(tiers, settings, tier):
    use(settings, flow="flow_by_key", tier=tier)
    found = identify(Caller("anthropic"))
    assert found == Identity("key:anthropic", "pro" if tier == "async_tier" else "premium")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("tier", ["async_tier", "async_object"])
async def test_own_resolvers_may_be_sync_or_async_for_async_callers(
    settings, tier, closing_connections
):
    for slug in ("pro", "premium"):
        await Tier.objects.acreate(slug=slug)
    use(settings, flow="flow_by_key", tier=tier)
    found = await aidentify(Caller("anthropic"))
    assert found == Identity("key:anthropic", "pro" if tier == "async_tier" else "premium")


@pytest.mark.django_db(transaction=True)
async def test_async_callers_get_the_default_answer_without_blocking_their_loop(
    closing_connections,
):
    await Tier.objects.acreate(slug="guest", is_anonymous=True)
    assert await aidentify(Caller("anthropic")) == Identity("ip:unknown", "guest")


@pytest.mark.parametrize("setting", ["tier", "flow"])
@pytest.mark.parametrize(
    ("resolver", "words"),
    [
        ("raises", "raised KeyError('plan')"),
        ("nothing", "returned None instead of a string"),
        ("empty", "returned '' instead of a string"),
        ("not_callable", "is not callable"),
        ("missing", "cannot be imported"),
    ],
)
def test_a_resolver_that_cannot_be_used_is_named_with_its_setting(
    settings, setting, resolver, words
):
    use(settings, **{setting: resolver})
    with pytest.raises(ImproperlyConfigured) as caught:
        identify(Caller("anthropic"))
    assert f'LLM_THROTTLE["{setting.upper()}_RESOLVER"]' in str(caught.value)
    assert words in str(caught.value)


def test_a_resolver_may_refuse_a_caller_by_permission_denied(settings):
    use(settings, flow="refuses")
    with pytest.raises(PermissionDenied):
        identify(Caller("anthropic"))


def test_a_tier_that_does_not_exist_falls_back_to_that_of_callers_without_one(
    tiers, settings, caplog
):
    identity._warn_unknown.cache_clear()
    use(settings, tier="unknown")
    with caplog.at_level(logging.WARNING, "llm_throttle.identity"):
        for _ in range(3):
            assert identify(Caller("anthropic")).tier == "guest"
        assert identify(Caller("anthropic", user("premium"))).tier == "free"
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 2  # once for guests, once for signed-in users
    assert "'platinum', which does not exist; 'guest' is used instead" in warned[0]


def test_the_built_in_tier_may_be_named_and_is_never_left_without_a_place(tiers, settings, caplog):
    use(settings, tier="built_in")
    assert identify(Caller("anthropic")).tier == "guest"
    Tier.objects.filter(is_anonymous=True).update(is_anonymous=False)
    assert identify(Caller("anthropic")).tier == "default"
    assert "default" in policies.load("anthropic").by_slug
    assert caplog.records == []
