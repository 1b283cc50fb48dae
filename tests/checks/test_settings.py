"""Each fault of the setting with its id, and silence where nothing is wrong."""

from __future__ import annotations

import pytest

from llm_throttle.checks.settings import RULES
from llm_throttle.conf import DEFAULTS

from .found import found


def test_the_defaults_are_in_order(settings):
    assert found() == {}
    settings.LLM_THROTTLE = DEFAULTS
    assert found() == {}


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
    assert list(RULES) == list(DEFAULTS)


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
