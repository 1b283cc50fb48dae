"""Make the tables, upstreams and, with ``--sessions N``, so many users who are signed in.

An upstream is ``slug:capacity:wait budget:max_hold``, or less of it; the sessions are
``session-0000`` and so on.
"""

import argparse
import os
from datetime import timedelta

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.servers.settings")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("upstreams", nargs="+")
    parser.add_argument("--sessions", type=int, default=0)
    options = parser.parse_args()
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    make_upstreams(options.upstreams)
    make_sessions(options.sessions)


def make_upstreams(names: list[str]) -> None:
    from llm_throttle.models import Tier, TierLimit, Upstream

    tier = Tier.objects.create(slug="any", is_default=True, is_anonymous=True)
    for name in names:
        slug, capacity, wait_budget, max_hold = with_defaults(name.split(":"))
        upstream = Upstream.objects.create(
            slug=slug, capacity=int(capacity), max_hold=int(max_hold)
        )
        TierLimit.objects.create(
            upstream=upstream, tier=tier, wait_budget=int(wait_budget), depth_per_user=100
        )


def with_defaults(given: list[str]) -> list[str]:
    return given + ["", "1", "3", "60"][len(given) :]


def make_sessions(count: int) -> None:
    from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
    from django.contrib.auth.models import User
    from django.contrib.sessions.backends.db import SessionStore
    from django.contrib.sessions.models import Session
    from django.utils import timezone

    users = User.objects.bulk_create(User(username=f"user-{n}") for n in range(count))
    for number, user in enumerate(users):
        signed_in = {
            SESSION_KEY: str(user.pk),
            BACKEND_SESSION_KEY: "django.contrib.auth.backends.ModelBackend",
            HASH_SESSION_KEY: user.get_session_auth_hash(),
        }
        Session.objects.create(
            session_key=f"session-{number:04}",
            session_data=SessionStore().encode(signed_in),
            expire_date=timezone.now() + timedelta(hours=1),
        )


if __name__ == "__main__":
    main()
