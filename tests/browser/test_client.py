"""``client.js`` in a real browser, against a server that says what the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import BrowserContext, Page

from .conftest import OpenPage
from .fake_server import NOBODY, Break, Exchange, FakeServer, Relay, Script, running

TRANSPORTS = ("sse", "socket")


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def relay() -> AsyncIterator[Relay]:
    async with running(Relay()) as relay:
        yield relay


@pytest.fixture
def server(relay: Relay) -> FakeServer:
    return relay.replace()


@pytest_asyncio.fixture(loop_scope="package")
async def page(server: FakeServer, open_page: OpenPage, shared_context: BrowserContext) -> Page:
    page = await open_page(server.url, shared_context)
    await page.wait_for_selector("html[data-ready]", state="attached")
    return page


@pytest_asyncio.fixture(loop_scope="package")
async def clocked_page(server: FakeServer, open_page: OpenPage) -> Page:
    """In a context of its own, as a clock is the whole context's."""
    page = await open_page(server.url)
    await page.wait_for_selector("html[data-ready]", state="attached")
    await page.clock.install()
    return page


async def chat(page: Page, **options: Any) -> dict[str, Any]:
    """One whole chat; its outcome."""
    return await page.evaluate("(options) => chat(options)", options)


async def start(page: Page, **options: Any) -> None:
    await page.evaluate("(options) => void chat(options)", options)


async def heard(page: Page, name: str) -> list[Any]:
    found = await page.evaluate("heard")
    return [entry["value"] for entry in found if entry["name"] == name]


async def wait_for(page: Page, name: str, count: int = 1) -> list[Any]:
    """Wait until a callback has been called so often, or fail."""
    await page.wait_for_function(
        "([name, count]) => heard.filter((entry) => entry.name === name).length >= count",
        arg=[name, count],
        timeout=8_000,
    )
    return await heard(page, name)


def say(*messages: dict[str, Any]) -> Script:
    """A script that opens the stream and says all at once."""

    async def script(exchange: Exchange) -> None:
        await open_stream(exchange)
        for message in messages:
            await exchange.say(message["type"], **{k: v for k, v in message.items() if k != "type"})

    return script


async def open_stream(exchange: Exchange) -> None:
    if exchange.scope["type"] == "http":
        await exchange.start()


async def wait_in_line(exchange: Exchange) -> None:
    await open_stream(exchange)
    await exchange.tell_position(3)
    await exchange.until_gone()


async def break_off_in_line(exchange: Exchange) -> None:
    await open_stream(exchange)
    await exchange.tell_position(3)
    await asyncio.sleep(0.05)
    await cut(exchange)


async def cut(exchange: Exchange) -> None:
    """What a killed worker looks like from outside."""
    if exchange.scope["type"] == "websocket":
        await exchange.send({"type": "websocket.close", "code": 1011})
    raise Break


REPLY = say(
    {"type": "granted", "ticket": "t1", "tier": "gold"},
    {"type": "token", "text": "Good "},
    {"type": "token", "text": "day"},
    {"type": "done"},
)


# The course of a chat


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_chat_waits_is_let_in_and_streams(
    server: FakeServer, page: Page, transport: str
) -> None:
    async def script(exchange: Exchange) -> None:
        await open_stream(exchange)
        await exchange.tell_position(2)
        await exchange.tell_position(1, eta=None)
        await exchange.say("granted", ticket="t1", tier="gold")
        await exchange.say("token", text="Grüß ")
        await exchange.say("token", text="Gott 👋")
        await exchange.say("done")

    server.scripts = [script]
    outcome = await chat(page, transport=transport)
    assert outcome == {"type": "done"}
    positions = await heard(page, "position")
    assert [(one["position"], one["ahead"], one["eta"]) for one in positions] == [
        (2, 1, [2, 4]),
        (1, 0, None),
    ]
    assert [grant["tier"] for grant in await heard(page, "granted")] == ["gold"]
    assert await heard(page, "token") == ["Grüß ", "Gott 👋"]
    assert len(await heard(page, "done")) == 1
    assert server.exchanges[0].body["message"] == "Hello"
    assert await page.evaluate("sessionStorage.length") == 0


async def test_a_view_without_queue_events_is_understood_by_its_headers(
    server: FakeServer, page: Page
) -> None:
    async def script(exchange: Exchange) -> None:
        facts = {"x_llm_throttle_ticket": "t9", "x_llm_throttle_tier": "gold"}
        await exchange.start(x_llm_throttle_waited_ms="1200", **facts)
        await exchange.write('data: {"type": "token", "text": "Hi"}\n\ndata: {"type": "done"}\n\n')

    server.scripts = [script]
    assert (await chat(page))["type"] == "done"
    assert await heard(page, "granted") == [{"ticket": "t9", "tier": "gold", "waitedMs": 1200}]


