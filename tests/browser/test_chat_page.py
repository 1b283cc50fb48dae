"""The demo's chat page, as people of four tiers see it while they share one slot."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from datetime import datetime

import pytest
import pytest_asyncio
import websockets
from playwright.async_api import Locator, Page, expect
from websockets.exceptions import InvalidStatus

from demo_project.stack import Setup, Stack

from .conftest import OpenPage
from .people import (
    NEXT,
    SECOND,
    Enter,
    Person,
    door,
    empty_room,
    enter,
    running,
    set_wait_budgets,
    store,
)

__all__ = ["door", "empty_room", "enter"]  # fixtures

TRANSPORTS = ("sse", "socket")


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def stack() -> AsyncIterator[Stack]:
    """Two workers, one slot. The first words of a reply come after 0.15 s, the last after 0.6."""
    async with running(Setup(capacity=1, service=0.6, users=2, guests=2)) as stack:
        # On a slow machine the seeds' 12 and 8 s are over before four had a turn.
        await set_wait_budgets(stack, free=40, guest=40)
        yield stack


@pytest_asyncio.fixture(loop_scope="package")
async def holder(enter: Enter) -> Person:
    """Somebody who can take the one slot."""
    return await enter("premium", 2)


# The line


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_four_tiers_wait_move_and_are_replied_to_on_the_same_page(
    stack: Stack, enter: Enter, holder: Person, transport: str
) -> None:
    people = [await enter(tier) for tier in ("premium", "pro", "free", "guest")]
    for person in people:
        await person.choose(transport)
    await holder.take_the_slot()
    lengths = [2, None, None, None]  # the first one's is long enough to see who is next
    seconds = await asyncio.gather(*map(Person.place_after, people, lengths))
    assert max(seconds) < 1.0
    for person in people:
        await person.sees_place(f"You are next in the {person.name} line")
        await expect(person.talk.locator("[data-slot=eta]")).to_have_text(re.compile("s|moment"))
    premium = people[0]
    await premium.start_another()
    await premium.ask("And one more thing")
    await premium.sees_place("You are 2nd in the premium line")

    await holder.stop()
    await asyncio.gather(premium.sees_place(NEXT, 40), *(be_served(one) for one in people))
    assert (await store(stack))["waiting"] == 0


async def be_served(person: Person) -> None:
    """Wait for the whole reply, on the same page."""
    await person.sees_whole_reply(40)


async def test_a_place_moves_when_somebody_ahead_gives_up(enter: Enter, holder: Person) -> None:
    first, second = await enter("free"), await enter("free", 1)
    await holder.take_the_slot()
    await first.ask()
    await first.sees_place(NEXT)
    await second.ask()
    await second.sees_place("You are 2nd in the free line")
    await first.stop()
    await second.sees_place(NEXT)


async def test_the_bar_moves_and_never_goes_back(enter: Enter, holder: Person) -> None:
    person = await enter("pro")
    await holder.take_the_slot()
    await person.ask()
    await person.sees_place(NEXT)
    widths = []
    for _ in range(8):
        widths.append(
            await person.page.evaluate(
                "document.querySelector('.fill').getBoundingClientRect().width"
            )
        )
        await asyncio.sleep(0.2)
    assert widths == sorted(widths)
    assert widths[-1] > widths[0]


# Giving up


@pytest.mark.parametrize(("transport", "by"), [("sse", "button"), ("socket", "Escape")])
async def test_cancelling_leaves_the_line_at_once(
    stack: Stack, enter: Enter, holder: Person, transport: str, by: str
) -> None:
    person = await enter("pro")
    await person.choose(transport)
    await holder.take_the_slot()
    await person.ask()
    await person.sees_place(NEXT)
    await (person.stop() if by == "button" else person.page.keyboard.press("Escape"))
    await expect(person.talk.locator(".cancelled")).to_contain_text("Cancelled.")
    await expect(person.page.locator("#message")).to_be_focused()
    cancelled_at = time.monotonic()
    while (await store(stack))["waiting"]:
        assert time.monotonic() - cancelled_at < 1
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_stopping_a_reply_frees_its_slot(stack: Stack, enter: Enter, transport: str) -> None:
    person = await enter("pro")
    await person.choose(transport)
    await person.ask(takes=3)
    await person.sees_reply()
    await expect(person.page.locator("#cancel")).to_have_text("Stop")
    await person.stop()
    stopped_at = time.monotonic()
    while (await store(stack))["in_flight"]:
        assert time.monotonic() - stopped_at < 1
        await asyncio.sleep(0.05)


# Refusals


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_refusal_says_why_and_counts_down_to_a_second_try(
    enter: Enter, holder: Person, transport: str
) -> None:
    person = await enter("guest", fresh=True)
    await person.page.clock.install()  # a countdown can take many seconds
    await person.choose(transport)
    await holder.take_the_slot()
    for number in range(2):  # as many as a guest may have
        await person.ask(f"Question {number + 1}")
        await person.sees_place(re.compile("next|2nd"))
        await person.start_another()
    await person.ask("Question 3")
    await expect(person.refusal).to_contain_text("as many messages waiting and running")
    await expect(person.refusal).to_contain_text("429 user_depth")
    button = person.refusal.locator("button")
    await expect(button).to_be_disabled()
    seconds = await seconds_left(button)
    await person.page.clock.fast_forward(1 * SECOND)
    assert 0 < await seconds_left(button) < seconds
    await expect(button).to_be_disabled()
    assert (await person.page.locator("#conversations .state").all_inner_texts())[2] == "refused"
    await holder.stop()
    await person.page.click("#conversations li:first-child button")
    await person.sees_whole_reply()
    await person.page.click("#conversations li:last-child button")
    await person.page.clock.fast_forward(seconds * SECOND)
    await expect(button).to_be_enabled()
    await button.click()
    await expect(person.refusal).to_have_count(0)
    await person.sees_whole_reply()


async def seconds_left(countdown: Locator) -> int:
    return int(re.findall(r"\d+", await countdown.inner_text())[0])


async def test_who_asks_for_it_is_tried_again_by_itself(enter: Enter, holder: Person) -> None:
    person = await enter("guest", fresh=True)
    await person.page.clock.install()
    await holder.take_the_slot()
    for number in range(2):
        await person.ask(f"Question {number + 1}")
        await person.sees_place(re.compile("next|2nd"))
        await person.start_another()
    await person.page.click(".options summary")
    await person.page.check("[name=again]")
    await person.ask("Question 3")
    countdown = person.refusal.locator("[data-slot=countdown]")
    await expect(countdown).to_have_text(re.compile(r"Tried again by itself in \d+ s"))
    await holder.stop()
    states = person.page.locator("#conversations .state")
    await expect(states).to_have_text(["", "", "…"], timeout=10 * SECOND)
    await person.page.clock.fast_forward(await seconds_left(countdown) * SECOND)
    await person.sees_whole_reply()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_wait_beyond_the_budget_ends_in_a_refusal(
    stack: Stack, enter: Enter, holder: Person, transport: str
) -> None:
    await set_wait_budgets(stack, pro=3)
    person = await enter("pro")
    await person.choose(transport)
    await holder.take_the_slot()
    await person.ask()
    await person.sees_place(NEXT)
    await expect(person.talk).to_contain_text("of at most 3 s")
    await expect(person.refusal).to_contain_text("that your tier may wait", timeout=5 * SECOND)
    await expect(person.refusal.locator("button")).to_have_text(re.compile(r"again in \d+ s"))
    await set_wait_budgets(stack, pro=45)


# Coming back


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_reload_keeps_the_place(
    stack: Stack, enter: Enter, holder: Person, transport: str
) -> None:
    first, second = await enter("free"), await enter("free", 1)
    await holder.take_the_slot()
    for person in (first, second):
        await person.choose(transport)
        await person.ask(f"From {person.name}")
        await person.sees_place(re.compile("next|2nd"))
    ticket = await first.ticket()
    await first.page.reload()
    await first.sees_place(NEXT)
    assert await first.ticket() == ticket
    assert (await store(stack))["waiting"] == 2
    await holder.stop()
    await first.sees_whole_reply()
    await second.sees_whole_reply()


async def test_a_reload_keeps_the_conversations_and_what_was_said(
    enter: Enter, open_page: OpenPage
) -> None:
    person = await enter("pro")
    await person.ask("First question")
    await person.sees_whole_reply()
    reply = await person.text.inner_text()
    await person.start_another()
    await person.ask("Second question", takes=3)
    await person.sees_reply()
    await person.page.reload()
    await expect(person.talk).to_contain_text("Second question")
    await expect(person.talk.locator(".problem")).to_contain_text("broke off")
    await person.page.click("#conversations li:first-child button")
    await expect(person.text).to_have_text(reply)


async def test_a_copy_of_the_tab_takes_the_place_over(
    stack: Stack, enter: Enter, holder: Person, open_page: OpenPage
) -> None:
    person = await enter("pro")
    await holder.take_the_slot()
    await person.ask()
    await person.sees_place(NEXT)
    kept = await person.page.evaluate("Object.entries(sessionStorage)")
    copy = Person("pro", await open_page(person.page.url, person.page.context))
    await copy.page.evaluate(
        "(kept) => kept.forEach((pair) => sessionStorage.setItem(...pair))", kept
    )
    # Leaving the page saves its own state: the copy's storage is set while it is not looking.
    await copy.page.evaluate(
        """(kept) => addEventListener("pagehide", () =>
      kept.forEach((pair) => sessionStorage.setItem(...pair)))""",
        kept,
    )
    await copy.page.reload()
    await copy.sees_place(NEXT)
    await expect(person.talk).to_contain_text("goes on in another tab")
    assert (await store(stack))["waiting"] == 1


# Two conversations at once


async def test_conversations_wait_side_by_side_and_tell_where_they_stand(
    enter: Enter, holder: Person
) -> None:
    person = await enter("pro")
    await holder.take_the_slot()
    await person.ask("First question", takes=4)
    await person.sees_place(NEXT)
    await person.start_another()
    await person.ask("Second question")
    await person.sees_place("You are 2nd in the pro line")
    states = person.page.locator("#conversations .state")
    await expect(states).to_have_text(["next", "2nd"])
    assert "2nd" in await person.page.title()
    await holder.stop()
    await expect(states).to_have_text(["replying", "next"], timeout=5 * SECOND)


# For everybody


async def test_it_can_be_used_by_keyboard_alone(enter: Enter, holder: Person) -> None:
    person = await enter("pro")
    await holder.take_the_slot()
    keyboard = person.page.keyboard
    await expect(person.page.locator("#message")).to_be_focused()
    await keyboard.type("One line")
    await keyboard.press("Shift+Enter")
    await keyboard.type("another line")
    await keyboard.press("Enter")
    await person.sees_place(NEXT)
    await expect(person.talk.locator(".mine")).to_have_text("One line\nanother line")
    await expect(person.page.locator("#message")).to_be_focused()
    reached = set()
    for _ in range(16):
        await keyboard.press("Tab")
        reached.add(
            await person.page.evaluate("document.activeElement.innerText?.split('\\n')[0] ?? ''")
        )
    assert {"Cancel", "Options", "New conversation"} <= reached


async def test_screen_readers_hear_what_matters_and_no_more(enter: Enter, holder: Person) -> None:
    people = [await enter("free"), await enter("free", 1), await enter("free", 2, fresh=True)]
    await people[2].page.clock.set_fixed_time(datetime.now())
    await holder.take_the_slot()
    for person in people:
        await person.page.evaluate("""() => {
          window.told = [];
          const status = document.getElementById("status");
          new MutationObserver(() => told.push(status.textContent)).observe(
            status, { childList: true, characterData: true, subtree: true });
        }""")
        await person.ask()
        await person.sees_place(re.compile("You are"))
    await people[0].stop()
    await people[1].stop()
    await people[2].sees_place(NEXT)
    await holder.stop()
    await people[2].sees_whole_reply()
    told = await people[2].page.evaluate("told")
    assert re.match(r"You are 3rd in the free line, ", told[0])
    assert told[1] == "It is your turn."
    assert told[2].startswith("Reply: ")
    assert len(told) == 3  # two moves within 6 s are not told, nor are the tokens
    assert await people[2].talk.get_attribute("aria-live") == "off"


@pytest.mark.parametrize("width", [320, 768])
async def test_it_fits_a_phone_in_every_state(enter: Enter, holder: Person, width: int) -> None:
    person = await enter("guest", viewport={"width": width, "height": 700})
    await holder.take_the_slot()
    await fits(person.page)
    await person.ask("averylongwordwithoutanyspaces" * 6)
    await person.sees_place(NEXT)
    await fits(person.page)
    await person.start_another()
    await person.ask()
    await person.sees_place(re.compile("2nd"))
    await person.start_another()
    await person.ask()
    await expect(person.refusal).to_be_visible()
    await fits(person.page)
    await person.page.click(".options summary")
    await fits(person.page)


async def fits(page: Page) -> None:
    """Nothing to scroll sideways, and the message can be written without scrolling down."""
    wide, tall = await page.evaluate("""() => [
      document.scrollingElement.scrollWidth - innerWidth,
      document.getElementById("ask").getBoundingClientRect().bottom - innerHeight,
    ]""")
    assert wide <= 0
    assert tall <= 0


async def test_nothing_moves_for_who_wants_no_motion(enter: Enter, holder: Person) -> None:
    person = await enter("pro", reduced_motion="reduce")
    await holder.take_the_slot()
    await person.ask()
    await person.sees_place(NEXT)
    assert await person.page.evaluate("document.getAnimations().length") == 0


# Four tiers in one window


async def test_four_tiers_are_side_by_side_each_signed_in_as_itself(
    stack: Stack, enter: Enter, open_page: OpenPage
) -> None:
    page = await open_page(f"http://{stack.address[0]}:{stack.address[1]}/side-by-side/")
    for tier in ("premium", "pro", "free", "guest"):
        frame = page.frame_locator(f"iframe[title={tier}]")
        await expect(frame.locator(".allows .tier")).to_have_text(tier)
    for tier in ("premium", "guest"):
        await page.frame_locator(f"iframe[title={tier}]").locator("#message").fill("takes 100")
        await page.frame_locator(f"iframe[title={tier}]").locator("#message").press("Enter")
    frame = page.frame_locator("iframe[title=guest]")
    await expect(frame.locator("[data-slot=standing]")).to_have_text(
        "You are next in the guest line"
    )


# Other sites


async def test_pages_of_other_sites_cannot_open_a_socket(stack: Stack) -> None:
    url = f"ws://{stack.address[0]}:{stack.address[1]}/ws/chat/"
    with pytest.raises(InvalidStatus) as refused:
        async with websockets.connect(url, origin="https://elsewhere.example"):
            pass
    assert refused.value.response.status_code == 403
    async with websockets.connect(url, origin=f"http://{stack.address[0]}:{stack.address[1]}"):
        pass


# Eight tabs: browsers open six HTTP/1.1 connections to one address


async def test_of_eight_tabs_with_event_streams_two_are_told_to_wait_for_the_browser(
    enter: Enter, open_page: OpenPage
) -> None:
    tabs = await eight_tabs(enter, open_page)
    clock = tabs[0].page.context.clock
    await clock.install()
    for tab in tabs:
        await tab.ask(takes=100)
    async with asyncio.timeout(5):
        while (known := [await stands_in_line(tab) for tab in tabs]).count(True) < 6:
            await asyncio.sleep(0.05)
    held_back = [tab for tab, is_known in zip(tabs, known, strict=True) if not is_known]
    await clock.fast_forward(5 * SECOND)
    for tab in held_back:
        await expect(tab.talk).to_contain_text("six connections")
    waiting = [tab for tab in tabs if tab not in held_back]
    assert len(waiting) == 6
    for tab in waiting[-2:]:
        await tab.page.bring_to_front()  # a tab at the back draws once a second
        await tab.stop()
    for tab in held_back:
        await expect(tab.talk.locator(".facts, .line.known")).to_have_count(1, timeout=5 * SECOND)


async def test_eight_tabs_with_sockets_all_stand_in_line(enter: Enter, open_page: OpenPage) -> None:
    tabs = await eight_tabs(enter, open_page)
    for tab in tabs:
        await tab.page.bring_to_front()  # a tab at the back draws once a second
        await tab.choose("socket")
        await tab.ask(takes=100)
    for tab in tabs:
        await expect(tab.talk.locator(".facts, .line.known").first).to_be_visible()


async def eight_tabs(enter: Enter, open_page: OpenPage) -> list[Person]:
    first = await enter("premium", fresh=True)
    others = [await open_page(first.page.url, first.page.context) for _ in range(7)]
    return [first, *(Person("premium", page) for page in others)]


async def stands_in_line(tab: Person) -> bool:
    return await tab.talk.locator(".facts, .line.known").count() > 0
