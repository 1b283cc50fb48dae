"""nginx in front of a server, with the settings that the docs name: STREAM-01, STREAM-02, WS-01.

The settings are taken from the pages to the letter; only where a time-out has to pass it is made
shorter.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from demo_project.load_client import CSRF_COOKIE, CSRF_TOKEN, fetch
from demo_project.serving import LOOPBACK
from llm_throttle.conf import DEFAULTS

from .chats import PAUSE
from .clients import (
    AT_ONCE,
    LONG,
    Place,
    holding,
    over_events,
    over_socket,
    session,
    socket,
    until,
    watching,
)
from .nginx import BARE, Front, need_nginx, nginx, settings_of
from .rig import Server, environment, request, seed, served_by

SHORT = 2
"""Seconds that a hasty front waits for the application; docs name 60, with keep-alives of 15."""

READ_TIMEOUT = re.compile(r"proxy_read_timeout (\d+)s;")
WAITING_CLIENTS, SERVERS = settings_of("waiting_clients.md"), settings_of("servers.md")
DEAF = "proxy_ignore_headers X-Accel-Buffering;"
FRONTS = {
    "nothing set": BARE,
    "waiting clients": WAITING_CLIENTS,
    "servers": SERVERS,
    "waiting clients, deaf": DEAF + WAITING_CLIENTS,
    "servers, deaf": DEAF + SERVERS,
    "nothing set, deaf": DEAF + BARE,
    "hasty": READ_TIMEOUT.sub(f"proxy_read_timeout {SHORT}s;", WAITING_CLIENTS),
}
"""A deaf one takes no advice from the application."""

AS_DOCUMENTED = ["waiting clients", "servers"]
UNBUFFERED = [name for name in FRONTS if name not in ("nothing set, deaf", "hasty")]
LINES = [f"line-{number}" for number in range(30)]
USERS = 6
HOST = "chat.example"
SEEN_AT_ONCE = {"uvicorn": ["granted"], "daphne": []}
"""What comes through at once where a proxy is left to its own ways, by the server behind it."""


@pytest.fixture(scope="module", params=SEEN_AT_ONCE)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    need_nginx()
    directory = tmp_path_factory.mktemp("nginx")
    # "app" is what nginx calls us where it is not told to pass the client's Host on.
    environ = environment(
        directory,
        SERVERS_PREFIX=f"nginx-{request.param}",
        SERVERS_HOSTS=f"{HOST},localhost,app",
    )
    lines = (f"{slug}:1:60" for slug in LINES)
    seed(environ, "--sessions", str(USERS), "pair:2:60", *lines)
    with served_by(request.param, environ, directory / "log") as server:
        yield server


@pytest.fixture(scope="module")
def fronts(server: Server) -> Iterator[dict[str, Front]]:
    with nginx(server.port, *FRONTS.values()) as fronts:
        yield dict(zip(FRONTS, fronts, strict=True))


@pytest.fixture(scope="module")
def lines(server: Server) -> Iterator[str]:
    return iter(LINES)


@pytest.fixture
def upstream(lines: Iterator[str]) -> str:
    """One slot that a test has to itself."""
    return next(lines)


def test_the_pages_keep_silence_shorter_than_the_proxys_patience() -> None:
    for page in (WAITING_CLIENTS, SERVERS):
        times = [int(seconds) for seconds in READ_TIMEOUT.findall(page)]
        assert len(times) == page.count("location")
        assert min(times) > DEFAULTS["KEEP_ALIVE"]


# Events


@pytest.mark.parametrize("name", UNBUFFERED)
async def test_events_pass_as_they_are_sent(
    server: Server, fronts: dict[str, Front], upstream: str, name: str
) -> None:
    """With compression on, in Django and in nginx, and a client that would take it."""
    async with AsyncExitStack() as stack:
        holder = await stack.enter_async_context(holding(server, upstream))
        others = []
        for user in (1, 2):
            others.append(await stack.enter_async_context(over_socket(server, upstream, user)))
            await others[-1].hears("position", ahead=user - 1)
        client = await stack.enter_async_context(over_events(fronts[name], upstream, 3, words=LONG))
        await client.hears("position", ahead=2)
        for ahead in (1, 0):
            await others[ahead].says("cancel")
            await client.hears("position", ahead=ahead)
        await holder.says("cancel")
        await client.hears("granted")
        tokens = [await client.hears("token") for _ in range(10)]
        took = tokens[-1]["heard_at"] - tokens[0]["heard_at"]
        assert took > 4 * PAUSE, "one after the other and not together"
    await until(server, upstream, in_flight=0, waiting=0, calls=0)


async def test_a_proxy_that_takes_no_advice_holds_events_back(
    server: Server, fronts: dict[str, Front], upstream: str
) -> None:
    """What the settings are for. Those of a chunked body pass; daphne sends none to HTTP/1.0."""
    async with over_events(fronts["nothing set, deaf"], upstream, 1, silence=60) as client:
        await until(server, upstream, calls=1)
        await asyncio.sleep(AT_ONCE)
        assert [event["type"] for event in client.heard[:1]] == SEEN_AT_ONCE[server.name]


@pytest.mark.parametrize("name", AS_DOCUMENTED)
async def test_a_page_of_the_site_may_post(
    fronts: dict[str, Front], upstream: str, name: str
) -> None:
    """Django compares a browser's ``Origin`` with the host that it is told it was called by."""
    cookies = f"{session(1)['Cookie']}; {CSRF_COOKIE}={CSRF_TOKEN}"
    headers = {
        "Host": HOST,
        "Origin": f"http://{HOST}",
        "Cookie": cookies,
        "X-CSRFToken": CSRF_TOKEN,
    }
    path = f"/chat/?upstream={upstream}&words=2"
    answer = await fetch((LOOPBACK, fronts[name].port), "POST", path, headers=headers)
    assert (answer.status, answer.text) == (200, "0 1 ")


