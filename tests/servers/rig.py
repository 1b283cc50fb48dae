"""Real servers with the views of this directory, and clients that leave when they are told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.test import override_settings

from demo_project.serving import LOOPBACK, free_port
from llm_throttle import worker
from llm_throttle.admission import snapshot

from . import settings as project

ROOT = Path(__file__).resolve().parents[2]
THREADS = 40  # of gunicorn: as many requests at a time as the table makes, and half of them waiting
COMMANDS = {
    "uvicorn": "uvicorn --host {host} --port {port} --lifespan off --log-config {log} {asgi}",
    "daphne": "daphne -v 0 -b {host} -p {port} {asgi}",
    "granian": "granian --interface asginl --host {host} --port {port} --log-config {log} {asgi}",
    "gunicorn gthread": "gunicorn -k gthread --threads {threads} -b {host}:{port} "
    "--log-config-json {log} {wsgi}",
}
RUNSERVERS = {
    "runserver": "django runserver {host}:{port} --noreload",
    "runserver with daphne": "django runserver {host}:{port} --noreload --verbosity 0",
}
WARNINGS = ("-W", "default", "-W", "ignore::ResourceWarning")
"""Django leaves a request's body to the garbage collector where a response's body fails."""

ASGI = tuple(server for server in COMMANDS if server != "gunicorn gthread")
PLACES = {
    "asgi": "tests.servers.asgi:application",
    "wsgi": "tests.servers.wsgi:application",
    "log": "tests/servers/logging.json",
}


@contextmanager
def the_same_store() -> Iterator[None]:
    """This process among the servers' workers: it sees their waiting rooms and holds slots."""
    with override_settings(CACHES=project.CACHES, LLM_THROTTLE=project.LLM_THROTTLE):
        worker.reset()
        try:
            yield
        finally:
            worker.reset()


def seed(environ: dict[str, str], *slugs: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "tests.servers.seed", *slugs], cwd=ROOT, env=environ, check=True
    )


def environment(directory: Path, **more: str) -> dict[str, str]:
    return os.environ | {
        "SERVERS_DATABASE": str(directory / "db.sqlite3"),
        "DJANGO_SETTINGS_MODULE": "tests.servers.settings",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        **more,
    }


class Server:
    """One server process tree, its port and its log."""

    def __init__(
        self, name: str, environ: dict[str, str], log: Path, options: str, host: str
    ) -> None:
        self.name = name
        self.log = log
        self.host = host
        self.port = free_port()
        words = (COMMANDS | RUNSERVERS)[name].format(
            host=host, port=self.port, threads=THREADS, **PLACES
        )
        with log.open("wb") as lines:
            self.process = subprocess.Popen(
                [sys.executable, *WARNINGS, "-m", *words.split(), *options.split()],
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=lines,
                stderr=lines,
                start_new_session=True,
            )

    def wait_until_up(self, seconds: float = 60) -> None:
        import socket

        give_up_at = time.monotonic() + seconds
        while True:
            assert self.process.poll() is None, self.log.read_text()
            try:
                socket.create_connection((self.host, self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < give_up_at, self.log.read_text()
                time.sleep(0.05)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def complaints(self) -> list[dict[str, str]]:
        """The lines of its log that are no JSON count as complaints too."""
        records = [_record(line) for line in self.log.read_text().splitlines() if line.strip()]
        return [record for record in records if record["level"] != "INFO"]


def _record(line: str) -> dict[str, str]:
    try:
        record: dict[str, str] = json.loads(line)
        return record
    except ValueError:
        return {"logger": "", "level": "", "text": line, "error": ""}


@contextmanager
def served_by(
    name: str, environ: dict[str, str], log: Path, options: str = "", host: str = LOOPBACK
) -> Iterator[Server]:
    server = Server(name, environ, log, options, host)
    try:
        server.wait_until_up()
        yield server
    finally:
        server.stop()


# Clients


@dataclass
class Answer:
    """What a client has got so far. ``is_whole`` says whether it came to its end."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = False


class Connection:
    """One request on a connection of its own; leaving the block closes it at once."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.answer = Answer()

    async def head(self) -> Answer:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        self.answer.status = int(lines[0].split()[1])
        pairs = (line.partition(":") for line in lines[1:] if line)
        self.answer.headers = {name.lower(): value.strip() for name, _, value in pairs}
        return self.answer

    async def chunk(self) -> bytes:
        """The next piece of the body; b"" at its end."""
        headers = self.answer.headers
        if headers.get("transfer-encoding") == "chunked":
            size = int(await self._reader.readuntil(b"\r\n"), 16)
            piece = (await self._reader.readexactly(size + 2))[:-2]
        elif "content-length" in headers:
            piece = await self._reader.read(int(headers["content-length"]) - len(self.answer.body))
        elif self.answer.status == 304:
            piece = b""
        else:
            piece = await self._reader.read(65536)
        self.answer.body += piece
        self.answer.is_whole = not piece
        return piece

    async def rest(self) -> Answer:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await self.chunk():
                pass
        return self.answer


@asynccontextmanager
async def request(
    server: Server, path: str, *, flow: str = "client", headers: dict[str, str] | None = None
) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection(LOOPBACK, server.port)
    lines = {"Host": "localhost", "Connection": "close", "X-Flow": flow, "Accept": "*/*"}
    head = "".join(f"{name}: {value}\r\n" for name, value in (lines | (headers or {})).items())
    try:
        writer.write(f"GET {path} HTTP/1.1\r\n{head}\r\n".encode())
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()


async def get(server: Server, path: str, **options: Any) -> Answer:
    """The whole answer, or as much of it as came."""
    async with request(server, path, **options) as connection:
        await connection.head()
        return await connection.rest()


# The store


async def until(upstream: str, seconds: float, **counts: int) -> float:
    """How long it takes until so many are in flight or waiting."""
    started_at = time.monotonic()
    while True:
        seen = await asyncio.to_thread(snapshot, upstream)
        passed = time.monotonic() - started_at
        if all(getattr(seen, name) == count for name, count in counts.items()):
            return passed
        assert passed < seconds, f"after {seconds} s not {counts}: {seen}"
        await asyncio.sleep(0.02)
