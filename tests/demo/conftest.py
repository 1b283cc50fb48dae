"""A simulated provider that listens on a real port, in the event loop of the test."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest
import uvicorn
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from demo_project.hang_up import HangUpProtocol
from demo_project.load_client import Address
from demo_project.provider import Provider
from demo_project.serving import listen


class SignallingServer(uvicorn.Server):
    """A server whose start can be waited for."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


@dataclass
class Running:
    """A provider at work, and where."""

    provider: Provider
    address: Address

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    def anthropic(self) -> AsyncAnthropic:
        return AsyncAnthropic(base_url=self.url, api_key="any", max_retries=0)

    def openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0)


StartProvider = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start_provider() -> AsyncIterator[StartProvider]:
    """Start a provider with the arguments of ``Provider``."""
    servers: list[tuple[SignallingServer, asyncio.Task[None]]] = []

    async def start(*, capacity: int = 5, latency: float = 0.1, **options: float) -> Running:
        provider = Provider(capacity=capacity, latency=latency, **options)
        listener = listen(0)
        config = uvicorn.Config(provider, lifespan="off", log_level="warning", http=HangUpProtocol)
        server = SignallingServer(config)
        servers.append((server, asyncio.create_task(server.serve(sockets=[listener]))))
        await server.is_up.wait()
        return Running(provider, listener.getsockname())

    yield start
    for server, task in servers:
        server.should_exit = server.force_exit = True
        await task


async def eventually(condition: Callable[[], bool], seconds: float = 2.0) -> None:
    """Return once *condition* holds; a test that waits for long has failed."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)
