"""Django's own server for development, as it is and as daphne replaces it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from .rig import RUNSERVERS, Server, environment, get, request, seed, served_by, the_same_store
from .rig import until as until_counts
from .table import notes

BOUND = {"runserver": 2 * 0.5 + 3, "runserver with daphne": 2}
"""Seconds until the slot of a client that left is free: docs/howto/servers.md."""


def until(server: Server, seconds: float, **counts: int):
    return until_counts(slug(server), seconds, **counts)


def slug(server: Server) -> str:
    return server.name.replace(" ", "-")


@pytest.fixture(scope="module", params=RUNSERVERS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("runserver")
    apps = "daphne" if "daphne" in request.param else ""
    environ = environment(directory, SERVERS_APPS=apps)
    seed(environ, f"{request.param.replace(' ', '-')}:2:30")
    with the_same_store(), served_by(request.param, environ, directory / "log") as server:
        yield server


async def test_a_third_stream_begins_when_one_of_two_has_ended(server: Server) -> None:
    path = f"/sync/streamed/?upstream={slug(server)}&do=hold"
    answers = await asyncio.gather(*(get(server, path, flow=str(n)) for n in range(3)))
    assert [(answer.status, answer.is_whole) for answer in answers] == [(200, True)] * 3
    waited = sorted(int(answer.headers["x-llm-throttle-waited-ms"]) for answer in answers)
    assert waited[1] < 500 < waited[2]
    await until(server, 2, in_flight=0, waiting=0)
    assert {int(note.split()[1]) for note in notes(slug(server))} <= {1, 2}


async def test_who_leaves_in_mid_stream_gives_the_slot_back(server: Server) -> None:
    path = f"/sync/streamed/?upstream={slug(server)}&do=go-on"
    async with request(server, path) as connection:
        await connection.head()
        await connection.chunk()
    await until(server, BOUND[server.name], in_flight=0)
    assert notes(slug(server)) == ["began 1", "closed 1"]
