"""``manage.py provider``: the simulated provider alone."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from demo_project.children import end_with_parent
from demo_project.hang_up import HangUpProtocol
from demo_project.provider import Provider
from demo_project.serving import LOOPBACK, listen, serve


class Command(BaseCommand):
    help = (
        "Run a provider that speaks the Anthropic and OpenAI wire formats, answers 429 beyond its "
        "capacity, and counts: GET /stats, GET /stats/service, POST /stats/reset."
    )
    requires_system_checks: list[str] = []  # noqa: RUF012 - it judges the app, it does not use it

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--port", type=int, default=0, help="0 (the default) takes a free one")
        parser.add_argument("--capacity", type=int, default=30, help="calls at a time")
        parser.add_argument("--latency", type=float, default=1.5, help="seconds a call takes")
        parser.add_argument("--jitter", type=float, default=0.0, help="0.5 spreads them by ±50 %%")
        parser.add_argument("--seed", type=int, help="makes the spread repeatable")

    def handle(self, **options: Any) -> None:
        check_options(options)
        end_with_parent()
        provider = Provider(
            capacity=options["capacity"],
            latency=options["latency"],
            jitter=options["jitter"],
            seed=options["seed"],
        )
        try:
            listener = listen(options["port"])
        except OSError as error:
            raise CommandError(f"Port {options['port']} cannot be used: {error.strerror}") from None
        address = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
        serve(provider, listener, address, http=HangUpProtocol)


def check_options(options: dict[str, Any]) -> None:
    if options["capacity"] < 1:
        raise CommandError("--capacity must be at least 1.")
    if options["latency"] < 0:
        raise CommandError("--latency must not be negative.")
    if not 0 <= options["jitter"] <= 1:
        raise CommandError("--jitter is a share of the latency, from 0 to 1.")
    if not 0 <= options["port"] <= 65535:
        raise CommandError("--port must be between 0 and 65535.")
