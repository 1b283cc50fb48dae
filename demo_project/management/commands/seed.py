"""``manage.py seed``: the demo's policy, accounts and, for load tests, sessions."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management import call_command
from django.core.management.base import BaseCommand

from demo_project import seeds
from demo_project.sessions import guest_sessions, sessions_of
from llm_throttle.checks import TAG


class Command(BaseCommand):
    help = "Create what is missing of the demo's upstream, tiers, groups and accounts."
    # Not those of the URLs: they import the SDKs, which takes longer than all the rest.
    requires_system_checks = [TAG]  # noqa: RUF012 - as Django has it

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--users", type=int, default=0, help="this many accounts more per tier: premium-1, …"
        )
        parser.add_argument(
            "--capacity", type=int, default=seeds.CAPACITY, help="of a new upstream"
        )
        parser.add_argument("--migrate", action="store_true", help="create the tables first")
        parser.add_argument(
            "--sessions",
            type=int,
            metavar="GUESTS",
            help="sign all accounts in and print their session keys as JSON, with so many guests'",
        )

    def handle(self, **options: Any) -> None:
        if options["migrate"]:
            call_command("migrate", verbosity=0, interactive=False)
        seeds.seed(capacity=options["capacity"], users=options["users"])
        if options["sessions"] is None:
            self.stdout.write(f"Seeded the upstream {seeds.UPSTREAM} and its accounts.")
        else:
            self.stdout.write(json.dumps(self._sessions(options["users"], options["sessions"])))

    def _sessions(self, users: int, guests: int) -> dict[str, list[str]]:
        """Session keys by tier, with the operator's under “admin”."""
        names = {
            tier: [tier, *(f"{tier}-{number + 1}" for number in range(users))]
            for tier in seeds.ACCOUNTS
        }
        names["admin"] = ["admin"]
        keys = sessions_of(name for group in names.values() for name in group)
        by_tier = {tier: [keys[name] for name in group] for tier, group in names.items()}
        return {**by_tier, "guest": guest_sessions(guests)}
