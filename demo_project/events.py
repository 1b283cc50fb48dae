"""A reply as server-sent events that always come to a definite end."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from anthropic import APIStatusError as AnthropicStatusError
from openai import APIStatusError as OpenAIStatusError

logger = logging.getLogger(__name__)

Report = Callable[[int, float | None], object]


async def reply_events(texts: AsyncIterator[str], report: Report) -> AsyncIterator[bytes]:
    """``token`` events and ``done``, or ``error`` where the provider fails.

    *report* hears the provider's status and Retry-After. An error does not leave this iterator:
    servers differ in what they do with one, and some never end the client's connection.
    """
    try:
        async with aclosing(texts):  # type: ignore[type-var]  # async generators, both
            async for text in texts:
                yield encode("token", text=text)
    except Exception as error:
        yield broken_off(error, report)
    else:
        yield encode("done")


def broken_off(error: Exception, report: Report) -> bytes:
    """The last event of a reply that failed; *report* hears what the provider said."""
    if isinstance(error, AnthropicStatusError | OpenAIStatusError):
        report(error.status_code, retry_after(error.response.headers.get("retry-after")))
        return encode("error", detail=f"The provider answered {error.status_code}.")
    logger.error("The provider's reply broke off", exc_info=error)
    return encode("error", detail="The provider's reply broke off.")


def retry_after(header: str | None) -> float | None:
    try:
        return float(header or "")
    except ValueError:
        return None


def encode(kind: str, **fields: Any) -> bytes:
    return f"data: {json.dumps({'type': kind, **fields}, ensure_ascii=False)}\n\n".encode()
