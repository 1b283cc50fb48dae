"""Who waits, or streams, holds its ticket and nothing else: no database connection, no thread.

P7, on PostgreSQL, where every connection is a process that somebody pays for.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import psycopg
import pytest

from tests.postgres import USER, a_postgres

from .rig import Connection, Server, environment, request, seed, served_by, the_same_store, until

WAITERS = 200
SLACK = 6
"""Connections and threads that come and go with what happens to be under way."""


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with a_postgres("servers") as host:
        yield host


@pytest.fixture(scope="module")
def server(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("resources")
    environ = environment(directory, SERVERS_POSTGRES=database)
    seed(environ, "--sessions", str(WAITERS), "crowd:200:60")
    with the_same_store(), served_by("uvicorn", environ, directory / "log") as server:
        yield server


def connections(database: str) -> int:
    """Those of the server process, as PostgreSQL counts them."""
    with psycopg.connect(host=database, user=USER, dbname="servers") as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = 'servers' AND pid <> pg_backend_pid()"
        ).fetchone()
    assert row is not None
    return int(row[0])


def threads(server: Server) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Threads"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts threads in /proc")
async def test_waiting_and_streaming_hold_no_connection_and_no_thread(
    server: Server, database: str
) -> None:
    path = "/async/streamed/?upstream=crowd&do=hold-long"
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(request(server, path, headers=session(0)))
        await first.head()
        await first.chunk()
        before = (connections(database), threads(server))

        await lower(server, 1)
        crowd: list[Connection] = []
        for number in range(1, WAITERS):
            crowd.append(
                await stack.enter_async_context(request(server, path, headers=session(number)))
            )
        await until("crowd", 30, waiting=WAITERS - 1)
        await asyncio.sleep(0.5)
        waiting = (connections(database), threads(server))

        await lower(server, 200)
        await asyncio.gather(*(one.head() for one in crowd))
        assert {one.answer.status for one in crowd} == {200}
        await asyncio.gather(*(one.chunk() for one in crowd))
        await until("crowd", 30, waiting=0, in_flight=WAITERS)
        await asyncio.sleep(0.5)
        streaming = (connections(database), threads(server))

    sys.stdout.write(
        f"connections, threads: {before} before, {waiting} waiting, {streaming} streaming\n"
    )
    for during in (waiting, streaming):
        assert during[0] <= before[0] + SLACK, "database connections grow with those who wait"
        assert during[1] <= before[1] + SLACK, "threads grow with those who wait"
    await until("crowd", 5, in_flight=0, waiting=0)


def session(number: int) -> dict[str, str]:
    return {"Cookie": f"sessionid=session-{number:04}"}


async def lower(server: Server, capacity: int) -> None:
    """Set the capacity as an operator does."""
    async with request(server, f"/capacity/?upstream=crowd&capacity={capacity}") as connection:
        assert (await connection.head()).status == 204
