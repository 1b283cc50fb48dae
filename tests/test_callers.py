"""Slots taken from everywhere: Celery, thread pools, event loops, forked children. REDIS-08."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from asgiref.sync import async_to_sync, sync_to_async
from celery import Celery
from celery.contrib.testing.worker import start_worker

from llm_throttle import aadmit, admit
from llm_throttle.admission import snapshot
from llm_throttle.exceptions import Refused
from llm_throttle.identity import Identity
from llm_throttle.scheduling.policy import TierPolicy
from llm_throttle.worker import current

from .conftest import Room
from .test_admission import ANN
from .waiting_room import eventually, is_empty

ROOT = Path(__file__).resolve().parents[1]
MANY = TierPolicy("gold", cap=2, wait_budget_ms=20_000, queue_depth=100, depth_per_user=100)


def call(number: int = 0) -> str:
    with admit("sim", identity=Identity(f"user:{number}", "gold")) as lease:
        assert snapshot("sim").in_flight <= 2
        return lease.ticket


async def acall(number: int = 0) -> str:
    async with aadmit("sim", identity=Identity(f"user:{number}", "gold")) as lease:
        return lease.ticket


def connections() -> int:
    with redis.from_url(os.environ["REDIS_URL"]) as client:
        return len(client.client_list()) - 1


@pytest.fixture
def settled(room: Room, backend: str) -> Callable[[], None]:
    """Ends a test: nothing is held, and no connection is left but those of before."""
    room(2, MANY)
    call()
    before = connections()

    def check() -> None:
        assert eventually(is_empty)
        if backend == "redis":
            assert eventually(lambda: connections() <= before), "connections grow with the calls"

    return check


def test_sync_code_that_enters_the_loop_again_and_again(settled: Callable[[], None]) -> None:
    tickets = {async_to_sync(acall)(number) for number in range(20)}
    assert len(tickets) == 20
    settled()


def test_an_event_loop_per_call(settled: Callable[[], None]) -> None:
    for number in range(20):
        asyncio.run(acall(number))
    settled()


async def test_sync_code_within_async_code_within_sync_code(settled: Callable[[], None]) -> None:
    def inner(number: int) -> str:
        call(number)
        return async_to_sync(acall)(number)

    await asyncio.gather(*(sync_to_async(inner)(number) for number in range(10)))
    await asyncio.gather(
        *(sync_to_async(inner, thread_sensitive=False)(number) for number in range(10))
    )
    await asyncio.to_thread(settled)


def test_a_pool_of_threads(settled: Callable[[], None]) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(call, range(100)))) == 100
    settled()


def test_threads_with_event_loops_of_their_own(settled: Callable[[], None]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: asyncio.run(acall(number)), range(40)))
    settled()


def test_a_celery_worker(settled: Callable[[], None]) -> None:
    app = Celery("tests", broker="memory://", backend="cache+memory://")

    @app.task(bind=True, max_retries=5, name=f"summarise-{id(app)}")
    def summarise(self, number: int) -> str:
        try:
            return call(number)
        except Refused as refusal:  # as docs/howto/tasks.md advises
            raise self.retry(countdown=refusal.retry_after, exc=refusal) from refusal

    with start_worker(app, pool="threads", concurrency=4, perform_ping_check=False):
        results = [summarise.delay(number) for number in range(12)]
        tickets = {result.get(timeout=30, disable_sync_subtasks=False) for result in results}
    assert len(tickets) == 12
    settled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_a_worker_of_its_own(room: Room, backend: str) -> None:
    if backend == "locmem":
        pytest.skip("a store in the process cannot be shared")
    room(2, MANY)
    parent = current()
    with admit("sim", identity=ANN) as lease:
        pid = os.fork()
        if pid == 0:
            try:
                is_another = current() is not parent and current().id != parent.id
                call(1)
                lease.release()
                is_held = eventually(lambda: snapshot("sim").in_flight == 1)
                os._exit(0 if is_another and is_held else 1)
            except BaseException:
                traceback.print_exc()
                os._exit(2)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert lease.is_held
        assert snapshot("sim").in_flight == 1, "what the child drops is the parent's"
        contextvars.Context().run(call, 2)
    assert eventually(is_empty)


def test_nothing_connects_and_no_thread_starts_at_import() -> None:
    code = (
        "import threading, django; django.setup();"
        "import llm_throttle.views, llm_throttle.rest_framework, llm_throttle.consumers;"
        "from llm_throttle import admit, aadmit, worker;"
        "admit('sim'), aadmit('sim');"
        "assert worker._current is None;"
        "assert threading.active_count() == 1, threading.enumerate()"
    )
    environ = os.environ | {
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "REDIS_URL": "redis://127.0.0.1:1/0",
    }
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, env=environ, check=True)


def test_a_shell_is_a_caller_like_any_other(room: Room, backend: str) -> None:
    if backend == "locmem":
        pytest.skip("a store in the process cannot be shared")
    room(2, MANY)
    code = (
        "from llm_throttle import admit\n"
        "from llm_throttle.identity import Identity\n"
        "with admit('sim', identity=Identity('shell', 'gold')) as lease: print(lease.tier)\n"
    )
    done = subprocess.run(
        [sys.executable, "manage.py", "shell", "--settings=tests.settings", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-1] == "gold"
    assert done.stderr == ""
    assert eventually(is_empty)


def test_the_threads_of_the_waiting_room_do_not_grow(settled: Callable[[], None]) -> None:
    before = threading.active_count()
    for number in range(50):
        call(number)
        async_to_sync(acall)(number)
    assert eventually(lambda: threading.active_count() <= before + 2)
    settled()
