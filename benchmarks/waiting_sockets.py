"""What waiting sockets cost: pushes, gaps in running replies, store calls, memory.

    python -m benchmarks.waiting_sockets --sockets 1000 --releases 5 --seconds 20

Starts the demo's servers with a store and a simulated provider, lets so many sockets wait in line
over two server workers while slots are released at a steady rate, and measures for a while. Whoever
is served asks again, so that the line stays as long. Does it with a tenth of the sockets first, to
show what grows with their number and what does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, quantiles

import redis
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from demo_project.load_client import SESSION_COOKIE
from demo_project.serving import LOOPBACK
from demo_project.stack import MANAGE, Setup, Stack

SERVICE_S = 1.0
USERS = 120
AT_ONCE = 50  # sockets opened side by side

ROOMY = """
from llm_throttle.models import Upstream
upstream = Upstream.objects.get()
upstream.queue_depth = None
upstream.save()
for limit in upstream.limits.all():
    limit.queue_depth, limit.depth_per_user, limit.wait_budget = None, 100, 3600
    limit.save()
"""


@dataclass
class Figures:
    """What was seen while it was measured."""

    pushes: dict[int, int] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    served: int = 0


class Client:
    """One socket that always waits: when it has been served, it asks again."""

    def __init__(self, number: int, port: int, session: str) -> None:
        self.number = number
        self.figures: Figures | None = None
        self.waits = asyncio.Event()
        self._port = port
        self._session = session
        self._token_at = 0.0

    async def run(self) -> None:
        address = f"ws://{LOOPBACK}:{self._port}/ws/chat/"
        headers = {
            "Cookie": f"{SESSION_COOKIE}={self._session}",
            "Origin": f"http://{LOOPBACK}:{self._port}",
        }
        async with connect(address, additional_headers=headers, compression=None) as socket:
            await self._ask(socket)
            with suppress(ConnectionClosed):
                async for message in socket:
                    await self._hear(socket, json.loads(message))

    async def _ask(self, socket: ClientConnection) -> None:
        text = f"I am client-{self.number}."
        await socket.send(json.dumps({"type": "message", "message": text}))

    async def _hear(self, socket: ClientConnection, message: dict[str, str]) -> None:
        kind, now = message["type"], time.perf_counter()
        if kind == "position":
            self.waits.set()
            if self.figures:
                pushes = self.figures.pushes
                pushes[self.number] = pushes.get(self.number, 0) + 1
        elif kind == "token":
            if self.figures and self._token_at:
                self.figures.gaps.append(now - self._token_at)
            self._token_at = now
        elif kind in ("done", "refused", "error"):
            self._token_at = 0.0
            self.waits.set()
            if self.figures and kind == "done":
                self.figures.served += 1
            await self._ask(socket)


def make_roomy(stack: Stack) -> None:
    subprocess.run(  # noqa: S603 - our own command
        [sys.executable, MANAGE, "shell", "-v", "0", "-c", ROOMY], env=stack.environ, check=True
    )


def memory_mb(stack: Stack) -> list[float]:
    pages = [
        int(Path(f"/proc/{worker.process.pid}/statm").read_text().split()[1])
        for worker in stack.workers
    ]
    return [count * 4096 / 2**20 for count in pages]


def script_calls(store: redis.Redis) -> int:
    stats = store.info("commandstats")
    return int(stats.get("cmdstat_evalsha", {}).get("calls", 0))


async def measure(stack: Stack, sockets: int, seconds: float) -> None:
    store = redis.from_url(stack.environ["REDIS_URL"])
    before = memory_mb(stack)
    sessions = stack.sessions["premium"]
    clients = [
        Client(number, stack.port, sessions[number % len(sessions)]) for number in range(sockets)
    ]
    tasks: list[asyncio.Task[None]] = []
    for start in range(0, sockets, AT_ONCE):
        batch = clients[start : start + AT_ONCE]
        tasks += [asyncio.create_task(client.run()) for client in batch]
        await asyncio.wait_for(asyncio.gather(*(client.waits.wait() for client in batch)), 60)
    await asyncio.sleep(2)
    figures = Figures()
    for client in clients:
        client.figures = figures
    calls, started_at = script_calls(store), time.perf_counter()
    await asyncio.sleep(seconds)
    took = time.perf_counter() - started_at
    calls = script_calls(store) - calls
    for client in clients:
        client.figures = None
    report(sockets, figures, took, calls, before, memory_mb(stack))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(2)


def report(
    sockets: int,
    figures: Figures,
    took: float,
    calls: int,
    before: list[float],
    after: list[float],
) -> None:
    rates = [count / took for count in figures.pushes.values()] or [0.0]
    gaps = sorted(figures.gaps) or [0.0, 0.0]
    percentiles = quantiles(gaps, n=100)
    p50, p99, longest = (1000 * gap for gap in (percentiles[49], percentiles[98], gaps[-1]))
    grown = (sum(after) - sum(before)) * 1024 / sockets
    lines = {
        "released per second": f"{figures.served / took:.1f}",
        "pushes per waiter and second": f"{mean(rates):.2f}, at most {max(rates):.2f}",
        "gap between tokens, p50 / p99 / max": f"{p50:.0f} / {p99:.0f} / {longest:.0f} ms",
        "script calls per second": f"{calls / took:.1f}",
        "memory per socket": f"{grown:.0f} KB",
        "memory of the workers": " and ".join(f"{size:.0f} MB" for size in after),
    }
    sys.stdout.write(f"{sockets} waiting sockets, {took:.0f} s\n")
    for name, value in lines.items():
        sys.stdout.write(f"  {name:38} {value}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sockets", type=int, default=1000)
    parser.add_argument("--releases", type=float, default=5.0, help="slots released per second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    capacity = max(1, round(options.releases * SERVICE_S))
    setup = Setup(
        workers=options.workers, capacity=capacity, service=SERVICE_S, jitter=0.5, users=USERS
    )
    with Stack(setup) as stack:
        make_roomy(stack)
        for sockets in (max(capacity * 2, options.sockets // 10), options.sockets):
            asyncio.run(measure(stack, sockets, options.seconds))


if __name__ == "__main__":
    main()