# Silence


async def test_silence_outlives_the_proxys_patience(
    server: Server, fronts: dict[str, Front]
) -> None:
    """In line and during a reply, over events and a socket, and where nothing was ever said."""
    hasty = fronts["hasty"]
    silent = {"silence": SHORT + 1, "words": 2}
    async with (
        holding(server, "pair") as one,
        holding(server, "pair") as other,
        over_events(hasty, "pair", 1, **silent) as reader,
        over_socket(hasty, "pair", 2, **silent) as client,
        socket(hasty, "/ws/chat/pair/", 3) as mute,
        watching(hasty, "pair", 3) as watcher,
    ):
        for each in (reader, client):
            await each.hears("position")
        await asyncio.sleep(SHORT + 1)
        for holder in (one, other):
            await holder.says("cancel")
        for each in (reader, client):
            await each.hears("granted")
        await mute.asks()
        ticket = (await mute.hears("position"))["ticket"]
        await watcher.hears("position", ticket=ticket)
        for each in (reader, client):
            await each.hears("done", SHORT + 3)
            assert [token["text"] for token in each.all("token")] == ["0 ", "1 "]
        await mute.hears("done")


async def test_a_plain_request_is_given_up_and_leaves_the_line(
    server: Server, fronts: dict[str, Front], upstream: str
) -> None:
    """Nothing may be sent in the midst of JSON: its wait must fit into the proxy's patience."""
    async with holding(server, upstream):
        path = f"/chat/plain/?upstream={upstream}"
        async with request(fronts["hasty"], path, headers=session(1)) as connection:
            await until(server, upstream, waiting=1)
            assert (await connection.head()).status == 504
            await until(server, upstream, waiting=0, in_flight=1)


# Sockets


async def test_a_socket_goes_through(
    server: Server, fronts: dict[str, Front], upstream: str
) -> None:
    front = fronts["waiting clients"]
    async with (
        holding(server, upstream) as holder,
        watching(front, upstream, 1) as watcher,
        over_socket(front, upstream, 1, words=LONG) as client,
    ):
        ticket = (await client.hears("position"))["ticket"]
        await watcher.hears("position", ticket=ticket)
        await holder.says("cancel")
        await client.hears("granted")
        await watcher.hears("granted", ticket=ticket)
        for _ in range(3):
            await client.hears("token")
        await client.says("cancel")
        await client.hears("cancelled")
        await until(server, upstream, in_flight=0, waiting=0, calls=0)


# Leaving

CHATS = {"socket": over_socket, "events": over_events}


@pytest.mark.parametrize("transport", CHATS)
async def test_who_leaves_in_line_is_out_of_it(
    server: Server, fronts: dict[str, Front], upstream: str, transport: str
) -> None:
    async with holding(server, upstream):
        async with CHATS[transport](fronts["waiting clients"], upstream, 1) as client:
            await client.hears("position")
        await until(server, upstream, waiting=0, in_flight=1)


@pytest.mark.parametrize("words", [0, LONG], ids=["silent", "speaking"])
@pytest.mark.parametrize("transport", CHATS)
async def test_who_leaves_a_reply_frees_the_slot(
    server: Server, fronts: dict[str, Front], upstream: str, transport: str, words: int
) -> None:
    order = {"words": words} if words else {"silence": 60}
    async with CHATS[transport](fronts["waiting clients"], upstream, 1, **order) as client:
        await client.hears("token" if words else "granted")
        await until(server, upstream, calls=1)
    await until(server, upstream, in_flight=0, calls=0)


async def test_who_leaves_a_plain_request_frees_the_slot(
    server: Server, fronts: dict[str, Front], upstream: str
) -> None:
    path = f"/chat/plain/?upstream={upstream}&silence=60"
    async with request(fronts["servers"], path, headers=session(1)):
        await until(server, upstream, calls=1)
    await until(server, upstream, in_flight=0, calls=0)


def test_nothing_complains(server: Server) -> None:
    assert server.complaints() == []


# Half a body


async def test_half_an_upload_stays_at_the_proxy(tmp_path: Path) -> None:
    """Where threads serve, an API's view would read the rest with a slot in its hands."""
    need_nginx()
    environ = environment(tmp_path, SERVERS_PREFIX="nginx-uploads")
    await asyncio.to_thread(seed, environ, "uploads:1:60")
    with (
        served_by("gunicorn gthread", environ, tmp_path / "log") as server,
        nginx(server.port, SERVERS) as [front],
    ):
        async with half_an_upload(server):
            await until(server, "uploads", 3 * AT_ONCE, in_flight=1)
        await until(server, "uploads", in_flight=0)
        async with half_an_upload(front):
            await asyncio.sleep(AT_ONCE)
            await until(server, "uploads", 0, in_flight=0, waiting=0)


@asynccontextmanager
async def half_an_upload(place: Place) -> AsyncIterator[None]:
    head = (
        f"POST /chat/upload/?upstream=uploads HTTP/1.1\r\nHost: {HOST}\r\n"
        "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 100\r\n\r\n--x\r\n"
    )
    _, writer = await asyncio.open_connection(LOOPBACK, place.port)
    try:
        writer.write(head.encode())
        yield
    finally:
        writer.transport.abort()
