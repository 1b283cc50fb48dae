"""The demo's pages load nothing from elsewhere and run no inline script or style."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import iscoroutinefunction
from typing import Any

from django.http import HttpRequest, HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

DIRECTIVES = {
    "default-src": "'self'",
    "img-src": "'self' data:",
    "object-src": "'none'",
    "base-uri": "'none'",
    "form-action": "'self'",
    "frame-ancestors": "'none'",
}

Handler = Callable[[HttpRequest], Any]


def policy(other: Mapping[str, str] | None = None) -> str:
    """The content security policy, with *other* sources for some of its directives."""
    directives = DIRECTIVES | dict(other or {})
    return "; ".join(f"{name} {sources}" for name, sources in directives.items())


@sync_and_async_middleware
def content_security_policy(get_response: Handler) -> Handler:
    def policed(response: HttpResponseBase) -> HttpResponseBase:
        response.headers.setdefault("Content-Security-Policy", policy())
        return response

    if iscoroutinefunction(get_response):

        async def middleware(request: HttpRequest) -> HttpResponseBase:
            return policed(await get_response(request))

        return middleware

    def sync_middleware(request: HttpRequest) -> HttpResponseBase:
        return policed(get_response(request))

    return sync_middleware
