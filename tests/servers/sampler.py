"""One process of many: asks for a slot again and again, and prints each change of the answer.

``python -m tests.servers.sampler thread|loop|celery``: a web worker, a consumer's event loop, a
task's worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.servers.settings")
EVERY = 0.1


def ask() -> str:
    from llm_throttle import admit
    from llm_throttle.exceptions import Refused
    from llm_throttle.identity import Identity

    try:
        with admit("many", identity=Identity(f"pid:{os.getpid()}", "any"), wait=0):
            return "granted"
    except Refused as refusal:
        return refusal.reason


def in_a_thread() -> None:
    tell(ask)


def in_a_loop() -> None:
    from llm_throttle import aadmit
    from llm_throttle.exceptions import Refused
    from llm_throttle.identity import Identity

    async def aask() -> str:
        try:
            async with aadmit("many", identity=Identity(f"pid:{os.getpid()}", "any"), wait=0):
                return "granted"
        except Refused as refusal:
            return refusal.reason

    async def run() -> None:
        last = ""
        while True:
            last = told(await aask(), last)
            await asyncio.sleep(EVERY)

    asyncio.run(run())


def in_celery() -> None:
    from celery import Celery

    app = Celery("sampler", broker="memory://")
    app.conf.task_always_eager = True
    task: Any = app.task(ask, name="ask")
    tell(lambda: str(task.delay().get()))


def tell(answer: Any) -> None:
    last = ""
    while True:
        last = told(answer(), last)
        time.sleep(EVERY)


def told(answer: str, last: str) -> str:
    if answer != last:
        sys.stdout.write(json.dumps([time.monotonic(), answer]) + "\n")
        sys.stdout.flush()
    return answer


if __name__ == "__main__":
    django.setup()
    {"thread": in_a_thread, "loop": in_a_loop, "celery": in_celery}[sys.argv[1]]()
