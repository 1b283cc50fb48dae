"""Every kind of view answers as it would without us, and holds a slot just while it runs."""

from __future__ import annotations

from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.test import AsyncClient, Client

from llm_throttle.admission import snapshot
from tests.waiting_room import eventually, is_empty

from .conftest import Complaints
from .kinds import KINDS, SEEN, SLUGS

ASKS = {
    "GET": ("get", ""),
    "POST": ("post", ""),
    "405": ("put", ""),
    "OPTIONS": ("options", ""),
    "HEAD": ("head", ""),
    "raises": ("get", "?do=raise"),
    "stream": ("get", "?do=stream"),
    "file": ("get", "?do=file"),
    "json": ("post", "?do=json"),
    "redirect": ("get", "?do=redirect"),
    "none": ("get", "?do=none"),
}


def takes_a_slot(ask: str) -> bool:
    return ask not in ("405", "OPTIONS")


def facts(response: Any, content: bytes) -> dict[str, Any]:
    """What a client sees, apart from what we add."""
    # Whose share it is depends on the cookie.
    ours = ("X-LLM-", "Vary")
    headers = {name: value for name, value in response.items() if not name.startswith(ours)}
    return {"status": response.status_code, "headers": headers, "content": content}


def judge(ask: str, bare: Any, guarded: Any, seen: list[int], marked: bool) -> None:
    assert guarded == bare, ask
    held = [1] * len(seen) if takes_a_slot(ask) else []
    assert seen == held, f"{ask}: the slot is held while the view runs, and only where it does"
    assert marked == (takes_a_slot(ask) and guarded["status"] in (200, 302)), ask
    assert eventually(is_empty), ask


def is_marked(response: Any) -> bool:
    names = ("X-LLM-Throttle-Ticket", "X-LLM-Throttle-Tier", "X-LLM-Throttle-Waited-Ms")
    found = {name in response for name in names}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume asynchronous:Warning")
def test_under_wsgi(kind: str, user: User, complaints: Complaints) -> None:
    client = Client(raise_request_exception=False)
    client.force_login(user)

    def one(prefix: str, method: str, query: str) -> Any:
        SEEN.clear()
        response = getattr(client, method)(f"/{prefix}/{SLUGS[kind]}/{query}")
        content = b"".join(response)
        response.close()
        return response, facts(response, content)

    for ask, (method, query) in ASKS.items():
        _, bare = one("bare", method, query)
        response, guarded = one("guarded", method, query)
        judge(ask, bare, guarded, SEEN, is_marked(response))
    assert not complaints


@pytest.mark.parametrize("kind", KINDS)
async def test_under_asgi(kind: str, user: User, complaints: Complaints) -> None:
    client = AsyncClient(raise_request_exception=False)
    await client.aforce_login(user)

    async def one(prefix: str, method: str, query: str) -> Any:
        SEEN.clear()
        response = await getattr(client, method)(f"/{prefix}/{SLUGS[kind]}/{query}")
        if response.streaming and response.is_async:
            content = b"".join([chunk async for chunk in response])
        else:
            content = b"".join(response)
        await sync_to_async(response.close)()
        return response, facts(response, content)

    for ask, (method, query) in ASKS.items():
        _, bare = await one("bare", method, query)
        response, guarded = await one("guarded", method, query)
        judge(ask, bare, guarded, SEEN, is_marked(response))
    assert not complaints


def test_one_guarded_action_leaves_the_others_alone(client: Client) -> None:
    assert client.get("/one-action/").json() == 0
    assert snapshot("sim").in_flight == 0
