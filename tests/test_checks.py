"""The system checks: each id with the fault that raises it, and silence where nothing is wrong."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
from django.contrib.auth.decorators import login_required
from django.core.checks import Tags, run_checks
from django.core.management import call_command
from django.db import connection, transaction
from django.urls import include, path
from django.views import View
from rest_framework.viewsets import ViewSet

from llm_throttle.checks import TAG
from llm_throttle.conf import DEFAULTS
from llm_throttle.models import Tier, TierLimit, Upstream
from llm_throttle.views import ThrottledChatMixin, throttled

REDIS = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}
LOCMEM = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}
DUMMY = {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}


class TiedCache:
    """A backend derived from nothing that we know."""


def found(tag: str = TAG, **kwargs) -> dict[str, str]:
    """The messages of our checks by id, each with its hint."""
    return {
        str(message.id).removeprefix("llm_throttle."): f"{message.msg} {message.hint}"
        for message in run_checks(tags=[tag], **kwargs)
        if str(message.id).startswith("llm_throttle.")
    }


def test_the_defaults_are_in_order(settings):
    assert found() == {}
    settings.LLM_THROTTLE = DEFAULTS
    assert found() == {}


def test_no_check_reads_the_database_or_the_store_unasked(settings):
    # Without the django_db mark a query would raise; nobody listens on this store's port.
    settings.CACHES = {"default": REDIS}
    call_command("check", verbosity=0)
    call_command("check", deploy=True, verbosity=0, stderr=StringIO())


@pytest.mark.parametrize("value", ["text", ["CACHE"], 5])
def test_E001_a_setting_that_is_no_dictionary(settings, value):
    settings.LLM_THROTTLE = value
    assert set(found()) == {"E001"}


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("WORKER_TTLS", 'Did you mean "WORKER_TTL"?'),
        ("trusted_proxies", 'Did you mean "TRUSTED_PROXIES"?'),
        ("ON_REDIS_DOWN", 'Did you mean "ON_BACKEND_DOWN"?'),
        ("xyzzy", "Known keys: CACHE, TIER_RESOLVER"),
        (7, "Known keys: CACHE"),
    ],
)
def test_E002_an_unknown_key_with_the_one_that_was_meant(settings, key, hint):
    settings.LLM_THROTTLE = {key: 1}
    assert set(found()) == {"E002"}
    assert f'"{key}"' in found()["E002"]
    assert hint in found()["E002"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("CACHE", None),
        ("CACHE", ""),
        ("TIER_RESOLVER", 3),
        ("TIER_RESOLVER", lambda caller: "gold"),
        ("FLOW_RESOLVER", None),
        ("TRUSTED_PROXIES", -1),
        ("TRUSTED_PROXIES", True),
        ("TRUSTED_PROXIES", "1"),
        ("TRUSTED_PROXIES", 1.0),
        ("ON_BACKEND_DOWN", "allow"),
        ("ON_BACKEND_DOWN", ["local"]),
        ("WORKER_TTL", 0),
        ("WORKER_TTL", "10"),
        ("BEAT", -1),
        ("BEAT", float("nan")),
        ("BEAT", True),
        ("RECOVERY_WINDOW", -1),
        ("POLICY_MAX_AGE", 0),
        ("CONNECT_TIMEOUT", 0),
        ("SOCKET_TIMEOUT", None),
        ("BREAKER_INTERVAL", 5000),
        ("START_GRACE", 0),
        ("IDLE_STREAM", "60"),
        ("SYNC_WAITERS", -1),
        ("SYNC_WAITERS", 2.5),
        ("KEEP_ALIVE", 0),
        ("PUSH_INTERVAL", 0),
        ("RETRY_AFTER_MAX", 0),
        ("RETRY_AFTER_DEFAULT", 0.5),
        ("RETRY_AFTER_PAUSED", "30"),
        ("SHOW_USERS", 1),
        ("METRICS_TOKEN", ""),
        ("METRICS_TOKEN", 5),
    ],
)
def test_E003_a_value_of_the_wrong_kind_or_out_of_range(settings, key, value):
    settings.LLM_THROTTLE = {key: value}
    assert set(found()) == {"E003"}
    assert f'LLM_THROTTLE["{key}"] is {value!r}; it must be' in found()["E003"]


def test_every_setting_has_a_rule():
    from llm_throttle.checks import RULES

    assert list(RULES) == list(DEFAULTS)


def test_E004_a_cache_alias_that_does_not_exist(settings):
    settings.LLM_THROTTLE = {"CACHE": "redis"}
    assert set(found()) == {"E004"}
    assert "name one of these: default, locmem" in found()["E004"]


@pytest.mark.parametrize("backend", [DUMMY, {"BACKEND": "no.such.Cache"}, {}])
def test_E005_a_cache_that_cannot_hold_the_waiting_room(settings, backend):
    settings.CACHES = {"default": LOCMEM, "other": backend}
    settings.LLM_THROTTLE = {"CACHE": "other"}
    assert set(found()) == {"E005"}
    assert "Use django_redis.cache.RedisCache" in found()["E005"]


def test_E005_also_for_a_class_of_ones_own_unless_it_derives_from_a_known_one(settings):
    settings.CACHES = {"default": {"BACKEND": f"{__name__}.TiedCache"}}
    assert set(found()) == {"E005"}
    settings.CACHES = {"default": {"BACKEND": f"{__name__}.DerivedCache"}}
    assert found() == {}


@pytest.mark.parametrize(
    "path", ["django_redis.cache.RedisCache", "django.core.cache.backends.redis.RedisCache"]
)
def test_both_redis_backends_are_accepted(settings, path):
    settings.CACHES = {"default": {"BACKEND": path, "LOCATION": "redis://127.0.0.1:1"}}
    assert found() == {}


@pytest.mark.parametrize("key", ["TIER_RESOLVER", "FLOW_RESOLVER"])
@pytest.mark.parametrize(
    "path", ["no.such.module", "llm_throttle.identity.nothing", "llm_throttle.conf.SETTING", "x"]
)
def test_E006_a_resolver_that_cannot_be_imported_or_called(settings, key, path):
    settings.LLM_THROTTLE = {key: path}
    assert set(found()) == {"E006"}
    assert f'LLM_THROTTLE["{key}"] = {path!r}' in found()["E006"]


def test_E007_and_W004_a_recovery_window_that_is_too_short(settings):
    settings.LLM_THROTTLE = {"RECOVERY_WINDOW": 1.4}
    assert set(found()) == {"E007"}
    settings.LLM_THROTTLE = {"RECOVERY_WINDOW": 0}
    assert set(found()) == {"W004"}
    settings.LLM_THROTTLE = {"RECOVERY_WINDOW": 1.5}
    assert found() == {}


def test_E008_a_worker_ttl_of_fewer_than_four_beats(settings):
    settings.LLM_THROTTLE = {"WORKER_TTL": 3.9}
    assert set(found()) == {"E008"}
    settings.LLM_THROTTLE = {"WORKER_TTL": 10, "BEAT": 3}
    assert "(12 seconds)" in found()["E008"]
    settings.LLM_THROTTLE = {"WORKER_TTL": 4, "BEAT": 1}
    assert found() == {}


def test_W001_a_cache_of_one_process_in_production(settings):
    settings.CACHES = {"default": LOCMEM}
    assert set(found()) == {"W001"}
    settings.DEBUG = True
    assert found() == {}


def deployed() -> set[str]:
    return set(found(include_deployment_checks=True))


def test_W002_a_cache_that_others_may_clear_only_on_deployment(settings):
    settings.CACHES = {"default": REDIS}
    assert (set(found()), deployed()) == (set(), {"W002"})
    settings.LLM_THROTTLE = {"CACHE": "throttle"}
    own = REDIS | {"LOCATION": "redis://127.0.0.1:1/5"}
    settings.CACHES = {"default": REDIS, "throttle": own}
    assert deployed() == set()
    settings.CACHES = {"default": REDIS, "throttle": REDIS}
    assert "'default'" in found(include_deployment_checks=True)["W002"]
    settings.CACHES = {"default": REDIS, "throttle": LOCMEM}
    assert deployed() == {"W001"}


def test_W003_requests_that_wait_inside_a_transaction(settings):
    settings.DATABASES["default"]["ATOMIC_REQUESTS"] = True
    try:
        assert "non_atomic_requests" in found()["W003"]
    finally:
        settings.DATABASES["default"]["ATOMIC_REQUESTS"] = False


@throttled("anthropic")
def chat(request):
    raise AssertionError


class Chat(ThrottledChatMixin, View):
    upstream = "anthropic"


class Actions(ViewSet):
    @throttled("openai")
    def list(self, request):
        raise AssertionError


def use_urls(settings, *views) -> None:
    urls = ModuleType("urls_of_a_check")
    inner = [path(f"{number}/", view) for number, view in enumerate(views)]
    urls.urlpatterns = [path("chat/", include(inner))]
    settings.ROOT_URLCONF = urls


def test_W003_goes_when_no_guarded_view_runs_in_a_transaction(settings, monkeypatch):
    monkeypatch.setitem(settings.DATABASES["default"], "ATOMIC_REQUESTS", True)
    exempt = [transaction.non_atomic_requests(view) for view in (chat, Chat.as_view())]
    use_urls(settings, *exempt)
    assert "W003" not in found()
    use_urls(settings, *exempt, Actions.as_view({"get": "list"}))
    assert "W003" in found()


# The rows


def in_database() -> dict[str, str]:
    return found(Tags.database, databases=["default"])


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


@pytest.fixture
def upstream(db) -> Upstream:
    row = Upstream.objects.create(slug="anthropic", name="Anthropic", capacity=30)
    for slug in ("free", "gold"):
        tier = Tier.objects.create(slug=slug, name=slug.title())
        TierLimit.objects.create(upstream=row, tier=tier, wait_budget=5, queue_depth=100)
    return row


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


def test_W009_a_view_that_names_an_upstream_without_a_row(upstream, settings):
    use_urls(settings, chat, Chat.as_view(), login_required(Chat.as_view(upstream="cohere")))
    assert set(in_database()) == {"W009"}
    assert 'Chat names the upstream "cohere", which does not exist' in in_database()["W009"]
    use_urls(settings, chat, Actions.as_view({"get": "list"}))
    assert '"openai"' in in_database()["W009"]
    use_urls(settings, chat, Chat.as_view())
    assert in_database() == {}


def test_urls_that_cannot_be_read_are_djangos_to_report(upstream, settings):
    settings.ROOT_URLCONF = "no.such.module"
    assert in_database() == {}


def test_the_rows_are_checked_only_where_the_tables_belong(upstream, settings):
    settings.DATABASE_ROUTERS = [f"{__name__}.ElsewhereRouter"]
    assert in_database() == {}


class ElsewhereRouter:
    def allow_migrate(self, db: str, app_label: str, **hints: object) -> bool:
        return app_label != "llm_throttle"


# The page for readers


def test_every_id_is_documented_and_none_that_does_not_exist():
    root = Path(__file__).parent.parent
    source = (root / "llm_throttle" / "checks.py").read_text()
    ids = {
        f"{'E' if kind == 'error' else 'W'}{int(number):03}"
        for kind, number in re.findall(r"_(error|warning)\(\s*(\d+),", source)
    }
    page = (root / "docs" / "checks.md").read_text()
    assert set(re.findall(r"^### `llm_throttle\.([EW]\d{3})`", page, re.M)) == ids
    assert len(ids) == 17


def __getattr__(name: str) -> type:
    # Made on demand: importing a cache backend is nothing the other tests need.
    if name == "DerivedCache":
        from django_redis.cache import RedisCache

        return type("DerivedCache", (RedisCache,), {})
    raise AttributeError(name)
