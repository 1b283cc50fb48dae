"""A server that says what a test tells it to, in the formats of a throttled view and consumer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from demo_project.serving import listen

HERE = Path(__file__).parent
CLIENT = HERE.parent.parent / "llm_throttle" / "static" / "llm_throttle"
NOBODY = "127.0.0.1:9"  # where nothing listens
# As strict as a policy gets: what works here needs no exception anywhere.
POLICY = (
    "default-src 'none'; script-src 'self'; img-src data:; "
    f"connect-src 'self' http://{NOBODY} ws://{NOBODY}"
)
TYPES = {".html": "text/html", ".js": "text/javascript"}


class Break(Exception):
    """Cut the connection in the middle of the answer."""


@dataclass
class Exchange:
    """One request or socket, as a script plays it."""

    scope: dict[str, Any]
    receive: Callable[[], Awaitable[dict[str, Any]]]
    send: Callable[[dict[str, Any]], Awaitable[None]]
    body: Any = None
    is_gone: asyncio.Event = field(default_factory=asyncio.Event)
    said: list[Any] = field(default_factory=list)

    @property
    def ticket(self) -> str:
        """What the client comes back with, by header or in the address."""
        query = self.scope["query_string"].decode()
        return self.header("x-llm-throttle-ticket") or query.removeprefix("ticket=")

    def header(self, name: str) -> str:
        return dict(self.scope["headers"]).get(name.encode(), b"").decode()

    # HTTP

    async def start(self, status: int = 200, **headers: str) -> None:
        headers = {"content_type": "text/event-stream", **headers}
        pairs = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        start = {"type": "http.response.start", "status": status, "headers": pairs}
        await self.send(start)

    async def write(self, data: str | bytes) -> None:
        body = data.encode() if isinstance(data, str) else data
        await self.send({"type": "http.response.body", "body": body, "more_body": True})

    async def refuse(self, status: int, problem: dict[str, Any], **headers: str) -> None:
        await self.start(status, content_type="application/problem+json", **headers)
        await self.write(json.dumps(problem))

    # Both

    async def say(self, kind: str, **fields: Any) -> None:
        message = json.dumps({"type": kind, **fields})
        if self.scope["type"] == "websocket":
            await self.send({"type": "websocket.send", "text": message})
        else:
            await self.write(f"event: {kind}\ndata: {message}\n\n")

    async def tell_position(self, position: int, **fields: Any) -> None:
        fields = {"ticket": "t1", "upstream": "sim", "ahead": position - 1, "eta": [2, 4], **fields}
        await self.say("position", position=position, **fields)

    async def until_gone(self) -> None:
        await asyncio.wait_for(self.is_gone.wait(), 10)

    async def listen(self) -> None:
        while True:
            message = await self.receive()
            if message["type"] in {"http.disconnect", "websocket.disconnect"}:
                self.is_gone.set()
                return
            if message.get("text"):
                self.said.append(json.loads(message["text"]))


Script = Callable[[Exchange], Awaitable[None]]


class FakeServer:
    """Plays ``scripts``, one for each chat that comes, the last one for all that follow."""

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.exchanges: list[Exchange] = []
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        if scope["type"] == "websocket":
            await self._talk(exchange)
        elif scope["path"] == "/chat/":
            await self._answer(exchange)
        else:
            await self._serve_file(exchange)

    async def _answer(self, exchange: Exchange) -> None:
        exchange.body = json.loads((await exchange.receive())["body"])
        await self._play(exchange)
        await exchange.send({"type": "http.response.body", "body": b""})

    async def _talk(self, exchange: Exchange) -> None:
        await exchange.receive()
        await exchange.send({"type": "websocket.accept"})
        exchange.body = json.loads((await exchange.receive())["text"])
        await self._play(exchange)
        await exchange.send({"type": "websocket.close"})

    async def _play(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        listener = asyncio.create_task(exchange.listen())
        try:
            await script(exchange)
        finally:
            listener.cancel()

    async def _serve_file(self, exchange: Exchange) -> None:
        name = exchange.scope["path"].removeprefix("/") or "client.html"
        folder = CLIENT if name.startswith("llm_throttle/") else HERE / "pages"
        path = folder / Path(name).name
        if not path.is_file():
            await exchange.start(404, content_type="text/plain")
        else:
            kind = TYPES[path.suffix]
            await exchange.start(content_type=kind, content_security_policy=POLICY)
            await exchange.write(path.read_bytes())
        await exchange.send({"type": "http.response.body", "body": b""})


class Relay:
    """Stays at its address while the server that answers there is another one for each test."""

    def __init__(self) -> None:
        self.server = FakeServer()
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.server(scope, receive, send)

    def replace(self) -> FakeServer:
        self.server = FakeServer()
        self.server.url = self.url
        return self.server


class QuietServer(uvicorn.Server):
    """A server whose start can be waited for and which leaves the signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


@asynccontextmanager
async def running(relay: Relay) -> AsyncIterator[Relay]:
    listener = listen(0)
    config = uvicorn.Config(relay, lifespan="off", log_level="critical", ws="websockets-sansio")
    uvicorn_server = QuietServer(config)
    task = asyncio.create_task(uvicorn_server.serve(sockets=[listener]))
    await uvicorn_server.is_up.wait()
    relay.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    yield relay
    uvicorn_server.should_exit = uvicorn_server.force_exit = True
    await task
