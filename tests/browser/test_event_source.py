"""A plain ``EventSource`` at a view with ``queue_events``: what a browser does by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import uvicorn
from django.core.asgi import get_asgi_application
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.urls import path
from django.views import View
from playwright.async_api import Page

from demo_project.serving import listen
from llm_throttle import worker
from llm_throttle.admission import asnapshot
from llm_throttle.identity import Identity
from llm_throttle.scheduling.commands import SetPolicy
from llm_throttle.scheduling.policy import Policy, TierPolicy
from llm_throttle.views import ThrottledChatMixin
from tests.waiting_room import held

from .conftest import OpenPage
from .fake_server import QuietServer

TIER = TierPolicy("gold", cap=1, wait_budget_ms=20_000, queue_depth=10, depth_per_user=2)

LISTEN = """() => {
  window.heard = [];
  window.source = new EventSource("/events/");
  for (const name of ["position", "granted", "refused", "message", "error"])
    source.addEventListener(name, (event) =>
      heard.push({ name, ...JSON.parse(event.data ?? "{}"), readyState: source.readyState }));
}"""


class Events(ThrottledChatMixin, View):
    upstream = "sim"
    queue_events = True

    async def get(self, request: HttpRequest) -> StreamingHttpResponse:
        async def body() -> AsyncIterator[bytes]:
            yield b"data: {}\n\n"
            await asyncio.sleep(30)

        return StreamingHttpResponse(body(), content_type="text/event-stream")


def blank(request: HttpRequest) -> HttpResponse:
    return HttpResponse('<!doctype html><link rel="icon" href="data:,">')


urlpatterns = [path("", blank), path("events/", Events.as_view())]


@pytest.fixture
def sim(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One slot in this process; every browser is the same user."""
    settings.ROOT_URLCONF = __name__
    settings.LLM_THROTTLE = {"CACHE": "locmem", "RECOVERY_WINDOW": 0, "POLICY_MAX_AGE": 3600}
    worker.reset()
    worker.current().call("sim", SetPolicy(Policy(1, 1, (TIER,))))

    async def aidentify(caller: Any) -> Identity:
        return Identity("user:2", "gold")

    monkeypatch.setattr("llm_throttle.guards.aidentify", aidentify)
    yield
    worker.reset()


@pytest_asyncio.fixture(loop_scope="package")
async def server(sim: None) -> AsyncIterator[uvicorn.Server]:
    listener = listen(0)
    config = uvicorn.Config(get_asgi_application(), lifespan="off", log_level="critical")
    server = QuietServer(config)
    server.url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await server.is_up.wait()
    yield server
    server.should_exit = server.force_exit = True
    await task


@pytest_asyncio.fixture(loop_scope="package")
async def page(server: Any, open_page: OpenPage) -> Page:
    return await open_page(server.url)


async def hear(page: Page, name: str, count: int = 1) -> list[dict[str, Any]]:
    await page.wait_for_function(
        "([name, count]) => heard.filter((one) => one.name === name).length >= count",
        arg=[name, count],
        timeout=15_000,
    )
    return [one for one in await page.evaluate("heard") if one["name"] == name]


async def waiting() -> int:
    return (await asnapshot("sim")).waiting


async def test_a_refusal_is_an_event_in_a_good_stream(page: Page) -> None:
    """After another status than 200 a browser would never come back, and cannot say why."""
    async with held():
        await page.evaluate("[1, 2].map(() => new EventSource('/events/'))")
        while await waiting() < 2:
            await asyncio.sleep(0.02)
        await page.evaluate(LISTEN)
        refused = (await hear(page, "refused"))[0]
        assert (refused["reason"], refused["status"]) == ("user_depth", 429)
        assert refused["readyState"] == 1
        error = (await hear(page, "error"))[0]
        assert error["readyState"] == 0  # it will come back by itself
        assert refused["retry_after"] >= 1
        await asyncio.sleep(0.8)
        assert len(await hear(page, "refused")) == 1  # but not before it was told to


async def test_a_dropped_connection_is_taken_up_at_its_place(page: Page, server: Any) -> None:
    async with held():
        await page.evaluate(LISTEN)
        first = (await hear(page, "position"))[0]
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        again = (await hear(page, "position", 2))[-1]
        assert again["ticket"] == first["ticket"]
        assert again["position"] == 1
        assert await waiting() == 1  # one subscription, not two
    await hear(page, "granted")
    await hear(page, "message")
    await page.evaluate("source.close()")
