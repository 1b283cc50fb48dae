"""Each server, each kind of view, each way to end: the slot is free in time, nothing complains.

The cells of one server are tried together, when the first of them is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo_project.serving import LOOPBACK

from .conftest import RESULTS
from .rig import ASGI, COMMANDS, Server, environment, seed, served_by, the_same_store, until
from .table import ALL, IMPOSSIBLE, Cell, Result, hold, holding, run
from .views import KINDS

HELD: dict[tuple[str, str], list[str]] = {}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def seeded(directory: Path) -> dict[str, str]:
    environ = environment(directory)
    held = [f"{holding(server, kind)}:2" for server in COMMANDS for kind in KINDS]
    seed(environ, *sorted({cell.upstream for cell in ALL}), *held)
    return environ


@pytest.fixture(scope="module", params=COMMANDS)
def server(
    request: pytest.FixtureRequest, directory: Path, seeded: dict[str, str]
) -> Iterator[Server]:
    """A server whose cells have all been tried."""
    log = directory / f"{request.param}.log"
    with served_by(request.param, seeded, log) as server:
        with the_same_store():
            cells = [cell for cell in ALL if cell.server == server.name and not cell.impossible]
            RESULTS.update(asyncio.run(run(server, cells)))
            HELD.update(asyncio.run(hold_all(server)))
        yield server


async def hold_all(server: Server) -> dict[tuple[str, str], list[str]]:
    noted = await asyncio.gather(*(hold(server, kind) for kind in KINDS))
    return {(server.name, kind): notes for kind, notes in zip(KINDS, noted, strict=True)}


def of(server: str) -> list[Cell]:
    return [cell for cell in ALL if cell.server == server]


NAMES = [f"{cell.kind}, {cell.body}, {cell.ending}" for cell in of("uvicorn")]


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_the_slot_is_free_in_time(server: Server, number: int) -> None:
    cell = of(server.name)[number]
    if cell.impossible:
        assert cell.impossible in IMPOSSIBLE
        return
    assert RESULTS[cell] == Result(RESULTS[cell].seconds)


@pytest.mark.parametrize("kind", KINDS)
def test_a_third_stream_over_two_slots_begins_when_a_body_has_ended(
    server: Server, kind: str
) -> None:
    noted = [note.split() for note in HELD[server.name, kind]]
    assert max(int(in_flight) for _, in_flight in noted) == 2
    what = [what for what, _ in noted]
    assert what[:3] == ["began", "began", "closed"], what
    assert sorted(what[3:]) == ["began", "closed", "closed"]


@pytest.mark.parametrize("kind", ["sync", "DRF"])
async def test_who_sends_half_a_body_holds_no_slot(server: Server, kind: str) -> None:
    upstream = holding(server.name, kind)
    body = b'{"message": "Hello"}'
    head = (
        f"POST /{kind}/plain/?upstream={upstream} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"Cookie: csrftoken={'x' * 32}\r\nX-CSRFToken: {'x' * 32}\r\nConnection: close\r\n\r\n"
    )
    with the_same_store():
        reader, writer = await asyncio.open_connection(LOOPBACK, server.port)
        writer.write(head.encode() + body[:7])
        await asyncio.sleep(0.5)
        await until(upstream, 0.5, in_flight=0, waiting=0)
        writer.write(body[7:])
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"Hello" in answer
        writer.close()
        await until(upstream, 2, in_flight=0, waiting=0)


def test_nothing_complains_but_of_what_was_planned(server: Server) -> None:
    unplanned = [record for record in server.complaints() if not is_planned(record)]
    assert unplanned == []


def is_planned(record: dict[str, str]) -> bool:
    """What the cells bring about: errors, refusals, and what we and Django are to say of it."""
    return record["error"] == "Planned" or any(part in record["text"] for part in PLANNED)


PLANNED = (
    "Planned",  # with the traceback, from servers that print it into the message
    "Service Unavailable: /",  # whoever was refused at the end of the wait
    "was replaced on its way out",
    "could not be closed within",  # a thread that sleeps until its first byte
    "must consume asynchronous iterators",  # of Django, once for each body that WSGI collects
)


def test_what_cannot_be_closed_in_time_is_told(server: Server) -> None:
    told = [record["text"] for record in server.complaints()]
    assert sum("could not be closed within" in text for text in told) == 4, "the sync kinds"
    collected = sum("must consume asynchronous iterators" in text for text in told)
    assert collected == (0 if server.name in ASGI else 1), "Python shows a warning once"


def test_a_stream_that_was_replaced_is_told_with_the_views_name(server: Server) -> None:
    told = [r["text"] for r in server.complaints() if "was replaced on its way out" in r["text"]]
    for kind in ("SyncChat", "AsyncChat", "RestChat", "ChatViewSet", "AsyncRestChat", "answer"):
        named = [text for text in told if f"tests.servers.views.{kind} " in text]
        assert len(named) == 1, kind
