"""``manage.py demo``: everything at once, on loopback."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from demo_project import check, environment
from demo_project.children import ChildFailed, end_on_signals
from demo_project.load_client import BrokenAnswer, chat
from demo_project.serving import free_port, is_free
from demo_project.stack import Setup, Stack, given

DEFAULT_PORT = 8000
LOAD_ACCOUNTS = 100  # premium-1 … premium-100, and so on
WATCH_SECONDS = 0.5
CHECK_ACCOUNTS = max(check.BURST.values())


class Command(BaseCommand):
    help = (
        "Start Valkey, the simulated provider and the server, and print what to open. REDIS_URL, "
        "UPSTREAM_URL and DATABASE_URL name others to use instead; WORKERS and PORT set numbers."
    )
    requires_system_checks: list[str] = []  # noqa: RUF012 - the commands that it starts run them

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--check", action="store_true", help="send real chats, print what came back, and end"
        )
        parser.add_argument("--json", action="store_true", help="the check's report as JSON")

    def handle(self, **options: Any) -> None:
        end_on_signals()
        if options["json"] and not options["check"]:
            raise CommandError("--json goes with --check.")
        try:
            if options["check"]:
                self.check_all(as_json=options["json"])
            else:
                self.run()
        except (ChildFailed, BrokenAnswer) as error:
            raise CommandError(str(error)) from None
        except KeyboardInterrupt:
            self.say("\nStopped.")
            sys.exit(130 if options["check"] else 0)

    def say(self, text: str) -> None:
        """Progress goes to standard error, so that standard output is the result alone."""
        self.stderr.write(text, self.style.NOTICE if text.startswith("error") else None)
        self.stderr.flush()

    # The demo

    def run(self) -> None:
        setup = Setup(
            workers=number_of_workers(),
            port=self.choose_port(),
            database_url=os.environ.get("DATABASE_URL") or "sqlite:///db.sqlite3",
            users=LOAD_ACCOUNTS,
            **given(os.environ),
        )
        started = time.monotonic()
        self.say(f"Starting the store, the provider and {setup.workers} server workers …")
        with Stack(setup) as stack:
            asyncio.run(warm_up(stack))
            self.say(f"Ready after {time.monotonic() - started:.1f} s.")
            self.stdout.write(welcome(stack))
            self.stdout.flush()
            self.watch(stack)

    def choose_port(self) -> int:
        port = environment.number(os.environ, "PORT", DEFAULT_PORT)
        if is_free(port):
            return port
        if os.environ.get("PORT"):
            raise CommandError(f"Port {port} is in use. Set PORT to another one.")
        chosen = free_port(port + 1)
        self.say(f"Port {port} is in use, taking {chosen}.")
        return chosen

    def watch(self, stack: Stack) -> None:
        """Until Ctrl-C: start workers again that die, give up without the others."""
        while True:
            time.sleep(WATCH_SECONDS)
            for name in stack.restart_dead_workers():
                self.say(f"The {name} has ended; started again.")
            stack.check_helpers()

    # The check

    def check_all(self, *, as_json: bool) -> None:
        setup = Setup(
            workers=number_of_workers(),
            users=CHECK_ACCOUNTS,
            guests=check.BURST["guest"],
            service=1.0,
            **given(os.environ),
        )
        self.say("Starting a store, a provider and server workers of our own …")
        with Stack(setup) as stack:
            self.say("Chatting …")
            report = asyncio.run(check.check(stack))
        self.stdout.write(json.dumps(report.as_json(), indent=2) if as_json else report.as_text())
        if report.problems():
            sys.exit(1)


def number_of_workers() -> int:
    return environment.number(os.environ, "WORKERS", 2, high=64)


async def warm_up(stack: Stack) -> None:
    """Chat until the first token, so that nobody waits for a store that has just started."""
    if stack.provider_address is None:
        return  # a provider that is not ours may want money for it
    has_token = asyncio.Event()
    call = asyncio.create_task(
        chat(
            stack.address,
            "Hello",
            session=stack.sessions["premium"][0],
            on_event=lambda event: has_token.set(),
        )
    )
    call.add_done_callback(lambda _: has_token.set())
    await has_token.wait()
    call.cancel()


def welcome(stack: Stack) -> str:
    address = f"http://{stack.address[0]}:{stack.address[1]}"
    provider = stack.provider_url and f"  Provider  {stack.provider_url}/stats\n"
    return (
        f"\n  Chat      {address}/\n"
        f"  Admin     {address}/admin/\n"
        f"{provider}\n"
        "  Accounts  premium, pro, free and admin; the password is the name. Guests need none.\n\n"
        "Ctrl-C stops everything."
    )
