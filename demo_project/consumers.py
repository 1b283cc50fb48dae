"""The chat over a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from anthropic import APIStatusError as AnthropicStatusError
from openai import APIStatusError as OpenAIStatusError

from demo_project.events import retry_after
from demo_project.prompts import BadPrompt, Prompt
from demo_project.replies import reply
from demo_project.seeds import UPSTREAM
from llm_throttle.consumers import ThrottledChatConsumer


class ChatConsumer(ThrottledChatConsumer):
    """Waits in line, replies, and goes on listening meanwhile."""

    upstream = UPSTREAM

    async def hear_message(self, message: dict[str, Any]) -> None:
        """Judge a message before it costs a slot or a place in line."""
        try:
            message["prompt"] = Prompt.from_json(message)
        except BadPrompt as problem:
            await self.fail("bad_message", str(problem))
        else:
            await super().hear_message(message)

    async def reply(self, message: dict[str, Any]) -> AsyncIterator[str]:
        try:
            texts = reply(message["prompt"])
            async with aclosing(texts):  # type: ignore[type-var]  # an async generator
                async for text in texts:
                    yield text
        except (AnthropicStatusError, OpenAIStatusError) as error:
            header = error.response.headers.get("retry-after")
            self.lease.report(error.status_code, retry_after(header))
            raise
