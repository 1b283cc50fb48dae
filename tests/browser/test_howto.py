"""The example of docs/howto/browser_client.md, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest_asyncio
from playwright.async_api import Page, Route, expect

from .conftest import NewContext
from .fake_server import Exchange, FakeServer
from .test_client import REPLY, relay, server

__all__ = ["relay", "server"]  # fixtures

HOWTO = Path(__file__).parents[2] / "docs" / "howto" / "browser_client.md"
# What Django's templates would make of the tags.
TAGS = {
    "{% load static %}": "",
    "{% csrf_token %}": '<input type="hidden" name="csrfmiddlewaretoken" value="abc">',
    "{% url 'chat' %}": "/chat/",
    "{% static 'chat.js' %}": "/chat.js",
}


def example(language: str) -> str:
    """The first block of code in a language."""
    found = re.search(rf"```{language}\n(.*?)```", HOWTO.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    text = found[1]
    for tag, html in TAGS.items():
        text = text.replace(tag, html)
    return text


@pytest_asyncio.fixture(loop_scope="package")
async def page(server: FakeServer, new_context: NewContext) -> Page:
    page = await (await new_context()).new_page()

    async def serve(route: Route) -> None:
        language = "js" if route.request.url.endswith(".js") else "html"
        kind = {"js": "text/javascript", "html": "text/html"}[language]
        await route.fulfill(content_type=kind, body=example(language))

    for path in ("/howto/", "/chat.js"):
        await page.route(server.url + path, serve)
    await page.goto(f"{server.url}/howto/")
    return page


async def test_it_waits_reloads_cancels_and_is_replied_to(server: FakeServer, page: Page) -> None:
    async def wait(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.tell_position(3)
        await exchange.until_gone()

    server.scripts = [wait, wait, REPLY]
    await page.fill("#message", "Hello")
    await page.click("#send")
    await expect(page.locator("#status")).to_have_text("Number 3 in line, 2 to 4 s")
    assert server.exchanges[0].header("x-csrftoken") == "abc"
    await page.reload()
    await expect(page.locator("#status")).to_have_text("Number 3 in line, 2 to 4 s")
    assert server.exchanges[1].ticket == "t1"
    await page.click("#cancel")
    await expect(page.locator("#status")).to_have_text("Cancelled.")
    await page.fill("#message", "Hello")
    await page.click("#send")
    await expect(page.locator("#reply")).to_have_text("Good day")


async def test_it_counts_a_refusal_down(server: FakeServer, page: Page) -> None:
    async def refuse(exchange: Exchange) -> None:
        problem = {"reason": "queue_full", "detail": "It is full.", "retry_after": 1}
        await exchange.refuse(503, problem, retry_after="1")

    server.scripts = [refuse]
    await page.fill("#message", "Hello")
    await page.click("#send")
    await expect(page.locator("#status")).to_have_text(re.compile(r"It is full. Again in \d s."))
    await expect(page.locator("#status")).to_have_text("You can try again.")
