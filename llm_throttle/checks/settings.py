"""The setting: its keys, their values, and whether those fit together."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, register
from django.core.exceptions import ImproperlyConfigured

from llm_throttle.conf import DEFAULTS, SETTING
from llm_throttle.identity import resolver_for

from .findings import TAG, error, warning

BEATS_PER_TTL = 4
"""A worker is suspect after 2 silent beats; it must have time to come back before it is dead."""

SAFE_RECOVERY_WINDOW = 1.5
"""Seconds: shorter than this and a worker that is only late could be left out of the count."""

LONGEST = 3600.0
"""Seconds. A setting above an hour is more likely meant as milliseconds."""


# What a value must be


Rule = tuple[Callable[[Any], bool], str]


def _whole(low: int, high: int) -> Rule:
    def fits(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    return fits, f"a whole number from {low} to {high}"


def _seconds(low: float) -> Rule:
    def fits(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and low <= value <= LONGEST

    return fits, f"a number of seconds from {low:g} to {LONGEST:g}"


def _one_of(*names: str) -> Rule:
    return (lambda value: value in names), "one of " + ", ".join(repr(name) for name in names)


def _or_none(rule: Rule) -> Rule:
    fits, words = rule
    return (lambda value: value is None or fits(value)), f"None or {words}"


TEXT: Rule = (lambda value: isinstance(value, str) and value != ""), "a string that is not empty"
YES_OR_NO: Rule = (lambda value: isinstance(value, bool)), "True or False"

RULES: dict[str, Rule] = {
    "CACHE": TEXT,
    "TIER_RESOLVER": TEXT,
    "FLOW_RESOLVER": TEXT,
    "TRUSTED_PROXIES": _whole(0, 32),
    "ON_BACKEND_DOWN": _one_of("local", "reject", "open"),
    "WORKER_TTL": _seconds(0.1),
    "BEAT": _seconds(0.01),
    "RECOVERY_WINDOW": _seconds(0),
    "POLICY_MAX_AGE": _seconds(0.1),
    "CONNECT_TIMEOUT": _seconds(0.01),
    "SOCKET_TIMEOUT": _seconds(0.01),
    "BREAKER_INTERVAL": _seconds(0.01),
    "START_GRACE": _seconds(0.01),
    "IDLE_STREAM": _seconds(0.01),
    "SYNC_WAITERS": _or_none(_whole(0, 100_000)),
    "KEEP_ALIVE": _seconds(0.01),
    "PUSH_INTERVAL": _seconds(0.01),
    "RETRY_AFTER_MAX": _whole(1, 3600),
    "RETRY_AFTER_DEFAULT": _whole(1, 3600),
    "RETRY_AFTER_PAUSED": _whole(1, 3600),
    "SHOW_USERS": YES_OR_NO,
    "METRICS_TOKEN": _or_none(TEXT),
}


# What the project says


def _given() -> Any:
    return getattr(django_settings, SETTING, None) or {}


def _is_readable() -> bool:
    return isinstance(_given(), Mapping)


def value_of(name: str) -> Any:
    """A setting's value, None where E001 or E003 has said already that it cannot be used."""
    if not _is_readable():
        return None
    value = _given().get(name, DEFAULTS[name])
    return value if _fits(name, value) else None


def _fits(name: str, value: Any) -> bool:
    return RULES[name][0](value)


# The checks


@register(TAG)
def check_settings(**kwargs: Any) -> list[CheckMessage]:
    """The setting is a dictionary with known keys and values within their ranges."""
    if not _is_readable():
        return [error(1, f"{SETTING} is not a dictionary.", f'Write {SETTING} = {{"KEY": value}}.')]
    unknown = [_unknown(str(name)) for name in _given() if name not in DEFAULTS]
    wrong = [
        error(
            3,
            f'{SETTING}["{name}"] is {value!r}; it must be {RULES[name][1]}.',
            f"Leave it out to get the default, {DEFAULTS[name]!r}.",
        )
        for name, value in _given().items()
        if name in DEFAULTS and not _fits(name, value)
    ]
    return [*unknown, *wrong]


def _unknown(name: str) -> Error:
    near = difflib.get_close_matches(name.upper(), DEFAULTS, n=1, cutoff=0.5)
    hint = f'Did you mean "{near[0]}"?' if near else f"Known keys: {', '.join(DEFAULTS)}."
    return error(2, f'{SETTING} has an unknown key "{name}".', hint)


@register(TAG)
def check_times(**kwargs: Any) -> list[CheckMessage]:
    """The times fit together."""
    return [*_check_recovery_window(), *_check_worker_ttl()]


def _check_recovery_window() -> Iterator[CheckMessage]:
    window = value_of("RECOVERY_WINDOW")
    if window is None or window >= SAFE_RECOVERY_WINDOW:
        return
    if window == 0:
        yield warning(
            4,
            f'{SETTING}["RECOVERY_WINDOW"] is 0: after a restart of the store the capacity '
            "may be exceeded.",
            f"0 is for unit tests. Use {SAFE_RECOVERY_WINDOW} or more everywhere else.",
        )
    else:
        yield error(
            7,
            f'{SETTING}["RECOVERY_WINDOW"] is {window}, too short for every worker to report '
            "what it holds.",
            f"Use {SAFE_RECOVERY_WINDOW} seconds or more.",
        )


def _check_worker_ttl() -> Iterator[CheckMessage]:
    ttl, beat = value_of("WORKER_TTL"), value_of("BEAT")
    if ttl is None or beat is None or ttl >= BEATS_PER_TTL * beat:
        return
    yield error(
        8,
        f'{SETTING}["WORKER_TTL"] is {ttl} with a BEAT of {beat}: a worker that is late for a '
        "moment would count as dead and lose its slots.",
        f"Make WORKER_TTL at least {BEATS_PER_TTL} beats ({BEATS_PER_TTL * beat:g} seconds).",
    )


@register(TAG)
def check_resolvers(**kwargs: Any) -> list[CheckMessage]:
    """Both resolvers can be imported and called."""
    return [wrong for name in ("TIER_RESOLVER", "FLOW_RESOLVER") for wrong in _check_resolver(name)]


def _check_resolver(name: str) -> Iterator[CheckMessage]:
    if value_of(name) is None:
        return
    try:
        resolver_for(name)
    except ImproperlyConfigured as wrong:
        yield error(6, str(wrong), "Name a callable that takes a Caller and returns a string.")
