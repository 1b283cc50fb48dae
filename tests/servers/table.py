"""The table of servers, kinds of view, bodies and endings: what must be true in each cell."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

from django_redis import get_redis_connection

from llm_throttle import aadmit
from llm_throttle.identity import Identity

from . import settings as project
from .rig import ASGI, COMMANDS, Server, get, request, until
from .views import KINDS, LONG_AGO, PAUSE, THINKS

BODIES = ("plain", "streamed")
ENDINGS = (
    "normal end",
    "exception in the view",
    "exception in the body",
    "left queued",
    "left before the first byte",
    "left mid-stream",
    "replaced",
    "304",
)
WAIT_BUDGET = 3.0
KEEP_ALIVE = float(project.LLM_THROTTLE["KEEP_ALIVE"])
CLOSES_WITHIN = 2.0  # of a sync body that is in the midst of a chunk
AT_ONCE = 1.0

IMPOSSIBLE = {
    "a": "a plain response is one piece: nothing of it can fail or be left in the middle",
    "b": "WSGI serves no async body: Django collects it whole first, and warns of it",
}
NOTES = {
    "c": "daphne leaves the connection open, so the client notices by its own time limit: "
    "catch errors within the body",
}


class Cell(NamedTuple):
    server: str
    kind: str
    body: str
    ending: str

    @property
    def upstream(self) -> str:
        words = f"{self.server}-{self.kind}-{self.body}"
        return words.lower().replace(" ", "-")

    @property
    def is_async(self) -> bool:
        return self.kind in ("async", "adrf")

    @property
    def is_asgi(self) -> bool:
        return self.server in ASGI

    @property
    def impossible(self) -> str | None:
        """The letter of the reason why there is nothing to try."""
        if self.body == "plain" and self.ending in ("exception in the body", "left mid-stream"):
            return "a"
        is_read = self.ending not in ("exception in the view", "left queued", "replaced", "304")
        if self.body == "streamed" and self.is_async and not self.is_asgi and is_read:
            return "b"
        return None

    @property
    def note(self) -> str:
        is_c = self.server == "daphne" and self.ending == "exception in the body"
        return "c" if is_c and not self.impossible else ""

    @property
    def bound(self) -> float:
        """Seconds within which the slot, or the place in the queue, is free."""
        if self.ending == "left queued" and not self.is_asgi:
            return WAIT_BUDGET + AT_ONCE
        if self.ending == "left before the first byte" and not (self.is_async and self.is_asgi):
            if self.body == "plain":
                return THINKS + AT_ONCE  # nobody can stop a thread
            silence = 0.0 if self.is_asgi else 2 * KEEP_ALIVE
            return silence + CLOSES_WITHIN + AT_ONCE
        return AT_ONCE


ALL = [
    Cell(server, kind, body, ending)
    for server in COMMANDS
    for kind in KINDS
    for body in BODIES
    for ending in ENDINGS
]


@dataclass(frozen=True)
class Result:
    """How long the slot took to be free, and what was wrong, if anything."""

    seconds: float = 0.0
    wrong: str = ""
    is_late: bool = False


async def run(server: Server, cells: list[Cell]) -> dict[Cell, Result]:
    """Try all cells of one server, those of one upstream after one another."""
    lanes: dict[str, list[Cell]] = {}
    for cell in cells:
        lanes.setdefault(cell.upstream, []).append(cell)
    at_once = asyncio.Semaphore(12)
    found: dict[Cell, Result] = {}

    async def lane(cells: list[Cell]) -> None:
        async with at_once:
            for cell in cells:
                found[cell] = await attempt(server, cell)

    await asyncio.gather(*map(lane, lanes.values()))
    for cell, result in found.items():
        if result.is_late:  # once more without the others, which share the processor
            found[cell] = await attempt(server, cell)
    return found


async def attempt(server: Server, cell: Cell) -> Result:
    try:
        async with asyncio.timeout(cell.bound + 20):
            seconds = await TRIES[cell.ending](server, cell)
    except TimeoutError:
        return Result(wrong="took too long")
    except (AssertionError, OSError, asyncio.IncompleteReadError) as error:
        return Result(wrong=f"{type(error).__name__}: {error}")
    if seconds > cell.bound:
        return Result(seconds, f"free after {seconds:.2f} s, not within {cell.bound} s", True)
    return Result(seconds)


async def hold(server: Server, kind: str) -> list[str]:
    """Three streams at once over two slots: what the views noted, in order."""
    upstream = holding(server.name, kind)
    path = f"/{kind}/streamed/?upstream={upstream}&do=hold"
    answers = await asyncio.gather(*(get(server, path, flow=str(n)) for n in range(3)))
    assert [answer.status for answer in answers] == [200] * 3
    assert all(answer.is_whole for answer in answers)
    await until(upstream, 2, in_flight=0)
    return notes(upstream)


def holding(server: str, kind: str) -> str:
    return f"{server}-{kind}-holding".lower().replace(" ", "-")


def url(cell: Cell, do: str) -> str:
    return f"/{cell.kind}/{cell.body}/?upstream={cell.upstream}&do={do}"


async def until_free(cell: Cell) -> float:
    return await until(cell.upstream, cell.bound + 5, in_flight=0, waiting=0)


def notes(upstream: str) -> list[str]:
    """What the views have noted since the last look."""
    key = f"notes:{upstream}"
    client = get_redis_connection()
    found = [note.decode() for note in client.lrange(key, 0, -1)]
    client.delete(key)
    return found


async def normal_end(server: Server, cell: Cell) -> float:
    answer = await get(server, url(cell, "end"))
    seconds = await until_free(cell)
    assert answer.status == 200
    assert answer.is_whole
    is_json = answer.headers["content-type"].startswith("application/json")
    whole = b'"done"' if is_json else b"done"
    assert answer.body == (whole if cell.body == "plain" else b"data: one\n\ndata: more\n\n")
    assert answer.headers["x-llm-throttle-tier"] == "any"
    assert notes(cell.upstream) == ["began 1", "closed 1"][: 2 if cell.body == "streamed" else 1]
    return seconds


async def exception_in_the_view(server: Server, cell: Cell) -> float:
    answer = await get(server, url(cell, "raise"))
    seconds = await until_free(cell)
    assert answer.status == 500
    assert notes(cell.upstream) == ["began 1"]
    return seconds


async def exception_in_the_body(server: Server, cell: Cell) -> float:
    async with request(server, url(cell, "raise-in-body")) as connection:
        assert (await connection.head()).status == 200
        assert await connection.chunk() == b"data: one\n\n"
        seconds = await until_free(cell)
        if not cell.note:
            answer = await connection.rest()
            assert answer.body == b"data: one\n\n"
            assert not answer.is_whole, "the client must see that something is missing"
    assert notes(cell.upstream) == ["began 1", "closed 1"]
    return seconds


async def left_queued(server: Server, cell: Cell) -> float:
    identity = Identity("holder", "any")
    async with aadmit(cell.upstream, identity=identity):
        async with request(server, url(cell, "end")):
            await until(cell.upstream, 5, waiting=1)
        seconds = await until(cell.upstream, cell.bound + 5, waiting=0)
    await until_free(cell)
    assert notes(cell.upstream) == [], "nobody was there to be served"
    return seconds


async def left_before_the_first_byte(server: Server, cell: Cell) -> float:
    async with request(server, url(cell, "think")):
        await until(cell.upstream, 5, in_flight=1)
        await asyncio.sleep(0.3)
    seconds = await until_free(cell)
    if cell.body == "streamed":
        if cell.is_async:
            assert notes(cell.upstream) == ["began 1", "closed 1"]
        else:  # the thread sleeps on
            await asyncio.sleep(max(0.0, THINKS - seconds))
            notes(cell.upstream)
    else:
        notes(cell.upstream)
    return seconds


async def left_mid_stream(server: Server, cell: Cell) -> float:
    async with request(server, url(cell, "go-on")) as connection:
        await connection.head()
        assert await connection.chunk()
        await asyncio.sleep(2.5 * PAUSE)
    seconds = await until_free(cell)
    assert notes(cell.upstream) == ["began 1", "closed 1"], (
        "the call is closed before the slot is free"
    )
    return seconds


async def replaced(server: Server, cell: Cell) -> float:
    answer = await get(server, url(cell, "replace"))
    seconds = await until_free(cell)
    assert (answer.status, answer.body, answer.is_whole) == (200, b"replaced", True)
    assert notes(cell.upstream) == ["began 1"]
    return seconds


async def not_modified(server: Server, cell: Cell) -> float:
    answer = await get(server, url(cell, "end"), headers={"If-Modified-Since": LONG_AGO})
    seconds = await until_free(cell)
    assert (answer.status, answer.body) == (304, b"")
    assert notes(cell.upstream) == ["began 1"]
    return seconds


TRIES = dict(
    zip(
        ENDINGS,
        [
            normal_end,
            exception_in_the_view,
            exception_in_the_body,
            left_queued,
            left_before_the_first_byte,
            left_mid_stream,
            replaced,
            not_modified,
        ],
        strict=True,
    )
)


def drawn(results: dict[Cell, Result]) -> list[str]:
    """The table as lines: seconds until the slot was free, a letter for a reason, or a fault."""
    lines = [f"{'seconds until the slot is free':34}" + "".join(f"{e[:26]:>28}" for e in ENDINGS)]
    for server in COMMANDS:
        for kind in KINDS:
            for body in BODIES:
                cells = [Cell(server, kind, body, ending) for ending in ENDINGS]
                if any(cell in results for cell in cells):
                    head = f"{server:17}{kind:9}{body:8}"
                    lines.append(head + "".join(f"{_drawn(c, results):>28}" for c in cells))
    return [*lines, *(f"{letter}) {text}" for letter, text in (IMPOSSIBLE | NOTES).items())]


def _drawn(cell: Cell, results: dict[Cell, Result]) -> str:
    if cell.impossible:
        return f"{cell.impossible})"
    result = results.get(cell)
    if result is None:
        return ""
    return "FAULT" if result.wrong else f"{result.seconds:.2f} ≤ {cell.bound:g}{cell.note:>2}"
