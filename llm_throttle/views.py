"""``ThrottledChatMixin`` and ``@throttled``: a slot around a view, from its handler to its body."""

from __future__ import annotations

import functools
import logging
import weakref
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
from django.views import View

from .admission import aadmit, admit
from .disconnects import watch
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

ANSWERED = (Refused, UnknownUpstream, LeaseLost)
"""What becomes a response of its own; every other error is the view's and Django's."""


class ThrottledChatMixin:
    """Put left of the view class: its handlers run only while they hold a slot of ``upstream``.

    Authentication, permissions and method checks come first and cost nothing. A streaming
    response keeps the slot until its body has ended.
    """

    upstream: str = ""
    queue_events: bool = False
    """Answer with server-sent events from the wait on (docs/howto/waiting_clients.md)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if View in order and order.index(View) < order.index(ThrottledChatMixin):
            raise ImproperlyConfigured(
                f"{cls.__qualname__}: put ThrottledChatMixin left of the view class it guards, as "
                f"in class {cls.__name__}(ThrottledChatMixin, View). As it is, the view would "
                "never ask for a slot."
            )

    @classmethod
    def as_view(cls, *args: Any, **kwargs: Any) -> Any:
        upstream = kwargs.get("upstream") or cls.upstream
        if not upstream:
            raise ImproperlyConfigured(f"{cls.__qualname__} does not say its upstream.")
        view = super().as_view(*args, **kwargs)  # type: ignore[misc]  # of the view
        view.throttled_upstream = upstream  # the system checks read it
        return view

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        name = (request.method or "").lower()
        handler = getattr(self, name, None) if name in self._guarded_methods() else None
        if handler is not None:
            watch()
            make = self._guard_with_events if self.queue_events and name != "head" else guard
            setattr(self, name, make(handler, self._named_upstream(), self._take))
        return super().dispatch(request, *args, **kwargs)  # type: ignore[misc]  # of the view

    def _guarded_methods(self) -> set[str]:
        return set(self.http_method_names) - {"options"}  # type: ignore[attr-defined]  # ditto

    def _guard_with_events(
        self, handler: Handler, upstream: str, take: Callable[[Lease], None]
    ) -> Handler:
        return guard_with_events(handler, upstream, take, getattr(self, "finalize_response", None))

    def _named_upstream(self) -> str:
        if not self.upstream:
            raise ImproperlyConfigured(f"{type(self).__name__} does not say its upstream.")
        return self.upstream

    @property
    def lease(self) -> Lease:
        """What the handler and its body hold, to ``report()`` what the provider answered.

        Raises ``LeaseLost`` when the body is no more.
        """
        lease = self._lease()
        if lease is None:
            raise LeaseLost("released")
        return lease

    def _take(self, lease: Lease) -> None:
        # Weakly: a view and its guarded handler are a cycle, which lives until the next garbage
        # collection, and would keep the slot of a response that was dropped.
        self._lease = weakref.ref(lease)


def throttled(upstream: str) -> Callable[[Handler], Handler]:
    """Guard a function view, or one method of a class, sync or async, with a slot of ``upstream``.

    Innermost, below ``@api_view``, ``@action``, ``@login_required`` or ``@require_POST``: what
    they turn away costs no slot.
    """

    def decorate(view: Handler) -> Handler:
        if isinstance(view, type) or hasattr(view, "cls"):
            raise ImproperlyConfigured(
                f"@throttled goes on a function or a method, and below @api_view, not around "
                f"{view!r}: there, nobody knows yet whose request it is."
            )
        guarded: Handler
        if iscoroutinefunction(view):

            async def guarded(*args: Any, **kwargs: Any) -> Any:
                its_self, args = _split_self(args)
                handler = functools.partial(view, *its_self)
                return await _async_guard(handler, upstream, _ignore)(*args, **kwargs)

        else:

            def guarded(*args: Any, **kwargs: Any) -> Any:
                its_self, args = _split_self(args)
                handler = functools.partial(view, *its_self)
                return _sync_guard(handler, upstream, _ignore)(*args, **kwargs)

        functools.update_wrapper(guarded, view)
        vars(guarded)["throttled_upstream"] = upstream  # the system checks read it
        return guarded

    return decorate


def _split_self(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """A method's ``self`` where there is one, and the arguments from the request on."""
    at = 0 if args and isinstance(_django_request(args[0]), HttpRequest) else 1
    return args[:at], args[at:]


def _django_request(request: Any) -> Any:
    """Django's own request, also where REST framework has wrapped it."""
    return getattr(request, "_request", request)


def guard(handler: Handler, upstream: str, take: Callable[[Lease], None] | None = None) -> Handler:
    """The handler, run only while it holds a slot; ``take`` is told of the lease."""
    if iscoroutinefunction(handler):
        return _async_guard(handler, upstream, take or _ignore)
    return _sync_guard(handler, upstream, take or _ignore)


def _ignore(lease: Lease) -> None:
    pass


def _sync_guard(handler: Handler, upstream: str, take: Callable[[Lease], None]) -> Handler:
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


def _async_guard(handler: Handler, upstream: str, take: Callable[[Lease], None]) -> Handler:
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
    take: Callable[[Lease], None] | None = None,
    finish: Handler | None = None,
) -> Handler:
    """The handler, run inside a stream of events when its slot is there.

    ``finish`` makes of what it returns a response that can be read.
    """

    async def guarded(request: Any, *args: Any, **kwargs: Any) -> Any:
        call = Call(handler, request, args, kwargs, take or _ignore, finish)
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
        call = Call(handler, request, args, kwargs, take or _ignore, finish)
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
    return isinstance(_django_request(request), ASGIRequest)


def _lend(response: Any, lease: Lease, request: Any) -> None:
    request = _django_request(request)
    lend(response, lease, is_asgi=_is_asgi(request), request=request)


def _receive_body(request: Any) -> None:
    """Under WSGI, have the body before a slot: who sends half of it must not hold one.

    Not what the view may want to read as it comes: uploads, and what is too large for a body.
    """
    request = _django_request(request)
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
