"""One Chromium for all tests in a browser, and pages that report what went wrong in them."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Page, async_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FLAGS = [
    "--headless=new",
    "--no-sandbox",  # the tests may run as root, in a container
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ADVICE = "No Chromium found: install one (Debian: apt-get install chromium) or set CHROMIUM."

# What a browser writes where a server is away or refuses, which is what the tests are about.
EXPECTED = ("Failed to load resource", "WebSocket connection to", "ERR_INCOMPLETE_CHUNKED")

OpenPage = Callable[..., Awaitable[Page]]
NewContext = Callable[..., Awaitable[BrowserContext]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One event loop for all tests here: the browser lives in it."""
    for item in items:
        if item.path.is_relative_to(os.path.dirname(__file__)):
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.asyncio(loop_scope="package"), append=False)


def find_chromium() -> str | None:
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def browser() -> AsyncIterator[Browser]:
    path = find_chromium()
    if path is None and os.environ.get("CI") == "true":
        pytest.fail(ADVICE)  # a run that decides something must not skip them quietly
    if path is None:
        pytest.skip(ADVICE)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="package")
async def new_context(browser: Browser) -> AsyncIterator[NewContext]:
    """Browsers of different people: nothing is shared between two contexts."""
    contexts: list[BrowserContext] = []

    async def make(**options: object) -> BrowserContext:
        contexts.append(await browser.new_context(**options))
        return contexts[-1]

    yield make
    for context in contexts:
        await context.close()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def shared_context(browser: Browser) -> AsyncIterator[BrowserContext]:
    """For pages that keep all that they know in their tab."""
    context = await lasting_context(browser)
    yield context
    await context.close()


async def lasting_context(browser: Browser) -> BrowserContext:
    """One with a window that stays: a tab more costs half of what a new window does."""
    context = await browser.new_context()
    await context.new_page()
    return context


@pytest_asyncio.fixture(loop_scope="package")
async def open_page(
    new_context: NewContext,
) -> AsyncIterator[OpenPage]:
    """Open an address in a context of its own; errors in the page's scripts fail the test."""
    problems: list[str] = []
    pages: list[Page] = []

    def note(message: ConsoleMessage) -> None:
        if message.type == "error" and not any(text in message.text for text in EXPECTED):
            problems.append(message.text)

    async def open_it(url: str, context: BrowserContext | None = None, **options: object) -> Page:
        page = await (context or await new_context(**options)).new_page()
        pages.append(page)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", note)
        await page.goto(url)
        return page

    yield open_it
    for page in pages:
        await page.close()
    assert problems == []
