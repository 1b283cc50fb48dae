"""All that the demo runs beside the command itself: store, provider, database, server workers."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import redis

from demo_project.children import Child, ChildFailed, Children, UpInside
from demo_project.environment import IN_PROCESS
from demo_project.load_client import Address, address_of
from demo_project.serving import LOOPBACK, free_port

MANAGE = str(Path(__file__).resolve().parent.parent / "manage.py")


@dataclass(frozen=True, slots=True)
class Setup:
    """What to start. Empty addresses mean: one of our own."""

    workers: int = 2
    port: int = 0
    redis_url: str = ""
    upstream_url: str = ""
    database_url: str = ""
    backend: str = "redis"
    capacity: int = 30
    service: float = 1.5
    jitter: float = 0.5
    seed: int | None = None
    users: int = 0
    guests: int = 0  # sessions to make for guests; the accounts' are made with them
    comparisons: bool = False

    @property
    def is_temporary(self) -> bool:
        return not self.database_url


class Stack(UpInside):
    """``with Stack(setup) as stack: …``: everything is up inside and gone afterwards."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.children = Children()
        self.helpers: list[Child] = []
        self.workers: list[Child] = []
        self.directory: Path | None = None
        self.sessions: dict[str, list[str]] = {}
        self.port = setup.port or free_port()
        self.provider_url = ""
        self.key_prefix = ""
        self.environ = dict(os.environ)

    @property
    def address(self) -> Address:
        return LOOPBACK, self.port

    @property
    def provider_address(self) -> Address | None:
        """Where our own provider answers; None where a foreign one is used."""
        return address_of(self.provider_url) if self.provider_url else None

    def start(self) -> None:
        """Start the store, which the others ask at once, then all that can start side by side."""
        self._use_database()
        store = self._start_store()
        if store is not None:
            self.environ["REDIS_URL"] = store.wait_until_ready()
        provider = self._start_provider()
        seeding = self._start_seeding()
        if provider is not None:
            self.provider_url = provider.wait_until_ready()
            self.environ["UPSTREAM_URL"] = self.provider_url
        self.helpers = [child for child in (store, provider) if child is not None]
        workers = [self._start_worker(number + 1) for number in range(self.setup.workers)]
        self._finish_seeding(seeding)
        for worker in workers:
            worker.wait_until_ready()
        self.workers = workers

    def _use_database(self) -> None:
        if self.setup.comparisons:
            self.environ["DEMO_COMPARED_CAPACITY"] = str(self.setup.capacity)
        if self.setup.is_temporary:
            self.directory = Path(tempfile.mkdtemp(prefix="llm-throttle-"))
            self.environ["DATABASE_URL"] = f"sqlite:///{self.directory / 'db.sqlite3'}"
        else:
            self.environ["DATABASE_URL"] = self.setup.database_url

    def _start_store(self) -> Child | None:
        if self.setup.backend == "locmem":
            self.environ["REDIS_URL"] = f"{IN_PROCESS}://"
            return None
        if self.setup.redis_url:
            self.environ["REDIS_URL"] = self.setup.redis_url
            if self.setup.is_temporary:  # a store that others use as well
                self.key_prefix = f"check-{secrets.token_hex(4)}"
                self.environ["CACHE_KEY_PREFIX"] = self.key_prefix
            return None
        return self.children.start("Valkey", "-m", "demo_project.valkey", environ=self.environ)

    def _start_provider(self) -> Child | None:
        if self.setup.upstream_url:
            self.environ["UPSTREAM_URL"] = self.setup.upstream_url
            return None
        options = {
            "--capacity": self.setup.capacity,
            "--latency": self.setup.service,
            "--jitter": self.setup.jitter,
        }
        if self.setup.seed is not None:
            options["--seed"] = self.setup.seed
        words = [str(word) for option in options.items() for word in option]
        return self.children.start("provider", MANAGE, "provider", *words, environ=self.environ)

    def _start_seeding(self) -> Child:
        return self.children.start(
            "seeding",
            MANAGE,
            "seed",
            "--migrate",
            *("--capacity", str(self.setup.capacity)),
            *("--users", str(self.setup.users)),
            *("--sessions", str(self.setup.guests)),
            environ=self.environ,
        )

    def _finish_seeding(self, seeding: Child) -> None:
        self.sessions = json.loads(seeding.finish())

    def _start_worker(self, number: int) -> Child:
        return self.children.start(
            f"worker {number}",
            "-m",
            "demo_project.serving",
            "--port",
            str(self.port),
            environ=self.environ,
        )

    def stop(self) -> None:
        self.children.stop(*self.workers)  # while the store is there for them to sign off
        self.children.stop()
        self._forget_in_store()
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _forget_in_store(self) -> None:
        """Leave nothing of a temporary run in a store that others use."""
        if self.key_prefix:
            with redis.from_url(self.setup.redis_url) as client:
                for key in client.scan_iter(match=f"*{self.key_prefix}*", count=1000):
                    client.unlink(key)

    def check_helpers(self) -> None:
        """Raise ChildFailed if the store or the provider has ended."""
        for child in self.helpers:
            if not child.is_running():
                raise ChildFailed(f"The {child.name} has ended (exit code {child.process.poll()}).")

    def restart_dead_workers(self) -> list[str]:
        """Start those again that have died and tell their names."""
        dead = [worker for worker in self.workers if not worker.is_running()]
        for worker in dead:
            self.workers[self.workers.index(worker)] = self.children.restart(worker)
        return [worker.name for worker in dead]


def given(environ: Mapping[str, str]) -> dict[str, str]:
    """The addresses that the environment names, as fields of a setup."""
    names = {"redis_url": "REDIS_URL", "upstream_url": "UPSTREAM_URL"}
    return {field: environ.get(name, "") for field, name in names.items()}
