"""One process of several that ask for slots in the same instant.

Reads a line of JSON per round: who asks, when, how long a slot is held, where the provider is.
Answers with a line of outcomes per round.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import django

from demo_project.children import end_with_parent
from demo_project.load_client import fetch

UPSTREAM = "anthropic"


async def ask(asker: dict[str, str], order: dict[str, Any]) -> str:
    """Wait for the barrier, ask, call the provider while the slot is held."""
    from llm_throttle import aadmit
    from llm_throttle.exceptions import Refused
    from llm_throttle.identity import Identity

    await asyncio.sleep(order["at"] - time.monotonic())
    message = f"I am client-{asker['flow']}. It takes {order['takes']} seconds."
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": message}]}
    try:
        async with aadmit(UPSTREAM, identity=Identity(asker["flow"], asker["tier"])):
            answer = await fetch(
                tuple(order["provider"]),
                "POST",
                "/v1/messages",
                body=json.dumps(body).encode(),
                headers={"Content-Type": "application/json"},
            )
            return f"called {answer.status}"
    except Refused as refusal:
        return refusal.reason


async def play(order: dict[str, Any]) -> list[str]:
    return list(await asyncio.gather(*(ask(asker, order) for asker in order["askers"])))


def main() -> None:
    end_with_parent()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.acceptance.settings")
    django.setup()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(asyncio.run(play(json.loads(line)))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
