"""The provider's answers through the official SDKs, as they stream in."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from anthropic import AsyncAnthropic
from django.conf import settings
from openai import AsyncOpenAI

from demo_project.prompts import Prompt

MAX_TOKENS = 512
ANY_KEY = "simulated"  # the simulated provider takes every key; a real one asks for its own


@dataclass(frozen=True, slots=True)
class Clients:
    """One connection pool per SDK."""

    anthropic: AsyncAnthropic
    openai: AsyncOpenAI

    @classmethod
    def to(cls, address: str) -> Clients:
        common: dict[str, Any] = {
            # A retry inside a slot would be a second call that nobody counted.
            "max_retries": 0,
            "timeout": settings.UPSTREAM_TIMEOUT,
        }
        return cls(
            AsyncAnthropic(base_url=address, api_key=key("ANTHROPIC_API_KEY"), **common),
            AsyncOpenAI(base_url=f"{address}/v1", api_key=key("OPENAI_API_KEY"), **common),
        )


def key(name: str) -> str:
    return os.environ.get(name) or ANY_KEY


# A connection belongs to the event loop it was opened in. A server worker has one loop; tests and
# async_to_sync have many.
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Clients] = WeakKeyDictionary()


def clients() -> Clients:
    """The clients of the running event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = Clients.to(settings.UPSTREAM_URL)
    return _clients[loop]


def reply(prompt: Prompt) -> AsyncIterator[str]:
    """The answer, piece by piece. Closing the iterator closes the call."""
    return REPLIES[prompt.sdk](prompt.message)


async def reply_by_anthropic(message: str) -> AsyncIterator[str]:
    call = clients().anthropic.messages.stream(
        model=settings.ANTHROPIC_MODEL,
        max_tokens=MAX_TOKENS,
        messages=[{"role": "user", "content": message}],
    )
    async with call as stream:
        async for text in stream.text_stream:
            yield text


async def reply_by_openai(message: str) -> AsyncIterator[str]:
    stream = await clients().openai.chat.completions.create(
        model=settings.OPENAI_MODEL,
        max_completion_tokens=MAX_TOKENS,
        messages=[{"role": "user", "content": message}],
        stream=True,
    )
    async with stream:
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content


REPLIES = {"anthropic": reply_by_anthropic, "openai": reply_by_openai}
