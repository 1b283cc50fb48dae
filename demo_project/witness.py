"""What the provider and the store say when a run is over."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from demo_project.load_client import (
    CSRF_COOKIE,
    CSRF_TOKEN,
    SESSION_COOKIE,
    Address,
    BrokenAnswer,
    fetch,
)


@dataclass(frozen=True, slots=True)
class Witness:
    """The provider's own count."""

    address: Address

    async def reset(self) -> None:
        await get_json(self.address, "/stats/reset", method="POST")

    async def stats(self) -> dict[str, int]:
        return dict(await get_json(self.address, "/stats"))

    async def service_ms(self) -> float:
        return float((await get_json(self.address, "/stats/service"))["mean_ms"])


async def left(address: Address, operator: str) -> dict[str, int]:
    """What the store of the servers at *address* believes, asked by the session *operator*."""
    return dict(await get_json(address, "/left.json", session=operator))


async def get_json(address: Address, path: str, *, method: str = "GET", session: str = "") -> Any:
    headers = {
        "Cookie": f"{SESSION_COOKIE}={session}; {CSRF_COOKIE}={CSRF_TOKEN}",
        "X-CSRFToken": CSRF_TOKEN,
    }
    answer = await fetch(address, method, path, headers=headers)
    if answer.status != 200:
        raise BrokenAnswer(f"{path} answered {answer.status} {answer.error or ''}")
    return json.loads(answer.body)