async def test_events_of_another_format_are_passed_on_and_end_with_the_stream(
    server: FakeServer, page: Page
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.tell_position(1)
        await exchange.write('event: content_block_delta\ndata: {"delta": "Hi"}\n\n')

    server.scripts = [script]
    assert (await chat(page))["type"] == "done"
    assert await heard(page, "event") == [
        {"event": "content_block_delta", "data": '{"delta": "Hi"}'}
    ]


async def test_a_body_of_plain_text_is_the_reply(server: FakeServer, page: Page) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start(content_type="text/plain; charset=utf-8")
        await exchange.write("Grüß".encode()[:3])
        await asyncio.sleep(0.05)
        await exchange.write("Grüß".encode()[3:])

    server.scripts = [script]
    assert (await chat(page))["type"] == "done"
    assert "".join(await heard(page, "token")) == "Grüß"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_cancelling_ends_the_connection_at_once_and_forgets_the_place(
    server: FakeServer, page: Page, transport: str
) -> None:
    server.scripts = [wait_in_line]
    await start(page, transport=transport)
    await wait_for(page, "position")
    await page.evaluate("cancel()")
    assert await wait_for(page, "outcome") == [{"type": "cancelled"}]
    await asyncio.wait_for(server.exchanges[0].is_gone.wait(), 1)
    assert await page.evaluate("sessionStorage.length") == 0
    if transport == "socket":
        assert server.exchanges[0].said == [{"type": "cancel"}]


async def test_cancelled_before_it_began_nothing_is_sent(server: FakeServer, page: Page) -> None:
    server.scripts = [wait_in_line]
    outcome = await page.evaluate("chat({ signal: AbortSignal.abort() })")
    assert outcome == {"type": "cancelled"}
    assert server.exchanges == []


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_second_chat_under_the_same_key_ends_the_first(
    server: FakeServer, page: Page, transport: str
) -> None:
    server.scripts = [wait_in_line]
    await start(page, transport=transport)
    await wait_for(page, "position")
    await start(page, transport=transport, message="Another")
    await wait_for(page, "position", 2)
    await asyncio.wait_for(server.exchanges[0].is_gone.wait(), 1)
    assert not server.exchanges[1].is_gone.is_set()
    assert server.exchanges[1].ticket == ""  # another message does not take the first one's place
    assert (await page.evaluate("interruptedChat('/chat/')"))["body"] == {"message": "Another"}


async def test_chats_with_keys_of_their_own_run_side_by_side(
    server: FakeServer, page: Page
) -> None:
    server.scripts = [wait_in_line]
    await start(page, key="one")
    await start(page, key="two")
    await wait_for(page, "position", 2)
    assert not any(exchange.is_gone.is_set() for exchange in server.exchanges)


async def test_what_a_callback_throws_rejects_and_leaves_no_connection(
    server: FakeServer, page: Page
) -> None:
    server.scripts = [wait_in_line]
    error = await page.evaluate(
        "chat({ onPosition: () => { throw new TypeError('mine'); } }).catch(String)"
    )
    assert error == "TypeError: mine"
    await asyncio.wait_for(server.exchanges[0].is_gone.wait(), 1)
    await asyncio.sleep(0.6)
    assert len(server.exchanges) == 1


# Positions


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_position_never_rises_without_a_cause(
    server: FakeServer, page: Page, transport: str
) -> None:
    async def script(exchange: Exchange) -> None:
        await open_stream(exchange)
        for position in (4, 5, 2, 3):
            await exchange.tell_position(position)
        await exchange.tell_position(6, cause="edit")
        await exchange.tell_position(7)
        await exchange.say("done")

    server.scripts = [script]
    await chat(page, transport=transport)
    positions = await heard(page, "position")
    assert [one["position"] for one in positions] == [4, 4, 2, 2, 6, 6]
    assert [one["ahead"] for one in positions] == [3, 4, 1, 2, 5, 6]


# Refusals


PROBLEM = {
    "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
    "title": "Too Many Requests",
    "status": 429,
    "detail": "You already have as many requests as one user may have.",
    "reason": "user_depth",
    "upstream": "sim",
    "tier": "gold",
    "retry_after": 7,
}


async def refuse_plainly(exchange: Exchange) -> None:
    await exchange.refuse(429, PROBLEM, retry_after="7")


async def refuse_in_the_stream(exchange: Exchange) -> None:
    """As an event whose data is the problem itself, with a type of its own."""
    import json

    await exchange.start()
    await exchange.write(f"event: refused\ndata: {json.dumps(PROBLEM)}\n\n")


async def refuse_by_message(exchange: Exchange) -> None:
    await exchange.say("refused", **{k: v for k, v in PROBLEM.items() if k != "type"})


@pytest.mark.parametrize(
    ("transport", "script"),
    [("sse", refuse_plainly), ("sse", refuse_in_the_stream), ("socket", refuse_by_message)],
)
async def test_a_refusal_is_told_with_its_countdown_and_not_tried_again(
    server: FakeServer, page: Page, transport: str, script: Script
) -> None:
    server.scripts = [script]
    outcome = await chat(page, transport=transport)
    told = await heard(page, "refused")
    assert told == [outcome]
    assert outcome["type"] == "refused"
    assert outcome["reason"] == "user_depth"
    assert outcome["detail"] == PROBLEM["detail"]
    assert 7 <= outcome["retryAfter"] <= 8.75
    now = await page.evaluate("Date.now()")
    assert 6 <= (outcome["retryAt"] - now) / 1000 <= 8.75
    assert outcome["willRetry"] is False
    assert len(server.exchanges) == 1


async def test_delays_are_spread_and_never_less_than_the_server_said(
    server: FakeServer, page: Page
) -> None:
    server.scripts = [refuse_plainly]
    delays = [(await chat(page))["retryAfter"] for _ in range(12)]
    assert min(delays) >= 7
    assert len(set(delays)) > 6


@pytest.mark.parametrize(
    ("header", "least"), [({}, 5), ({"retry_after": "0"}, 1), ({"retry_after": "soon"}, 5)]
)
async def test_a_refusal_without_a_usable_delay_is_not_tried_at_once(
    server: FakeServer, page: Page, header: dict[str, str], least: int
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start(503, content_type="text/html", **header)
        await exchange.write("<h1>Service unavailable</h1>")

    server.scripts = [script]
    outcome = await chat(page)
    assert outcome["type"] == "refused"
    assert outcome["reason"] == "http_503"
    assert outcome["retryAfter"] >= least


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_refusal_is_tried_again_only_where_asked_and_after_its_delay(
    server: FakeServer, page: Page, transport: str
) -> None:
    refusal = say({"type": "refused", "reason": "queue_full", "retry_after": 1, "upstream": "sim"})
    server.scripts = [refusal, REPLY]
    outcome = await chat(page, transport=transport, retries=1)
    assert outcome == {"type": "done"}
    assert [refusal["willRetry"] for refusal in await heard(page, "refused")] == [True]
    found = await page.evaluate("heard")
    at = {entry["name"]: entry["at"] for entry in found}
    assert at["granted"] - at["refused"] >= 1000
    assert server.exchanges[1].ticket == ""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("status", "reason"), [(409, "moved"), (403, "foreign_ticket")])
async def test_a_ticket_that_is_somewhere_or_somebody_elses_is_not_fought_over(
    server: FakeServer, page: Page, transport: str, status: int, reason: str
) -> None:
    lost = {"type": "refused", "status": status, "reason": reason, "retry_after": None}
    server.scripts = [say(lost)]
    outcome = await chat(page, transport=transport, retries=5)
    assert (outcome["type"], outcome["kind"]) == ("error", reason)
    assert len(server.exchanges) == 1
    assert await page.evaluate("sessionStorage.length") == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_server_that_stops_sends_its_waiters_to_another(
    server: FakeServer, page: Page, transport: str
) -> None:
    async def stop(exchange: Exchange) -> None:
        await open_stream(exchange)
        await exchange.tell_position(3)
        await exchange.say("refused", reason="shutting_down", status=503, retry_after=1)

    server.scripts = [stop, REPLY]
    assert await chat(page, transport=transport) == {"type": "done"}
    assert server.exchanges[1].ticket == "t1"
    assert await heard(page, "refused") == []


async def test_other_answers_are_errors_with_their_status(server: FakeServer, page: Page) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.refuse(400, {"status": 400, "detail": "“message” must be a text."})

    server.scripts = [script]
    assert await chat(page) == {
        "type": "error",
        "kind": "http",
        "detail": "“message” must be a text.",
        "status": 400,
    }


# Lost connections


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_lost_connection_in_line_is_taken_up_with_the_ticket(
    server: FakeServer, page: Page, transport: str
) -> None:
    server.scripts = [break_off_in_line, break_off_in_line, REPLY]
    outcome = await chat(page, transport=transport)
    assert outcome == {"type": "done"}
    assert [exchange.ticket for exchange in server.exchanges] == ["", "t1", "t1"]
    assert {exchange.body["message"] for exchange in server.exchanges} == {"Hello"}
    assert [loss["attempt"] for loss in await heard(page, "lost")] == [1, 1]  # it was back between
    found = await page.evaluate("heard")
    lost_at = next(entry["at"] for entry in found if entry["name"] == "lost")
    back_at = [entry["at"] for entry in found if entry["name"] == "position"][1]
    assert back_at - lost_at >= 240  # never at once


async def test_a_server_that_starts_again_behind_a_proxy_is_waited_for(
    server: FakeServer, page: Page
) -> None:
    async def bad_gateway(exchange: Exchange) -> None:
        await exchange.start(502, content_type="text/html")
        await exchange.write("<h1>Bad gateway</h1>")

    server.scripts = [break_off_in_line, bad_gateway, REPLY]
    assert await chat(page) == {"type": "done"}
    assert [loss["attempt"] for loss in await heard(page, "lost")] == [1, 2]


async def test_a_position_may_be_worse_after_coming_back(server: FakeServer, page: Page) -> None:
    async def further_back(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.tell_position(9)
        await exchange.say("done")

    server.scripts = [break_off_in_line, further_back]
    await chat(page)
    assert [one["position"] for one in await heard(page, "position")] == [3, 9]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_reply_that_breaks_off_is_not_asked_for_twice(
    server: FakeServer, page: Page, transport: str
) -> None:
    async def script(exchange: Exchange) -> None:
        await open_stream(exchange)
        await exchange.tell_position(1)
        await exchange.say("granted", ticket="t1", tier="gold")
        await exchange.say("token", text="Half a")
        await asyncio.sleep(0.05)
        await cut(exchange)

    server.scripts = [script]
    outcome = await chat(page, transport=transport)
    assert (outcome["type"], outcome["kind"]) == ("error", "broken")
    assert len(server.exchanges) == 1
    assert await page.evaluate("sessionStorage.length") == 0


async def test_a_reply_that_ends_without_an_end_broke_off(server: FakeServer, page: Page) -> None:
    server.scripts = [say({"type": "token", "text": "Half a"})]
    assert (await chat(page))["kind"] == "broken"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_server_out_of_reach_is_an_error_and_not_hammered(
    server: FakeServer, page: Page, transport: str
) -> None:
    outcome = await chat(page, transport=transport, url=f"http://{NOBODY}/")
    assert (outcome["type"], outcome["kind"]) == ("error", "lost")


async def test_after_its_patience_it_gives_up(server: FakeServer, page: Page) -> None:
    async def gone(exchange: Exchange) -> None:
        await exchange.start()
        raise Break

    server.scripts = [break_off_in_line, gone]
    outcome = await chat(page, patience=1)
    assert (outcome["type"], outcome["kind"]) == ("error", "lost")
    assert len(server.exchanges) <= 4
    assert await page.evaluate("sessionStorage.length") == 0


async def test_cancelling_between_two_tries_ends_it(server: FakeServer, page: Page) -> None:
    server.scripts = [break_off_in_line]
    await start(page)
    await wait_for(page, "lost")
    await page.evaluate("cancel()")
    assert await wait_for(page, "outcome") == [{"type": "cancelled"}]
    await asyncio.sleep(0.6)
    assert len(server.exchanges) == 1


async def test_a_connection_that_has_gone_silent_is_given_up(
    server: FakeServer, clocked_page: Page
) -> None:
    async def silent(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.tell_position(3)
        for _ in range(2):
            await asyncio.sleep(0.2)
            await exchange.write(": still here\n\n")
        await exchange.until_gone()

    server.scripts = [silent, REPLY]
    await start(clocked_page)
    await wait_for(clocked_page, "position")
    await clocked_page.clock.run_for(49_000)
    assert await heard(clocked_page, "lost") == []
    await asyncio.sleep(0.6)
    await clocked_page.clock.run_for(49_000)
    assert await heard(clocked_page, "lost") == []  # the keep-alives count
    await clocked_page.clock.run_for(10_000)
    assert await wait_for(clocked_page, "outcome") == [{"type": "done"}]
    assert server.exchanges[1].ticket == "t1"


async def test_a_request_that_the_browser_holds_back_is_told(
    server: FakeServer, clocked_page: Page
) -> None:
    async def slow(exchange: Exchange) -> None:
        await exchange.until_gone()

    server.scripts = [slow]
    await start(clocked_page)
    await clocked_page.clock.run_for(4_000)
    assert await heard(clocked_page, "stalled") == []
    await clocked_page.clock.run_for(1_500)
    assert await wait_for(clocked_page, "stalled") == [None]
    await clocked_page.evaluate("cancel()")
    await wait_for(clocked_page, "outcome")


# A reload


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_reload_finds_the_chat_and_its_place(
    server: FakeServer, page: Page, transport: str
) -> None:
    server.scripts = [wait_in_line, REPLY]
    await start(page, transport=transport, key="k")
    await wait_for(page, "position")
    await page.reload()
    await page.wait_for_selector("html[data-ready]", state="attached")
    found = await page.evaluate("interruptedChat('k')")
    assert found == {"url": "/chat/", "body": {"message": "Hello"}}
    assert await chat(page, transport=transport, key="k", **found) == {"type": "done"}
    assert server.exchanges[1].ticket == "t1"
    assert await page.evaluate("interruptedChat('k')") is None


async def test_a_tab_that_comes_back_days_later_finds_nothing(
    server: FakeServer, page: Page
) -> None:
    server.scripts = [wait_in_line]
    await start(page, key="k")
    await wait_for(page, "position")
    await page.evaluate("""() => {
      const place = JSON.parse(sessionStorage.getItem("llm-throttle:k"));
      place.seenAt -= 200_000;
      sessionStorage.setItem("llm-throttle:k", JSON.stringify(place));
    }""")
    assert await page.evaluate("interruptedChat('k')") is None


async def test_without_storage_it_works_but_a_reload_starts_again(
    server: FakeServer, page: Page
) -> None:
    server.scripts = [break_off_in_line, REPLY]
    await page.evaluate("() => { Storage.prototype.setItem = () => { throw new Error('full'); }; }")
    assert await chat(page) == {"type": "done"}
    assert [exchange.ticket for exchange in server.exchanges] == ["", "t1"]


# The event stream


def events(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"event": event, "data": data} for event, data in pairs]


STREAMS: dict[str, tuple[str, list[dict[str, str]]]] = {
    "a plain event": ("data: a\n\n", events(("message", "a"))),
    "no space after the colon": ("data:a\n\n", events(("message", "a"))),
    "one space is taken off, two are not": ("data:  a\n\n", events(("message", " a"))),
    "several lines of data": ("data: a\ndata: b\n\n", events(("message", "a\nb"))),
    "empty data": ("data\n\n", events(("message", ""))),
    "a name": ("event: token\ndata: a\n\n", events(("token", "a"))),
    "the name is for one event": (
        "event: x\ndata: a\n\ndata: b\n\n",
        events(("x", "a"), ("message", "b")),
    ),
    "a name alone is no event": ("event: x\n\ndata: b\n\n", events(("message", "b"))),
    "CRLF": ("event: x\r\ndata: a\r\ndata: b\r\n\r\n", events(("x", "a\nb"))),
    "CR": ("data: a\r\rdata: b\r\r", events(("message", "a"), ("message", "b"))),
    "a comment": (": hello\n\n", events(("", "hello"))),
    "a comment amid an event": ("data: a\n:\ndata: b\n\n", events(("", ""), ("message", "a\nb"))),
    "unknown fields": ("id: 7\nretry: 10\nfoo: x\ndata: a\n\n", events(("message", "a"))),
    "colons in the data": ("data: a: b\n\n", events(("message", "a: b"))),
    "an event cut off by the end": ("data: a\n\ndata: b\n", events(("message", "a"))),
}


def whole(text: str) -> list[str]:
    return [text]


def by_character(text: str) -> list[str]:
    return [*text]


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def parser(relay: Relay, shared_context: BrowserContext) -> AsyncIterator[Page]:
    """A page that nothing is changed in."""
    page = await shared_context.new_page()
    await page.goto(relay.url)
    await page.wait_for_selector("html[data-ready]", state="attached")
    yield page
    await page.close()


@pytest.mark.parametrize("split", [whole, by_character])
@pytest.mark.parametrize(("text", "expected"), STREAMS.values(), ids=STREAMS)
async def test_event_streams_are_read_as_the_standard_says(
    parser: Page, text: str, expected: list[dict[str, str]], split: Callable[[str], list[str]]
) -> None:
    assert await parser.evaluate("(pieces) => parse(pieces)", split(text)) == expected
