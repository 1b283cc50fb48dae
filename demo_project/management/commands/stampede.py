"""``manage.py stampede``: a crowd against real server processes, judged by the provider's count."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import replace
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from demo_project.children import ChildFailed, end_on_signals
from demo_project.load_client import BrokenAnswer, Outcome, Plan, chat
from demo_project.seeds import TIERS
from demo_project.stack import Setup, Stack
from demo_project.stampede import ORDERS, Result, arrivals
from demo_project.witness import Witness, left

CLIENTS = {"premium": 20, "pro": 10, "free": 100, "guest": 40}
SETTLED_SECONDS = 1.0  # by then nothing may be left of the last client
WARM_UP_CALLS = 3  # per worker, so that each of them has most likely served one
GATE = "llm-throttle"
COMPARED = {
    GATE: "/chat/",
    "a semaphore per process": "/compare/semaphore/",
    "a polled counter in Redis": "/compare/counter/",
}


class Command(BaseCommand):
    help = (
        "Run a crowd of clients against server processes of our own and print, per tier, who was "
        "granted what and when. Fails if the provider's limit was passed, a client got no answer, "
        "or anything is left in the store."
    )
    requires_system_checks: list[str] = []  # noqa: RUF012 - the commands that it starts run them

    def add_arguments(self, parser: ArgumentParser) -> None:
        for tier, count in CLIENTS.items():
            parser.add_argument(f"--{tier}", type=int, default=count, help="clients of this tier")
        parser.add_argument("--order", choices=ORDERS, default=ORDERS[0], help="who comes first")
        parser.add_argument("--arrive", type=float, default=1.0, help="seconds in which all come")
        parser.add_argument("--seed", type=int, default=1, help="makes chance repeatable")
        parser.add_argument(
            "--seconds", type=float, default=0.0, help="clients come back until they are over"
        )
        parser.add_argument("--capacity", type=int, default=30, help="calls at a time")
        parser.add_argument("--service", type=float, default=1.5, help="seconds a call takes")
        parser.add_argument("--jitter", type=float, default=0.5, help="0.5 spreads them by ±50 %%")
        parser.add_argument("--workers", type=int, default=4, help="server processes")
        parser.add_argument("--backend", choices=("redis", "locmem"), default="redis")
        parser.add_argument("--compare", action="store_true", help="other gates as well")
        parser.add_argument("--json", action="store_true", help="the figures as JSON")

    def handle(self, **options: Any) -> None:
        check_options(options)
        end_on_signals()
        try:
            results = self.run(options)
        except (ChildFailed, BrokenAnswer) as error:
            raise CommandError(str(error)) from None
        except KeyboardInterrupt:
            self.stderr.write("Stopped.")
            sys.exit(130)
        self.stdout.write(as_json(results) if options["json"] else as_text(results))
        if results[0].problems():  # the other gates are here to fail
            sys.exit(1)

    def run(self, options: dict[str, Any]) -> list[Result]:
        self.stderr.write("Starting …")
        gates = COMPARED if options["compare"] else {GATE: COMPARED[GATE]}
        with Stack(setup(options)) as stack:
            asyncio.run(warm_up(stack))
            return [self.measure(stack, options, gate, path) for gate, path in gates.items()]

    def measure(self, stack: Stack, options: dict[str, Any], gate: str, path: str) -> Result:
        self.stderr.write(f"{gate}:")
        witness = witness_of(stack)
        asyncio.run(witness.reset())
        outcomes = play(replace(plan(stack, options), path=path))
        return asyncio.run(judge(stack, gate, outcomes))


def setup(options: dict[str, Any]) -> Setup:
    return Setup(
        workers=options["workers"],
        # A store that REDIS_URL names is used; the provider has to be the one that counts.
        redis_url=os.environ.get("REDIS_URL", ""),
        backend=options["backend"],
        capacity=options["capacity"],
        service=options["service"],
        jitter=options["jitter"],
        seed=options["seed"],
        users=max(options[tier.slug] for tier in TIERS if tier.signs_in),
        guests=options["guest"],
        comparisons=options["compare"],
    )


def plan(stack: Stack, options: dict[str, Any]) -> Plan:
    clients = arrivals(
        stack.sessions,
        {tier.slug: options[tier.slug] for tier in TIERS},
        order=options["order"],
        arrive=options["arrive"],
        seed=options["seed"],
    )
    return Plan(
        address=stack.address,
        clients=clients,
        seconds=options["seconds"],
        think=options["arrive"],
        seed=options["seed"],
    )


def play(plan: Plan) -> list[Outcome]:
    """The plan's outcomes, played by a process that does nothing else."""
    player = subprocess.run(
        [sys.executable, "-m", "demo_project.load_client"],
        input=plan.as_json(),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if player.returncode != 0:
        raise ChildFailed(f"The load client failed (exit code {player.returncode}).")
    return [Outcome(**outcome) for outcome in json.loads(player.stdout)]


async def warm_up(stack: Stack) -> None:
    """Let every worker serve before it is measured; a store that has just started takes seconds."""
    sessions = stack.sessions["premium"]
    count = WARM_UP_CALLS * stack.setup.workers
    await asyncio.gather(
        *(
            chat(stack.address, "Hello", session=sessions[number % len(sessions)])
            for number in range(count)
        )
    )


async def judge(stack: Stack, gate: str, outcomes: list[Outcome]) -> Result:
    await asyncio.sleep(SETTLED_SECONDS)
    witness = witness_of(stack)
    operator = stack.sessions["admin"][0]
    return Result(
        gate=gate,
        capacity=stack.setup.capacity,
        outcomes=outcomes,
        stats=await witness.stats(),
        service_ms=await witness.service_ms(),
        left=await left(stack.address, operator) if gate == GATE else {},
    )


def witness_of(stack: Stack) -> Witness:
    assert stack.provider_address is not None  # noqa: S101 - setup() names no other provider
    return Witness(stack.provider_address)


def as_json(results: list[Result]) -> str:
    first, *others = [result.as_json() for result in results]
    return json.dumps({**first, "compared": others} if others else first, indent=2)


def as_text(results: list[Result]) -> str:
    problems = results[0].problems()
    verdict = "\n".join(["Failed:", *problems]) if problems else "All as promised."
    return "\n\n".join([*(result.as_text() for result in results), verdict])


def check_options(options: dict[str, Any]) -> None:
    if options["backend"] == "locmem" and options["workers"] != 1:
        raise CommandError("--backend locmem keeps the store in one process: add --workers 1.")
    if options["backend"] == "locmem" and options["compare"]:
        raise CommandError("--compare needs a store for its counter: use --backend redis.")
    if options["workers"] < 1 or options["capacity"] < 1:
        raise CommandError("--workers and --capacity must be at least 1.")
    if min(options[tier.slug] for tier in TIERS) < 0:
        raise CommandError("There cannot be fewer than 0 clients of a tier.")
    if not 0 <= options["jitter"] <= 1 or options["service"] < 0 or options["arrive"] < 0:
        raise CommandError("--jitter goes from 0 to 1; --service and --arrive are not negative.")
