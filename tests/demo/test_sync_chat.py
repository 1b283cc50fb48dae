"""The chat by a sync view and by REST framework, with the SDKs' sync clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.test import AsyncClient
from rest_framework.authtoken.models import Token

from demo_project import sync_chat
from demo_project.seeds import UPSTREAM
from llm_throttle.admission import snapshot
from tests.waiting_room import eventually

from .conftest import StartProvider
from .test_chat import demo_settings, events, running

__all__ = ["demo_settings", "running"]

PATHS = ["/chat/sync/", "/api/chat/"]
EVENTS = {"Accept": "text/event-stream"}


@pytest.fixture(autouse=True)
def close_clients() -> Iterator[None]:
    yield
    for make in (sync_chat.anthropic, sync_chat.openai):
        make.cache_clear()


async def ask(path: str, body: Any, *, client: AsyncClient | None = None, **headers: str) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await (client or AsyncClient()).post(
        path, content, content_type="application/json", headers=headers
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sdk", ["anthropic", "openai"])
async def test_a_reply_streams_through_each_sdk(running: Any, path: str, sdk: str) -> None:
    response = await ask(path, {"message": "Hello", "sdk": sdk}, **EVENTS)
    assert response.status_code == 200
    assert response.is_async, "chunk by chunk, also under ASGI"
    *tokens, end = await events(response)
    assert "".join(token["text"] for token in tokens)
    assert end == {"type": "done"}
    assert response["X-LLM-Throttle-Tier"] == "guest"
    assert running.provider.stats.served == 1
    assert await asyncio.to_thread(eventually, lambda: snapshot(UPSTREAM).in_flight == 0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sdk", ["anthropic", "openai"])
async def test_a_provider_that_refuses_ends_the_stream_with_an_error_event(
    start_provider: StartProvider, settings: Any, path: str, sdk: str
) -> None:
    settings.UPSTREAM_URL = (await start_provider(capacity=0)).url
    response = await ask(path, {"message": "Hello", "sdk": sdk})
    assert await events(response) == [{"type": "error", "detail": "The provider answered 429."}]


@pytest.mark.parametrize("path", PATHS)
async def test_a_provider_out_of_reach_ends_the_stream_with_an_error_event(
    settings: Any, path: str
) -> None:
    settings.UPSTREAM_URL = "http://127.0.0.1:9"
    response = await ask(path, {"message": "Hello"})
    assert [event["type"] for event in await events(response)] == ["error"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"half of it {", 400),
        (b"[" * 60_000, 400),
        ({"message": ""}, 400),
        (["Hello"], 400),
        ({"message": "Hello", "sdk": "cohere"}, 400),
        ({"message": "x" * 8001}, 413),
    ],
)
async def test_a_bad_prompt_costs_no_slot(path: str, body: Any, status: int) -> None:
    response = await ask(path, body)
    assert response.status_code == status
    assert response.json()["detail"]
    assert "X-LLM-Throttle-Ticket" not in response


async def test_a_token_signs_in_and_counts_more_than_the_session(running: Any) -> None:
    client = AsyncClient()
    free = await _user("free")
    await client.aforce_login(free)
    response = await ask(
        "/api/chat/", {"message": "Hello"}, client=client, Authorization="Token premium"
    )
    await events(response)
    assert response["X-LLM-Throttle-Tier"] == "premium"
    response = await ask("/api/chat/", {"message": "Hello"}, client=client)
    await events(response)
    assert response["X-LLM-Throttle-Tier"] == "free"
    response = await ask("/api/chat/", {"message": "Hello"}, Authorization="Token nonsense")
    assert response.status_code == 401


async def _user(name: str) -> Any:
    return (await Token.objects.select_related("user").aget(key=name)).user
