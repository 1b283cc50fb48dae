"""Clients that come again and again, and clients that come once, one user each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from demo_project.load_client import Answer

from .rig import Rig


@dataclass
class Crowd:
    """What those who come again and again were answered."""

    answers: list[Answer] = field(default_factory=list)

    def refused(self, *expected: str) -> list[str]:
        """The reasons of refusals that were not to be expected."""
        refusals = (answer for answer in self.answers if answer.status not in (0, 200))
        return [answer.reason for answer in refusals if answer.reason not in expected]

    @property
    def cut_off(self) -> list[Answer]:
        """Those that began and did not come to their end."""
        return [a for a in self.answers if a.status in (0, 200) and not a.is_complete]


@asynccontextmanager
async def sustained(
    rig: Rig, clients: int, workers: Sequence[int], *, tier: str = "premium", takes: float = 1.5
) -> AsyncIterator[Crowd]:
    """So many clients at any time, over these workers, with calls of ``takes`` ± 50 % seconds."""
    crowd = Crowd()
    chance = random.Random(clients)

    async def client(user: int) -> None:
        number = user
        while True:
            number += 1
            answer = await rig.chat(
                f"{user}-{number}",
                user=user,
                tier=tier,
                worker=chance.choice(workers),
                takes=takes * chance.uniform(0.5, 1.5),
            )
            crowd.answers.append(answer)
            if answer.status != 200:  # no storm where nobody listens, or all is refused
                await asyncio.sleep(0.2)

    tasks = [asyncio.create_task(client(user)) for user in range(clients)]
    try:
        yield crowd
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
