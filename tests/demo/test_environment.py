from __future__ import annotations

from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from demo_project import environment

BASE = Path("/base")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("", "/base/db.sqlite3"),
        ("sqlite:///there/db", "/base/there/db"),
        ("sqlite:////tmp/db", "/tmp/db"),
        ("sqlite:////tmp/with%20space", "/tmp/with space"),
    ],
)
def test_sqlite_addresses(url: str, name: str) -> None:
    entry = environment.database(url, BASE)
    assert entry["ENGINE"].endswith("sqlite3")
    assert str(entry["NAME"]) == name
    assert "WAL" in entry["OPTIONS"]["init_command"]


def test_postgres_addresses() -> None:
    entry = environment.database("postgres://me:p%40ss@db.example:5433/chat", BASE)
    assert entry == {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "chat",
        "USER": "me",
        "PASSWORD": "p@ss",
        "HOST": "db.example",
        "PORT": "5433",
    }


@pytest.mark.parametrize("url", ["chat.db", "sqlite://", "mysql://db/chat", "postgres://db"])
def test_other_databases_are_refused(url: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="DATABASE_URL"):
        environment.database(url, BASE)


def test_a_password_is_not_repeated() -> None:
    with pytest.raises(ImproperlyConfigured) as caught:
        environment.database("mysql://me:secret@db/chat", BASE)
    assert "secret" not in str(caught.value)


def test_stores() -> None:
    assert environment.cache("")["LOCATION"] == environment.REDIS
    entry = environment.cache("rediss://store:6380/1", "prefix")
    assert (entry["LOCATION"], entry["KEY_PREFIX"]) == ("rediss://store:6380/1", "prefix")
    assert environment.cache("locmem://")["BACKEND"].endswith("LocMemCache")
    with pytest.raises(ImproperlyConfigured, match="REDIS_URL"):
        environment.cache("memcached://store")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("", environment.UPSTREAM),
        ("https://api.anthropic.com", "https://api.anthropic.com"),
        ("https://api.anthropic.com/", "https://api.anthropic.com"),
        ("https://api.openai.com/v1/", "https://api.openai.com"),
    ],
)
def test_upstreams_with_and_without_what_the_sdks_add(url: str, address: str) -> None:
    assert environment.upstream(url) == address


@pytest.mark.parametrize("url", ["api.anthropic.com", "ftp://files", "http://"])
def test_upstreams_that_are_no_address_are_refused(url: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="UPSTREAM_URL"):
        environment.upstream(url)


def test_numbers() -> None:
    assert environment.number({}, "WORKERS", 2) == 2
    assert environment.number({"WORKERS": ""}, "WORKERS", 2) == 2
    assert environment.number({"WORKERS": "8"}, "WORKERS", 2) == 8


@pytest.mark.parametrize("text", ["many", "0", "-1", "65536", "1.5", "²", " 2"])
def test_what_is_no_number_in_range_is_refused(text: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="PORT must be a whole number from 1 to 65535"):
        environment.number({"PORT": text}, "PORT", 8000)
