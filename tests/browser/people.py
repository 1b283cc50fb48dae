"""People at the demo's chat page: what they do there, and what they see."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Locator, Page, expect

from demo_project.children import Children
from demo_project.load_client import SESSION_COOKIE
from demo_project.stack import Setup, Stack
from demo_project.witness import left
from tests.acceptance.operator import Operator
from tests.acceptance.rig import Witness

from .conftest import NewContext, OpenPage, lasting_context

SECOND = 1_000  # playwright counts milliseconds
NEXT = re.compile("You are next")


@dataclass(frozen=True)
class Person:
    """Somebody with a browser of their own."""

    name: str
    page: Page

    # What they do

    async def ask(self, message: str = "Good day", takes: float | None = None) -> None:
        await self.page.fill("#message", lasting(message, takes))
        await self.page.press("#message", "Enter")

    async def take_the_slot(self) -> None:
        """Have a reply stream, so that all who come now must wait until it is stopped."""
        await self.ask("Something long", takes=100)
        await expect(self.talk.locator(".facts")).to_be_visible()

    async def choose(self, transport: str) -> None:
        await self.page.click(".options summary")
        await self.page.select_option("[name=transport]", transport)
        await self.page.click(".options summary")

    async def stop(self) -> None:
        await self.page.click("#cancel")

    async def start_another(self) -> None:
        await self.page.click("#new")

    # What they see

    @property
    def talk(self) -> Locator:
        return self.page.locator(".talk:not([hidden])")

    @property
    def standing(self) -> Locator:
        return self.talk.locator(".line [data-slot=standing]")

    @property
    def text(self) -> Locator:
        return self.talk.locator(".text").last

    @property
    def refusal(self) -> Locator:
        return self.talk.locator(".refused")

    async def sees_place(self, place: str | re.Pattern[str], seconds: float = 3) -> None:
        await expect(self.standing).to_have_text(place, timeout=seconds * SECOND)

    async def sees_reply(self, seconds: float = 8) -> None:
        """Some of it: the first words have come."""
        await expect(self.text).to_have_text(re.compile(r"\w"), timeout=seconds * SECOND)

    async def sees_whole_reply(self, seconds: float = 12) -> None:
        await self.sees_reply(seconds)
        await expect(self.talk.locator(".streaming")).to_have_count(0, timeout=seconds * SECOND)
        await expect(self.talk.locator(".problem")).to_have_count(0)

    async def place_after(self, takes: float | None = None) -> float:
        """Seconds from sending a message to the first position on the page."""
        return await self.page.evaluate(
            """(message) => new Promise((resolve) => {
          const from = performance.now();
          const look = () => {
            const seconds = (performance.now() - from) / 1000;
            const isThere = document.querySelector(".talk:not([hidden]) .line.known");
            isThere || seconds > 9 ? resolve(seconds) : setTimeout(look, 5);
          };
          document.getElementById("message").value = message;
          document.getElementById("ask").requestSubmit();
          look();
        })""",
            lasting("Good day", takes),
        )

    async def granted_ticket(self) -> str:
        return await self.talk.locator(".facts code").get_attribute("title") or ""

    async def ticket(self) -> str:
        """The one that the tab would come back with."""
        return await self.page.evaluate("""() => {
          const key = Object.keys(sessionStorage).find((key) => key.startsWith("llm-throttle:"));
          return key ? JSON.parse(sessionStorage.getItem(key)).ticket : "";
        }""")


def lasting(message: str, takes: float | None) -> str:
    """The provider reads in a message how many seconds its call takes."""
    return message if takes is None else f"{message}, takes {takes}"


@asynccontextmanager
async def running(setup: Setup, **throttle: float) -> AsyncIterator[Stack]:
    """The demo's processes, with a provider whose calls take as long as their messages say."""
    with Children() as children:
        provider = children.start(
            "provider", "-m", "tests.acceptance.provider", environ=dict(os.environ)
        )
        url = provider.wait_until_ready()
        await Witness(url).set(capacity=setup.capacity, latency=setup.service)
        stack = Stack(replace(setup, upstream_url=url))
        stack.environ |= {
            "DJANGO_SETTINGS_MODULE": "tests.browser.settings",
            "BROWSER_THROTTLE": json.dumps(throttle),
        }
        with stack:
            yield stack


Enter = Callable[..., Awaitable[Person]]


class Door:
    """Lets people in: each has a browser of their own, which stays for the tests to come."""

    def __init__(self, stack: Stack, browser: Browser) -> None:
        self.stack = stack
        self.browser = browser
        self.contexts: dict[str, BrowserContext] = {}

    async def close(self) -> None:
        for context in self.contexts.values():
            await context.close()

    def enter_by(self, open_page: OpenPage, new_context: NewContext) -> Enter:
        """Let somebody in as the *number*-th account of a tier.

        With *fresh*, or with options, by a browser that is for this test alone.
        """
        host, port = self.stack.address

        async def enter(
            tier: str, number: int = 0, *, fresh: bool = False, **options: object
        ) -> Person:
            session = self.stack.sessions[tier][number]
            if fresh or options:
                context = await new_context(**options)
            elif session not in self.contexts:
                context = self.contexts[session] = await lasting_context(self.browser)
            else:
                context = self.contexts[session]
            cookie = {"name": SESSION_COOKIE, "value": session, "domain": host, "path": "/"}
            await context.add_cookies([cookie])
            person = Person(tier, await open_page(f"http://{host}:{port}/", context))
            await expect(person.page.locator("#conversations li")).to_have_count(1)
            return person

        return enter


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def door(stack: Stack, browser: Browser) -> AsyncIterator[Door]:
    """Into the ``stack`` of a module."""
    door = Door(stack, browser)
    yield door
    await door.close()


@pytest_asyncio.fixture(loop_scope="package")
async def empty_room(stack: Stack) -> AsyncIterator[None]:
    """Nothing is left once the tabs are closed; the next test begins with nobody there."""
    yield
    for _ in range(30):
        now = await store(stack)
        if not any(now.values()):
            return
        await asyncio.sleep(0.1)
    assert now == {"in_flight": 0, "waiting": 0}


@pytest_asyncio.fixture(loop_scope="package")
async def enter(
    door: Door, empty_room: None, open_page: OpenPage, new_context: NewContext
) -> Enter:
    return door.enter_by(open_page, new_context)


async def set_wait_budgets(stack: Stack, **seconds: int) -> None:
    """Edit the policy of some tiers as an operator does; it binds at the next decision."""
    operator = Operator(stack.address)
    await operator.log_in()
    await operator.edit(tiers={tier: {"wait_budget": value} for tier, value in seconds.items()})


async def store(stack: Stack) -> dict[str, int]:
    """What the store believes: in_flight and waiting."""
    return await left(stack.address, stack.sessions["admin"][0])
