"""The client that the figures come from, against servers that behave and that do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from demo_project.load_client import (
    Address,
    Answer,
    BrokenAnswer,
    Client,
    Outcome,
    Plan,
    Player,
    chat,
    cookies,
    fetch,
    parse_event,
    sign_in,
)

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
WAITED = b"X-LLM-Throttle-Waited-Ms: 1500\r\n"
REFUSAL = (
    b'HTTP/1.1 503 Busy\r\nContent-Length: 24\r\nRetry-After: 3\r\n\r\n{"reason": "queue_full"}'
)

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Serve = Callable[[Handler | bytes], Awaitable[Address]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


HELLO = (
    SSE
    + WAITED
    + b"\r\n"
    + chunk(b'data: {"type": "token", "text": "Hel"}\n\n: keep-alive\n\ndata: {"type": "to')
    + chunk(b'ken", "text": "lo"}\n\n')
    + chunk(b'data: {"type": "done"}\n\n')
    + b"0\r\n\r\n"
)


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serve one handler, or the same bytes to everybody, and tell where."""
    servers = []

    async def start(handler: Handler | bytes) -> Address:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            if isinstance(handler, bytes):
                writer.write(handler)
            else:
                await handler(reader, writer)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        servers.append(server)
        return server.sockets[0].getsockname()

    yield start
    for server in servers:
        server.close()
        await server.wait_closed()


async def test_a_stream_is_read_event_by_event(serve: Serve) -> None:
    seen: list[dict[str, Any]] = []
    answer = await chat(await serve(HELLO), "Hi", on_event=seen.append)
    assert (answer.status, answer.text, answer.waited_ms) == (200, "Hello", 1500)
    assert answer.is_complete
    assert answer.first_token is not None
    assert answer.first_token <= answer.elapsed
    assert [event["type"] for event in seen] == ["token", "token", "done"]


async def test_a_refusal_has_its_reason(serve: Serve) -> None:
    answer = await chat(await serve(REFUSAL), "Hi")
    assert (answer.status, answer.reason, answer.headers["retry-after"]) == (503, "queue_full", "3")
    assert answer.is_complete


@pytest.mark.parametrize(
    "broken",
    [
        HELLO.removesuffix(b"0\r\n\r\n"),
        HELLO[:-40],
        SSE,
        b"",
        b"SMTP ready\r\n\r\n",
        REFUSAL[:-3],
    ],
)
async def test_an_answer_that_breaks_off_is_not_complete(serve: Serve, broken: bytes) -> None:
    answer = await chat(await serve(broken), "Hi")
    assert answer.error
    assert not answer.is_complete


async def test_a_stream_without_an_end_event_is_not_complete(serve: Serve) -> None:
    answer = await chat(await serve(HELLO.replace(b'"done"', b'"oops"')), "Hi")
    assert answer.error is None
    assert not answer.is_complete


async def test_a_server_that_is_not_there_and_one_that_is_silent(serve: Serve) -> None:
    assert (await fetch(("127.0.0.1", 9), "GET", "/")).error
    is_over = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await is_over.wait()

    answer = await fetch(await serve(wait), "GET", "/", timeout=0.05)
    assert answer.error == "TimeoutError"
    is_over.set()


async def test_a_cancelled_client_closes_its_connection_at_once(serve: Serve) -> None:
    is_connected, is_gone = asyncio.Event(), asyncio.Event()

    async def watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_connected.set()
        try:
            while await reader.read(100):
                pass
        except ConnectionResetError:
            pass
        is_gone.set()

    client = asyncio.create_task(chat(await serve(watch), "Hi"))
    await is_connected.wait()
    client.cancel()
    async with asyncio.timeout(1):
        await is_gone.wait()


def test_comments_are_no_events() -> None:
    assert parse_event(b": keep-alive") is None
    assert parse_event(b'event: position\ndata: {"type":\ndata: "x"}') == {"type": "x"}


def test_cookies_come_one_a_line() -> None:
    answer = Answer(headers={"set-cookie": "a=1; Path=/\nb=2=3; HttpOnly"})
    assert cookies(answer) == {"a": "1", "b": "2=3"}


async def test_an_account_that_cannot_sign_in_is_an_error(serve: Serve) -> None:
    page = b"HTTP/1.1 200 OK\r\nSet-Cookie: csrftoken=t\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(BrokenAnswer, match="nobody could not sign in"):
        await sign_in(await serve(page), "nobody", "nobody")


async def test_a_plan_is_played_once(serve: Serve) -> None:
    clients = [Client("free", "s", at=0.0), Client("guest", "t", at=0.01)]
    plan = Plan(await serve(HELLO), clients)
    assert Plan.from_json(plan.as_json()) == plan
    outcomes = await Player(plan).play()
    assert [outcome.tier for outcome in outcomes] == ["free", "guest"]
    assert all(outcome.is_granted and outcome.waited_ms == 1500 for outcome in outcomes)


async def test_with_a_duration_clients_come_back(serve: Serve) -> None:
    plan = Plan(await serve(HELLO), [Client("free", "s", at=0.0)], seconds=0.3, think=0.02)
    assert len(await Player(plan).play()) > 3


async def test_a_refused_client_waits_its_retry_after(serve: Serve) -> None:
    plan = Plan(await serve(REFUSAL), [Client("free", "s", at=0.0)], seconds=0.3, think=0.02)
    outcomes = await Player(plan).play()
    assert [outcome.reason for outcome in outcomes] == ["queue_full"]


def test_an_outcome_counts_the_time_until_a_refusal_as_its_wait() -> None:
    refused = Outcome.of("free", Answer(status=503, body=b'{"reason": "x"}', elapsed=0.25))
    assert (refused.is_granted, refused.reason, refused.waited_ms) == (False, "x", 250)
    lost = Outcome.of("free", Answer(error="the stream broke off"))
    assert (lost.is_answered, lost.reason) == (False, "the stream broke off")
