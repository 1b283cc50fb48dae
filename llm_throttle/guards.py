"""What stands around a view's handler: a slot, headers, and a refusal where there is none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.handlers.asgi import ASGIRequest
from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpRequest, JsonResponse
from django.http.response import HttpResponseBase
from django.utils.functional import LazyObject

from .admission import aadmit, admit
from .exceptions import LeaseLost, Refused, UnknownUpstream
from .identity import Caller, Identity, aidentify, identify
from .lease import Lease
from .queue_events import (
    AsyncQueueEvents,
    QueueEvents,
    as_response,
    refused_response,
    wants_problem,
)
from .request import Request
from .response_events import Call
from .retry import retry_after
from .streaming import lend
from .tickets import ticket_of

logger = logging.getLogger(__name__)

Handler = Callable[..., Any]
Take = Callable[[Lease], None]

ANSWERED = (Refused, UnknownUpstream, LeaseLost)
"""What becomes a response of its own; every other error is the view's and Django's."""


def ignore(lease: Lease) -> None:
    """Nobody wants to know the lease."""


def guard(handler: Handler, upstream: str, take: Take = ignore) -> Handler:
    """The handler, run only while it holds a slot; ``take`` is told of the lease."""
    if iscoroutinefunction(handler):
        return async_guard(handler, upstream, take)
    return sync_guard(handler, upstream, take)


def sync_guard(handler: Handler, upstream: str, take: Take = ignore) -> Handler:
    def guarded(request: Any, *args: Any, **kwargs: Any) -> Any:
        _receive_body(request)
        admission = admit(upstream, user=getattr(request, "user", None), request=request)
        try:
            with admission as lease:
                take(lease)
                response = handler(request, *args, **kwargs)
                if mark(response, lease):
                    _lend(response, lease, request)
                    admission.hand_over()
                return response
        except ANSWERED as error:
            return _answer(request, _as_refusal(error, upstream))

    return guarded


def async_guard(handler: Handler, upstream: str, take: Take = ignore) -> Handler:
    async def guarded(request: Any, *args: Any, **kwargs: Any) -> Any:
        _receive_body(request)
        admission = aadmit(upstream, user=await _user(request), request=request)
        try:
            async with admission as lease:
                take(lease)
                response = await handler(request, *args, **kwargs)
                if mark(response, lease):
                    _lend(response, lease, request)
                    admission.hand_over()
                return response
        except ANSWERED as error:
            return _answer(request, _as_refusal(error, upstream))

    return guarded


def guard_with_events(
    handler: Handler,
    upstream: str,
    take: Take = ignore,
    finish: Handler | None = None,
) -> Handler:
    """The handler, run inside a stream of events when its slot is there.

    ``finish`` makes of what it returns a response that can be read.
    """

    async def guarded(request: Any, *args: Any, **kwargs: Any) -> Any:
        call = Call(handler, request, args, kwargs, take, finish)
        try:
            identity = await aidentify(Caller(upstream, await _user(request), request))
            body = await AsyncQueueEvents.open(_returning(request, upstream, identity), call)
        except ANSWERED as error:
            return _answer_with_events(request, _as_refusal(error, upstream))
        return as_response(body)

    def sync_guarded(request: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_asgi(request):
            return async_to_sync(guarded)(request, *args, **kwargs)
        _receive_body(request)
        call = Call(handler, request, args, kwargs, take, finish)
        try:
            identity = identify(Caller(upstream, getattr(request, "user", None), request))
            body = QueueEvents.open(_returning(request, upstream, identity), call)
        except ANSWERED as error:
            return _answer_with_events(request, _as_refusal(error, upstream))
        return as_response(body)

    async def async_guarded(request: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_asgi(request):
            raise ImproperlyConfigured(
                "queue_events under WSGI needs a sync view: Django would collect an async body "
                "whole before it sends anything. Serve it by ASGI, or in development put daphne "
                "first in INSTALLED_APPS."
            )
        return await guarded(request, *args, **kwargs)

    return async_guarded if iscoroutinefunction(handler) else sync_guarded


def _returning(request: Any, upstream: str, identity: Identity) -> Request:
    """A request whose client is told its ticket, and may have come back with one."""
    return Request(upstream, identity, ticket=ticket_of(request), is_known=True)


def _answer_with_events(request: Any, refusal: Refused) -> HttpResponseBase:
    """A refusal known before the first byte: as a response where that was asked for."""
    if wants_problem(request):
        return _answer(request, refusal)
    return refused_response(refusal)


def _is_asgi(request: Any) -> bool:
    return isinstance(django_request(request), ASGIRequest)


def _lend(response: Any, lease: Lease, request: Any) -> None:
    request = django_request(request)
    lend(response, lease, is_asgi=_is_asgi(request), request=request)


def _receive_body(request: Any) -> None:
    """Under WSGI, have the body before a slot: who sends half of it must not hold one.

    Not what the view may want to read as it comes: uploads, and what is too large for a body.
    """
    request = django_request(request)
    if not isinstance(request, WSGIRequest) or getattr(request, "_read_started", True):
        return
    most = django_settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    length = int(request.META.get("CONTENT_LENGTH") or 0)
    if request.content_type != "multipart/form-data" and (most is None or length <= most):
        _ = request.body


async def _user(request: Any) -> Any:
    """The user without blocking the loop: ``request.user`` may read the session's database.

    What a middleware put there in the session's place counts, and REST framework's requests,
    which are not Django's, have authenticated by now by their own way.
    """
    user = getattr(request, "user", None)
    if not isinstance(request, HttpRequest) or not isinstance(user, LazyObject):
        return user
    source = getattr(user.__dict__.get("_setupfunc"), "__module__", "")
    if hasattr(request, "auser") and source == "django.contrib.auth.middleware":
        return await request.auser()
    await sync_to_async(bool)(user)
    return user


def mark(response: Any, lease: Lease) -> bool:
    """Say in the headers what the request got; True where the body is streamed."""
    if not isinstance(response, HttpResponseBase):
        return False
    response["X-LLM-Throttle-Ticket"] = lease.ticket
    response["X-LLM-Throttle-Tier"] = lease.tier
    response["X-LLM-Throttle-Waited-Ms"] = str(int(lease.waited * 1000))
    return bool(response.streaming)


def _as_refusal(error: Exception, upstream: str) -> Refused:
    """What the client is told where the request cannot have a slot, or lost it."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, LeaseLost):
        return Refused("lease_lost", upstream=upstream, retry_after=retry_after("lease_lost", 0))
    logger.error("%s Add it in the admin, or name another on the view.", error)
    return Refused("unserviceable", upstream=upstream, retry_after=retry_after("unserviceable", 0))


def _answer(request: Any, refusal: Refused) -> JsonResponse:
    """The refusal as a response, or raised where REST framework makes responses of exceptions."""
    if isinstance(request, HttpRequest):
        return refusal_response(refusal)
    from .rest_framework import ThrottleRefused

    raise ThrottleRefused(refusal) from refusal


def refusal_response(refusal: Refused) -> JsonResponse:
    """A refusal as ``application/problem+json``, with the same facts in header and body."""
    response = JsonResponse(
        refusal.as_problem(),
        status=refusal.status_code,
        content_type="application/problem+json",
    )
    if refusal.retry_after is not None:
        response["Retry-After"] = str(refusal.retry_after)
    if refusal.tier:
        response["X-LLM-Throttle-Tier"] = refusal.tier
    return response


def django_request(request: Any) -> Any:
    """Django's own request, also where REST framework has wrapped it."""
    return getattr(request, "_request", request)
