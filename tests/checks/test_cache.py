"""Each fault of the cache alias with its id."""

from __future__ import annotations

import pytest

from .found import REDIS, found

LOCMEM = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}
DUMMY = {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}


class TiedCache:
    """A backend derived from nothing that we know."""


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


def test_W001_a_cache_of_one_process_in_production(settings):
    settings.CACHES = {"default": LOCMEM}
    assert set(found()) == {"W001"}
    settings.DEBUG = True
    assert found() == {}
    assert set(found(include_deployment_checks=True)) == {"W001"}


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


def __getattr__(name: str) -> type:
    # Made on demand: importing a cache backend is nothing the other tests need.
    if name == "DerivedCache":
        from django_redis.cache import RedisCache

        return type("DerivedCache", (RedisCache,), {})
    raise AttributeError(name)
