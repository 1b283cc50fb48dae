"""A server that is asked to stop says goodbye: who starts next need not wait for its silence."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llm_throttle.admission import snapshot

from .rig import ASGI, Server, environment, get, request, seed, served_by, the_same_store, until

MANY = {
    "uvicorn": "--workers 2",
    "gunicorn gthread": "-w 2",
}
CASES = [
    *((name, "", kind) for name in ASGI for kind in ("sync", "async")),
    ("gunicorn gthread", "", "sync"),
    *((name, options, "sync") for name, options in MANY.items()),
]


@pytest.mark.parametrize(("name", "options", "kind"), CASES)
async def test_nobody_is_left_who_would_have_to_be_waited_for(
    tmp_path: Path, name: str, options: str, kind: str
) -> None:
    slug = f"goodbye-{name}-{len(options)}-{kind}".replace(" ", "-")
    environ = environment(tmp_path)
    await asyncio.to_thread(seed, environ, f"{slug}:8:3")
    with the_same_store():
        with served_by(name, environ, tmp_path / "log", options) as server:
            answers = await asyncio.gather(
                *(get(server, f"/{kind}/plain/?upstream={slug}&do=end") for _ in range(8))
            )
            assert {answer.status for answer in answers} == {200}
            assert snapshot(slug).workers
            await stream_while_it_stops(server, slug, kind)
        assert {worker.state for worker in snapshot(slug).workers} == {"left"}


async def stream_while_it_stops(server: Server, slug: str, kind: str) -> None:
    """One that ends by itself, a little after SIGTERM."""
    async with request(server, f"/{kind}/streamed/?upstream={slug}&do=hold") as connection:
        await connection.head()
        await until(slug, 2, in_flight=1)
        server.process.terminate()
        await connection.rest()
    await asyncio.to_thread(server.process.wait, 20)
