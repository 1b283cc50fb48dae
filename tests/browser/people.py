"""People at the demo's chat page: what they do there, and what they see."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from playwright.async_api import Locator, Page, expect

from demo_project.load_client import SESSION_COOKIE
from demo_project.stack import MANAGE, Setup, Stack
from demo_project.witness import left

from .conftest import NewContext, OpenPage

SECOND = 1_000  # playwright counts milliseconds
NEXT = re.compile("You are next")


@dataclass(frozen=True)
class Person:
    """Somebody with a browser of their own."""

    name: str
    page: Page

    # What they do

    async def ask(self, message: str = "Good day") -> None:
        await self.page.fill("#message", message)
        await self.page.press("#message", "Enter")

    async def take_the_slot(self) -> None:
        """Have a reply stream, so that all who come now must wait."""
        await self.ask("Something long")
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

    async def place_after(self) -> float:
        """Seconds from sending a message to the first position on the page."""
        return await self.page.evaluate("""() => new Promise((resolve) => {
          const from = performance.now();
          const look = () => {
            const seconds = (performance.now() - from) / 1000;
            const isThere = document.querySelector(".talk:not([hidden]) .line.known");
            isThere || seconds > 9 ? resolve(seconds) : setTimeout(look, 5);
          };
          document.getElementById("message").value = "Good day";
          document.getElementById("ask").requestSubmit();
          look();
        })""")

    async def granted_ticket(self) -> str:
        return await self.talk.locator(".facts code").get_attribute("title") or ""

    async def ticket(self) -> str:
        """The one that the tab would come back with."""
        return await self.page.evaluate("""() => {
          const key = Object.keys(sessionStorage).find((key) => key.startsWith("llm-throttle:"));
          return key ? JSON.parse(sessionStorage.getItem(key)).ticket : "";
        }""")


@contextmanager
def running(setup: Setup) -> Iterator[Stack]:
    """The demo's processes; they have settings of their own, not the test run's."""
    stack = Stack(setup)
    stack.environ.pop("DJANGO_SETTINGS_MODULE", None)
    with stack:
        yield stack


Enter = Callable[..., Awaitable[Person]]


def enter_by(stack: Stack, open_page: OpenPage, new_context: NewContext) -> Enter:
    """Let somebody in: the *number*-th account of a tier, with a browser of their own."""
    host, port = stack.address

    async def enter(tier: str, number: int = 0, **options: object) -> Person:
        context = await new_context(**options)
        session = stack.sessions[tier][number]
        cookie = {"name": SESSION_COOKIE, "value": session, "domain": host, "path": "/"}
        await context.add_cookies([cookie])
        person = Person(tier, await open_page(f"http://{host}:{port}/", context))
        await expect(person.page.locator("#conversations li")).to_have_count(1)
        return person

    return enter


EDIT = """
from llm_throttle.models import TierLimit
limit = TierLimit.objects.get(tier__slug={tier!r})
limit.wait_budget = {seconds}
limit.save()
"""


async def set_wait_budget(stack: Stack, tier: str, seconds: int) -> None:
    """Edit the policy as an operator does; it binds at the next decision."""
    script = EDIT.format(tier=tier, seconds=seconds)
    command = [sys.executable, MANAGE, "shell", "-v", "0", "-c", script]
    process = await asyncio.create_subprocess_exec(*command, env=stack.environ)
    assert await process.wait() == 0


async def store(stack: Stack) -> dict[str, int]:
    """What the store believes: in_flight and waiting."""
    return await left(stack.address, stack.sessions["admin"][0])
