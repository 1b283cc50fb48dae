"""The simulated provider, with a diary: who came and went when, and how many were there.

A message may say who sends it and how long its call takes: ``client-7 takes 1.5``. Times are
those of ``time.monotonic``, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextvars import ContextVar
from typing import Any
from urllib.parse import parse_qs

from demo_project.children import end_with_parent
from demo_project.hang_up import HangUpProtocol
from demo_project.provider import (
    Message,
    Provider,
    Receive,
    Replay,
    Send,
    Stats,
    read_body,
    send_json,
)
from demo_project.serving import LOOPBACK, listen, serve

NAME = re.compile(r"client-[\w-]+")
TAKES = re.compile(r"takes ([\d.]+)")

who: ContextVar[str] = ContextVar("who", default="")
takes: ContextVar[float | None] = ContextVar("takes", default=None)


class Diary(Stats):
    """Entries are [time, "begin" or "end", in flight after it, who, whether it was served]."""

    def __init__(self) -> None:
        self.entries: list[list[Any]] = []
        self.written = asyncio.Condition()
        self._in_flight = 0
        self._served = 0
        self._last_served = ""
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.entries.clear()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @in_flight.setter
    def in_flight(self, number: int) -> None:
        if number == self._in_flight:
            return
        kind = "begin" if number > self._in_flight else "end"
        self._in_flight = number
        served, self._last_served = kind == "end" and self._last_served == who.get(), ""
        self.entries.append([time.monotonic(), kind, number, who.get(), served])
        self._tell()

    @property
    def served(self) -> int:
        return self._served

    @served.setter
    def served(self, number: int) -> None:
        self._served = number
        self._last_served = who.get()

    def _tell(self) -> None:
        async def tell() -> None:
            async with self.written:
                self.written.notify_all()

        self._telling = asyncio.ensure_future(tell())


class WatchedProvider(Provider):
    def __init__(self, *, capacity: int, latency: float, jitter: float, seed: int) -> None:
        super().__init__(capacity=capacity, latency=latency, jitter=jitter, seed=seed)
        self.stats = self.diary = Diary()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        match scope["path"]:
            case "/stats/diary":
                await send_json(send, 200, {"entries": self.diary.entries})
            case "/stats/set":
                for name, value in json.loads(await read_body(receive)).items():
                    setattr(self, name, value)
                await send_json(send, 200, {})
            case "/stats/until":
                await self._answer_until(parse_qs(scope["query_string"].decode()), send)
            case _:
                await super().__call__(scope, receive, send)

    async def _answer_until(self, query: dict[str, list[str]], send: Send) -> None:
        """Answer once the diary has an entry of this kind by this client, or an in_flight."""
        wanted = {name: values[0] for name, values in query.items()}

        def is_there() -> bool:
            if "in_flight" in wanted:
                return self.diary.in_flight == int(wanted["in_flight"])
            return any(
                entry[1] == wanted["kind"] and entry[3] == wanted["who"]
                for entry in self.diary.entries
            )

        try:
            async with asyncio.timeout(float(wanted["seconds"])), self.diary.written:
                await self.diary.written.wait_for(is_there)
        except TimeoutError:
            await send_json(send, 504, {"in_flight": self.diary.in_flight})
        else:
            await send_json(send, 200, {"in_flight": self.diary.in_flight})

    async def _answer_call(self, scope: Message, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        text = body.decode(errors="replace")
        if found := NAME.search(text):
            who.set(found[0])
        if found := TAKES.search(text):
            takes.set(float(found[1]))
        await super()._answer_call(scope, Resumed(body, receive), send)

    def service_time(self) -> float:
        wanted = takes.get()
        return super().service_time() if wanted is None else wanted


class Resumed(Replay):
    """What was read already, then the rest of the connection's life."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        super().__init__(body)
        self.receive = receive

    async def __call__(self) -> Message:
        return await (self.receive() if self.is_read else super().__call__())


def main() -> None:
    end_with_parent()
    provider = WatchedProvider(capacity=30, latency=1.0, jitter=0.0, seed=1)
    listener = listen(0)
    address = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
    serve(provider, listener, address, http=HangUpProtocol)


if __name__ == "__main__":
    main()
