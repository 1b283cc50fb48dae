"""Sessions made in advance, so that a load test measures the chat and not the log-in."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator
from datetime import timedelta

from django.conf import settings
from django.contrib.auth import (
    BACKEND_SESSION_KEY,
    HASH_SESSION_KEY,
    SESSION_KEY,
    get_user_model,
)
from django.contrib.auth.models import AbstractBaseUser
from django.contrib.sessions.backends.db import SessionStore
from django.contrib.sessions.models import Session
from django.utils import timezone
from django.utils.crypto import get_random_string

LIFETIME = timedelta(days=1)


def sessions_of(usernames: Iterable[str]) -> dict[str, str]:
    """A new session key for each of the accounts, by name."""
    users = get_user_model().objects.filter(username__in=list(usernames))
    keys = {user.get_username(): new_key() for user in users}
    Session.objects.bulk_create(
        _row(keys[user.get_username()], dict(_signed_in(user))) for user in users
    )
    return keys


def guest_sessions(count: int) -> list[str]:
    """New session keys of clients that have not signed in."""
    keys = [new_key() for _ in range(count)]
    Session.objects.bulk_create(_row(key, {}) for key in keys)
    return keys


def new_key() -> str:
    return get_random_string(32, string.ascii_lowercase + string.digits)


def _signed_in(user: AbstractBaseUser) -> Iterator[tuple[str, str]]:
    yield SESSION_KEY, str(user.pk)
    yield BACKEND_SESSION_KEY, settings.AUTHENTICATION_BACKENDS[0]
    yield HASH_SESSION_KEY, user.get_session_auth_hash()


def _row(key: str, data: dict[str, str]) -> Session:
    return Session(
        session_key=key,
        session_data=SessionStore().encode(data),
        expire_date=timezone.now() + LIFETIME,
    )
