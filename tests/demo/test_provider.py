"""The independent witness: it must be right before anything else is measured by it."""

from __future__ import annotations

import ast
import asyncio
import time
from pathlib import Path

import anthropic
import openai
import pytest

from demo_project import provider as provider_module
from demo_project.load_client import fetch
from demo_project.provider import THINKING, due_times
from demo_project.witness import Witness

from .conftest import Running, StartProvider, eventually

HELLO = [{"role": "user", "content": "Hello"}]
SDKS = ["anthropic", "openai"]


async def reply(running: Running, sdk: str) -> str:
    """One plain answer."""
    if sdk == "anthropic":
        async with running.anthropic() as client:
            message = await client.messages.create(model="m", max_tokens=99, messages=HELLO)
            return message.content[0].text
    async with running.openai() as client:
        completion = await client.chat.completions.create(model="m", messages=HELLO)
        return completion.choices[0].message.content


async def pieces(running: Running, sdk: str, at_most: int | None = None) -> list[str]:
    """The pieces of a streamed answer; the stream is closed after *at_most* of them."""
    texts: list[str] = []
    if sdk == "anthropic":
        async with (
            running.anthropic() as client,
            client.messages.stream(model="m", max_tokens=99, messages=HELLO) as stream,
        ):
            async for text in stream.text_stream:
                texts.append(text)
                if len(texts) == at_most:
                    break
        return texts
    async with running.openai() as client:
        chunks = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
        async with chunks:
            async for chunk in chunks:
                if chunk.choices and chunk.choices[0].delta.content:
                    texts.append(chunk.choices[0].delta.content)
                if len(texts) == at_most:
                    break
    return texts


@pytest.mark.parametrize("sdk", SDKS)
async def test_the_sdks_get_plain_answers(start_provider: StartProvider, sdk: str) -> None:
    running = await start_provider()
    assert await reply(running, sdk)
    assert running.provider.stats.as_json() == {
        "in_flight": 0,
        "peak": 1,
        "served": 1,
        "refused_429": 0,
    }


@pytest.mark.parametrize("sdk", SDKS)
async def test_the_sdks_get_the_same_answer_in_pieces(
    start_provider: StartProvider, sdk: str
) -> None:
    running = await start_provider()
    texts = await pieces(running, sdk)
    assert len(texts) > 1
    assert "".join(texts) == await reply(running, sdk)


@pytest.mark.parametrize("sdk", SDKS)
async def test_calls_above_the_capacity_get_429_and_show_in_the_peak(
    start_provider: StartProvider, sdk: str
) -> None:
    running = await start_provider(capacity=3, latency=0.4)
    answers = await asyncio.gather(
        *(pieces(running, sdk) for _ in range(5)), return_exceptions=True
    )
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    assert [type(error) for error in refused] == [
        {"anthropic": anthropic.RateLimitError, "openai": openai.RateLimitError}[sdk]
    ] * 2
    assert {error.response.headers["retry-after"] for error in refused} == {"1"}
    assert running.provider.stats.as_json() == {
        "in_flight": 0,
        "peak": 4,
        "served": 3,
        "refused_429": 2,
    }


@pytest.mark.parametrize("sdk", SDKS)
async def test_a_client_that_leaves_mid_stream_is_not_in_flight_any_more(
    start_provider: StartProvider, sdk: str
) -> None:
    running = await start_provider(latency=3.0)
    assert len(await pieces(running, sdk, at_most=1)) == 1
    await eventually(lambda: running.provider.stats.in_flight == 0, seconds=0.5)
    assert running.provider.stats.served == 0


async def test_a_client_that_leaves_while_the_model_thinks_is_not_in_flight_any_more(
    start_provider: StartProvider,
) -> None:
    running = await start_provider(latency=60.0)
    call = asyncio.create_task(pieces(running, "anthropic"))
    await eventually(lambda: running.provider.stats.in_flight == 1)
    call.cancel()
    await eventually(lambda: running.provider.stats.in_flight == 0, seconds=0.5)
    assert running.provider.stats.served == 0


async def test_a_slot_can_be_taken_in_the_moment_of_the_last_byte(
    start_provider: StartProvider,
) -> None:
    running = await start_provider(capacity=1, latency=0.0)
    for _ in range(20):
        await pieces(running, "openai")
    assert running.provider.stats.refused_429 == 0
    assert running.provider.stats.served == 20


async def test_latency_is_the_time_of_the_whole_call(start_provider: StartProvider) -> None:
    running = await start_provider(latency=0.5)
    started = time.monotonic()
    await asyncio.gather(reply(running, "openai"), pieces(running, "openai"))
    assert 0.5 <= time.monotonic() - started < 1.0
    assert 500 <= (await Witness(running.address).service_ms()) < 600


async def test_jitter_spreads_the_times_and_a_seed_repeats_them(
    start_provider: StartProvider,
) -> None:
    times = []
    for _ in range(2):
        running = await start_provider(latency=1.0, jitter=0.5, seed=7)
        times.append([running.provider.service_time() for _ in range(50)])
        await Witness(running.address).reset()
        assert [running.provider.service_time() for _ in range(50)] == times[-1]
    assert times[0] == times[1]
    assert 0.5 <= min(times[0]) < 0.7 < 1.3 < max(times[0]) <= 1.5


async def test_the_stats_can_be_read_and_reset(start_provider: StartProvider) -> None:
    running = await start_provider()
    witness = Witness(running.address)
    await reply(running, "openai")
    assert (await witness.stats())["served"] == 1
    await witness.reset()
    assert await witness.stats() == {"in_flight": 0, "peak": 0, "served": 0, "refused_429": 0}


async def test_a_body_that_makes_no_sense_is_answered_at_once(
    start_provider: StartProvider,
) -> None:
    running = await start_provider(latency=60.0)
    answer = await fetch(running.address, "POST", "/v1/messages", body=b"{")
    assert answer.status in {400, 422}
    assert running.provider.stats.in_flight == 0


def test_the_first_piece_comes_after_some_thought_and_the_last_at_the_end() -> None:
    assert due_times(1, 2.0) == [2.0]
    times = due_times(4, 2.0)
    assert times[0] == 2.0 * THINKING
    assert times[-1] == 2.0
    assert times == sorted(times)


def test_the_witness_does_not_know_the_app() -> None:
    tree = ast.parse(Path(provider_module.__file__).read_text())
    imported = [
        name
        for node in ast.walk(tree)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in getattr(node, "names", [])]
        )
    ]
    assert not [name for name in imported if name.startswith("llm_throttle")]
