"""The simulated provider: real wire formats, a hard limit on calls in flight, and its own count.

llmock writes the answers as Anthropic and OpenAI do; the wrapper here decides when they are sent
and how many may run at a time. The demo and the tests take its count as the truth about calls in
flight, so nothing in here knows or imports the app that is being judged.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from llmock.chaos import ChaosSettings, StreamChaos
from llmock.main import create_app
from llmock.ratelimit import LimitSettings
from llmock.simulation import MockResponseSettings, build_error_response

from demo_project.hang_up import has_hung_up, on_hang_up

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# One address speaks both formats at the paths the SDKs use, as a real provider's address does.
WIRE_PATHS = {"/v1/messages": "/anthropic/v1/messages"}
# A model thinks before it speaks: the first event goes out after this share of the service time.
THINKING = 0.25
REFUSED = "Too many concurrent requests: at most {capacity} at a time. Please try again later."


class Provider:
    """An ASGI application that serves at most *capacity* calls at a time.

    A call takes *latency* seconds from its arrival to its last byte, ± *jitter* (a share of it,
    0 to 1) drawn from a generator that *seed* makes repeatable.
    """

    def __init__(
        self, *, capacity: int, latency: float, jitter: float = 0.0, seed: int | None = None
    ) -> None:
        self.capacity = capacity
        self.latency = latency
        self.jitter = jitter
        self.seed = seed
        self.chance = random.Random(seed)  # noqa: S311 - service times, not secrets
        self.stats = Stats()
        self.llmock = create_app(
            # Given here so that no LLMOCK_* variable of the shell changes what is measured.
            chaos=ChaosSettings(),
            responses=MockResponseSettings(),
            limits=LimitSettings(),
            stream_chaos=StreamChaos(),
        )

    def __repr__(self) -> str:
        return f"<Provider {self.stats.in_flight}/{self.capacity} in flight>"

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/stats"):
            await self._answer_stats(scope, send)
        elif scope["method"] == "POST":
            await self._answer_call(scope, receive, send)
        else:
            await self.llmock(scope, receive, send)

    async def _answer_call(self, scope: Message, receive: Receive, send: Send) -> None:
        if await has_hung_up(scope):
            return
        path = WIRE_PATHS.get(scope["path"], scope["path"])
        call = Call(self.stats)
        on_hang_up(scope, call.leave)
        if self.stats.in_flight > self.capacity:
            call.refuse()
            refusal = REFUSED.format(capacity=self.capacity)
            response = build_error_response(path, 429, retry_after=1, message=refusal)
            await response(scope, receive, send)
            return
        body = await read_body(receive)
        gone = asyncio.ensure_future(client_gone(receive))
        try:
            scope = {**scope, "path": path, "raw_path": path.encode()}
            await self._play(await collect(self.llmock, scope, body), call, gone, send)
        finally:
            gone.cancel()
            call.leave()

    async def _play(
        self, messages: list[Message], call: Call, gone: asyncio.Future[None], send: Send
    ) -> None:
        """Send what llmock wrote at the times at which a model would have."""
        service = self.service_time() if messages[0]["status"] == 200 else 0.0
        async for message in paced(messages, call.started_at, service, gone):
            await send(message)
        if not gone.done():
            call.serve()  # in the step of the last send: nothing is awaited in between

    def service_time(self) -> float:
        return self.latency * self.chance.uniform(1 - self.jitter, 1 + self.jitter)

    async def _answer_stats(self, scope: Message, send: Send) -> None:
        if scope["path"] == "/stats/reset" and scope["method"] == "POST":
            self.stats.reset()
            self.chance.seed(self.seed)  # the same times again, for a run to be compared
        known = {
            "/stats": self.stats.as_json,
            "/stats/reset": self.stats.as_json,
            "/stats/service": self.stats.service_as_json,
        }
        answer = known.get(scope["path"])
        await send_json(send, 200 if answer else 404, answer() if answer else {})


class Stats:
    """What the provider has seen; *peak* counts the calls that it had to refuse, too."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.reset()

    def reset(self) -> None:
        """Forget what has been; what is in flight stays counted."""
        self.peak = self.in_flight
        self.served = 0
        self.refused_429 = 0
        self.service_seconds = 0.0

    def as_json(self) -> dict[str, int]:
        return {
            "in_flight": self.in_flight,
            "peak": self.peak,
            "served": self.served,
            "refused_429": self.refused_429,
        }

    def service_as_json(self) -> dict[str, float]:
        mean = self.service_seconds / self.served if self.served else 0.0
        return {"served": self.served, "mean_ms": round(mean * 1000, 1)}


class Call:
    """One call in flight, from its arrival until it is served, refused or left by its client."""

    def __init__(self, stats: Stats) -> None:
        self.stats = stats
        self.is_over = False
        self.started_at = asyncio.get_running_loop().time()
        stats.in_flight += 1
        stats.peak = max(stats.peak, stats.in_flight)

    def serve(self) -> None:
        self.stats.served += 1
        self.stats.service_seconds += asyncio.get_running_loop().time() - self.started_at
        self.leave()

    def refuse(self) -> None:
        self.stats.refused_429 += 1
        self.leave()

    def leave(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.stats.in_flight -= 1


@dataclass
class Replay:
    """A request's body for an inner application, which never hears of a disconnect."""

    body: bytes
    is_read: bool = False

    async def __call__(self) -> Message:
        if self.is_read:
            await asyncio.Event().wait()
        self.is_read = True
        return {"type": "http.request", "body": self.body, "more_body": False}


async def collect(application: Any, scope: Message, body: bytes) -> list[Message]:
    """All that *application* answers: one start message, then bodies that are not empty.

    The last body carries the end of the response, so that both leave in one send.
    """
    messages: list[Message] = []

    async def keep(message: Message) -> None:
        if message["type"] == "http.response.start" or message.get("body"):
            messages.append({**message, "more_body": True})

    await application(scope, Replay(body), keep)
    if len(messages) == 1:
        messages.append({"type": "http.response.body", "body": b""})
    messages[0].pop("more_body")
    messages[-1]["more_body"] = False
    return messages


async def paced(
    messages: list[Message], started_at: float, service: float, gone: asyncio.Future[None]
) -> AsyncIterator[Message]:
    """Each message when it is due, the last one after *service* seconds; none once *gone*."""
    start, *bodies = messages
    for due, message in zip(due_times(len(bodies), service), bodies, strict=True):
        delay = started_at + due - asyncio.get_running_loop().time()
        await asyncio.wait({gone}, timeout=max(0.0, delay))
        if gone.done():
            return
        if start is not None:
            yield start
            start = None
        yield message


def due_times(count: int, service: float) -> list[float]:
    """When to send *count* bodies: a single one at the end, several after some thinking."""
    if count == 1:
        return [service]
    step = service * (1 - THINKING) / (count - 1)
    return [service * THINKING + step * number for number in range(count)]


async def read_body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
