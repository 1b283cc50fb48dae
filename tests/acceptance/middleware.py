"""A middleware that holds finished responses back, as one that awaits something does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from django.http import HttpRequest, HttpResponseBase
from django.utils.decorators import async_only_middleware


@async_only_middleware
def dawdle(
    get_response: Callable[[HttpRequest], Awaitable[HttpResponseBase]],
) -> Callable[[HttpRequest], Awaitable[HttpResponseBase]]:
    async def middleware(request: HttpRequest) -> HttpResponseBase:
        response = await get_response(request)
        await asyncio.sleep(float(request.GET.get("dawdle", 0)))
        return response

    return middleware
