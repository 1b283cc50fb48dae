"""Bodies in threads and bodies that show signs of life: each end of each, and what is left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import dropwhile
from typing import Any

import pytest
from django.http import FileResponse, StreamingHttpResponse

from llm_throttle.bodies import Resources, ThreadedBody
from llm_throttle.keep_alive import AsyncKeepAlive, KeepAlive

from .waiting_room import eventually

SOON = 0.05


def body_threads() -> int:
    return sum(thread.name == "llm-throttle-body" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = body_threads()
    yield
    assert eventually(lambda: body_threads() <= before), "a thread outlived its body"


class Body:
    """A sync body that says what became of it."""

    def __init__(self, *chunks: Any) -> None:
        self.chunks = iter(chunks)
        self.closed = 0

    def __iter__(self) -> Body:
        return self

    def __next__(self) -> Any:
        chunk = next(self.chunks)
        if isinstance(chunk, Exception):
            raise chunk
        if isinstance(chunk, float):
            time.sleep(chunk)
            return next(self)
        return chunk

    def close(self) -> None:
        self.closed += 1


# A sync body as an async one


async def test_a_threaded_body_is_driven_to_its_end_and_closed() -> None:
    body = Body(b"1", b"2")
    assert [chunk async for chunk in ThreadedBody(body)] == [b"1", b"2"]
    assert body.closed == 1


async def test_what_a_threaded_body_raises_comes_out() -> None:
    body = Body(b"1", ValueError("bad model"))
    threaded = ThreadedBody(body)
    assert await anext(threaded) == b"1"
    with pytest.raises(ValueError, match="bad model"):
        await anext(threaded)
    assert body.closed == 1
    with pytest.raises(StopAsyncIteration):
        await anext(threaded)


async def test_a_threaded_body_is_closed_after_the_chunk_that_it_is_at() -> None:
    body = Body(b"1", 0.2, b"2")
    threaded = ThreadedBody(body)
    await anext(threaded)
    waiting = asyncio.create_task(anext(threaded))
    await asyncio.sleep(SOON)
    waiting.cancel()
    started_at = time.monotonic()
    await threaded.aclose()
    assert time.monotonic() - started_at < 1
    assert body.closed == 1


@pytest.mark.parametrize("steps", [0, 1])
async def test_a_threaded_body_that_is_dropped_leaves_no_thread(steps: int) -> None:
    body = Body(b"1", b"2")
    threaded = ThreadedBody(body)
    for _ in range(steps):
        await anext(threaded)
    del threaded
    assert await asyncio.to_thread(eventually, lambda: body.closed == 1)


# Signs of life


def test_a_silent_body_sends_comments_and_loses_no_chunk() -> None:
    alive = KeepAlive(Body(b"data: 1\n\n", 0.3, b"data: 2\n\n"), SOON)
    chunks = list(alive)
    assert [chunk for chunk in chunks if chunk.startswith(b"data")] == [
        b"data: 1\n\n",
        b"data: 2\n\n",
    ]
    comments = [chunk for chunk in chunks if not chunk.startswith(b"data")]
    assert 1 <= len(comments) <= 8
    assert set(comments) == {b": keep-alive\n\n"}


def once(chunks: Iterable[Any]) -> list[Any]:
    """Each chunk and comment once, without those that came while the thread was starting."""
    return [*dict.fromkeys(dropwhile(lambda chunk: chunk == b": keep-alive\n\n", chunks))]


@pytest.mark.parametrize(
    ("before", "comment"),
    [
        (b"data: 1\n\n", b": keep-alive\n\n"),
        ("data: 1\n\n", b": keep-alive\n\n"),
        (b"data: 1\n", b": keep-alive\n"),  # an event of several lines, of which this is one
        (b"data: 1\r\n\r\n", b": keep-alive\n"),
        (b"data: half of a li", None),
    ],
)
async def test_a_comment_never_breaks_a_line_or_an_event(
    before: bytes | str, comment: bytes | None
) -> None:
    expected = [] if comment is None else [comment]
    alive = KeepAlive(Body(before, 0.2, b"end\n\n"), SOON)
    assert once(alive) == [before, *expected, b"end\n\n"]
    threaded = AsyncKeepAlive(ThreadedBody(Body(before, 0.2, b"end\n\n")), SOON)
    assert once([chunk async for chunk in threaded]) == [before, *expected, b"end\n\n"]


def test_two_chunks_may_share_the_end_of_an_event() -> None:
    chunks = list(KeepAlive(Body(b"data: 1\n", b"\n", 0.2), SOON))
    assert chunks[2] == b": keep-alive\n\n"


def test_what_a_body_raises_comes_out_also_if_it_is_a_timeout() -> None:
    alive = KeepAlive(Body(0.1, TimeoutError("read timed out")), SOON)
    with pytest.raises(TimeoutError, match="read timed out"):
        list(alive)


def test_a_chunk_that_comes_as_the_interval_ends_is_not_an_error() -> None:
    for _ in range(30):
        chunks = list(KeepAlive(Body(0.01, b"data: 1\n\n"), 0.01))
        assert chunks[-1] == b"data: 1\n\n"


def test_closing_a_hanging_body_says_so_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_throttle.keep_alive.CLOSE_WITHIN", 0.1)
    body = Body(b"data: 1\n\n", 0.4, b"data: 2\n\n")
    alive = KeepAlive(body, SOON)
    next(alive)
    next(alive)
    with pytest.raises(TimeoutError):
        alive.close()
    assert eventually(lambda: body.closed == 1)


# One task drives an async body


async def test_a_time_limit_across_chunks_works_as_without_us() -> None:
    async def limited() -> AsyncIterator[bytes]:
        async with asyncio.timeout(0.3):
            while True:
                await asyncio.sleep(SOON)
                yield b"data: 1\n\n"

    chunks = []
    with pytest.raises(TimeoutError):
        async for chunk in AsyncKeepAlive(limited(), 1):
            chunks.append(chunk)
    assert 3 <= len(chunks) <= 6


async def test_a_task_group_may_stay_open_across_chunks() -> None:
    async def grouped() -> AsyncIterator[bytes]:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            group.create_task(queue.put(b"data: 1\n\n"))
            group.create_task(queue.put(b"data: 2\n\n"))
            yield await queue.get()
            yield await queue.get()

    assert len([chunk async for chunk in AsyncKeepAlive(grouped(), 1)]) == 2


@pytest.mark.parametrize("moment", ["silent", "between chunks"])
async def test_a_body_that_is_given_up_cleans_up_undisturbed(moment: str) -> None:
    told: list[str] = []

    async def careful() -> AsyncIterator[bytes]:
        try:
            yield b"data: 1\n\n"
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(SOON)
            told.append("closed")

    alive = AsyncKeepAlive(careful(), 1)
    await anext(alive)
    if moment == "silent":
        waiting = asyncio.create_task(anext(alive))
        await asyncio.sleep(SOON)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await alive.aclose()
    assert told == ["closed"]
    assert alive.is_exhausted
    with pytest.raises(StopAsyncIteration):
        await anext(alive)


async def test_an_error_in_the_clean_up_of_a_body_comes_out_of_its_closing() -> None:
    async def careless() -> AsyncIterator[bytes]:
        try:
            yield b"data: 1\n\n"
            await asyncio.sleep(30)
        finally:
            raise ValueError("already closed")

    alive = AsyncKeepAlive(careless(), 1)
    await anext(alive)
    with pytest.raises(ValueError, match="already closed"):
        await alive.aclose()


async def test_a_body_that_never_began_is_closed_all_the_same() -> None:
    class Stream:
        closed = 0

        def __aiter__(self) -> Stream:
            return self

        async def __anext__(self) -> bytes:
            raise AssertionError

        async def aclose(self) -> None:
            self.closed += 1

    stream = Stream()
    await AsyncKeepAlive(stream, 1).aclose()
    assert stream.closed == 1


# What a response closes at its end


@pytest.mark.django_db
def test_a_file_is_closed_once_by_whoever_owns_the_body(tmp_path: Any) -> None:
    path = tmp_path / "file"
    path.write_text("content")
    file = path.open("rb")
    response = FileResponse(file)
    resources = Resources.of(response, response._iterator)
    assert resources
    response.close()
    assert not file.closed
    assert resources.close() == []
    assert file.closed
    assert not resources


@pytest.mark.django_db
async def test_the_client_of_an_async_sdk_is_closed_by_awaiting() -> None:
    class Call:
        """As the SDKs' async streams are: no ``aclose``, and a ``close`` to be awaited."""

        closed = 0

        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"1"

        async def close(self) -> None:
            self.closed += 1

    call = Call()
    response = StreamingHttpResponse(call)
    resources = Resources.of(response, response._iterator)
    response.close()
    await resources.aclose()
    assert call.closed == 1


def test_a_body_that_is_its_own_resource_is_not_closed_twice() -> None:
    body = Body(b"1")
    response = StreamingHttpResponse(body)
    assert not Resources.of(response, response._iterator)
