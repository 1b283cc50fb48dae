"""gunicorn loads the project once and forks: no socket, thread or ticket is shared. REDIS-08."""

from __future__ import annotations

import asyncio
from pathlib import Path

from .rig import PLACES, environment, get, seed, served_by, the_same_store, until
from .table import notes


async def test_workers_forked_from_a_project_that_had_connected(
    tmp_path: Path, monkeypatch
) -> None:
    environ = environment(tmp_path)
    await asyncio.to_thread(seed, environ, "forks:2")
    monkeypatch.setitem(PLACES, "wsgi", "tests.servers.preloaded:application")
    log = tmp_path / "log"
    with the_same_store(), served_by("gunicorn gthread", environ, log, "--preload -w 2") as server:
        path = "/sync/plain/?upstream=forks&do=end"
        answers = await asyncio.gather(*(get(server, path, flow=str(n)) for n in range(16)))
        assert {answer.status for answer in answers} == {200}
        assert all(answer.body == b"done" for answer in answers)
        assert len({answer.headers["x-llm-throttle-ticket"] for answer in answers}) == 16
        await until("forks", 2, in_flight=0, waiting=0)
        in_flight = {int(note.split()[1]) for note in notes("forks")}
        assert max(in_flight) == 2
        # From 3.12 on Python warns of any fork beside threads, and a project that uses the room at
        # import has some. The children start their own.
        assert [r for r in server.complaints() if "use of fork()" not in r["text"]] == []
