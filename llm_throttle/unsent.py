"""Bodies that are never sent: their slots are free soon, whoever drops them, wherever.

A response may be replaced by a middleware, or dropped because its client has left. Each of these
looks at another place, as Django and the servers differ in what they call.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

from django.core.signals import request_finished
from django.http import HttpRequest

from .disconnects import event_loop

logger = logging.getLogger(__name__)


class Fate:
    """Whether a body's own response went out, known also when the body is no more."""

    is_settled = False


class Body(Protocol):
    """A body that holds a slot."""

    fate: Fate

    def close(self) -> None: ...


def end_if_replaced(request: HttpRequest, body: Body) -> None:
    """Where a middleware sends another response in the place of ours, free the slot and say so.

    Django closes the request with the response that it has sent. Where the client has left
    instead, it closes neither.
    """
    close, reference, fate = request.close, weakref.ref(body), body.fate

    def close_and_tell() -> None:
        close()
        is_replaced = not fate.is_settled
        unsent = reference()
        if is_replaced and unsent is not None:  # REST framework's views hold their responses
            unsent.close()
        is_conditional = {"HTTP_IF_NONE_MATCH", "HTTP_IF_MODIFIED_SINCE"} & request.META.keys()
        if is_replaced and not is_conditional:  # 304 Not Modified is as it should be
            logger.warning(
                "The response that %s streams was replaced on its way out: the call that its slot "
                "was taken for is lost.",
                getattr(request.resolver_match, "_func_path", request.path),
            )

    request.close = close_and_tell  # type: ignore[method-assign]  # Django looks it up there


UNSTARTED_S = 0.4
"""A body that nobody has started for so long may be garbage that is not collected yet."""


def collect_unless_started(body: Body) -> None:
    """Find a body that is dropped by a sync view's thread and lives on in a cycle."""
    if (loop := event_loop()) is not None:
        loop.call_soon_threadsafe(_collect_later, loop, weakref.ref(body))


def _collect_later(loop: asyncio.AbstractEventLoop, body: weakref.ref[Body]) -> None:
    loop.call_later(UNSTARTED_S, _collect_if_unstarted, loop, body)


def _collect_if_unstarted(loop: asyncio.AbstractEventLoop, body: weakref.ref[Body]) -> None:
    """Free the slot of a response that was dropped and lives on in a cycle.

    REST framework's views hold their responses, and are held by their own requests. Where the
    client leaves before the first byte, only the garbage collector would find them, some time.
    """
    global _collected_at
    found = body()
    if found is None or found.fate.is_settled:
        return
    del found
    if loop.time() >= _collected_at + UNSTARTED_S:  # slow middleware may keep many waiting
        _collected_at = loop.time()
        gc.collect()
    _collect_later(loop, body)


_collected_at = 0.0


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The method, to be called for as long as its object is there."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = reference()
        if found is not None:
            found(*args)

    return call


_close_unless_started: ContextVar[weakref.WeakMethod[Callable[[], None]] | None] = ContextVar(
    "llm_throttle_close_unless_started", default=None
)
"""The last body made in this context, which is that of its request.

A client that leaves between the view and the first chunk (while a middleware awaits something)
is seen in different places: up to Django 6.0 the task is cancelled that ran the view; since 6.1
that task goes on, and only ``request_finished`` tells. What both miss, ``START_GRACE`` ends.
"""


def close_unless_started(body: Any) -> None:
    """Have ``body.close_unless_started`` called when its request ends without its being sent."""
    _close_unless_started.set(weakref.WeakMethod(body.close_unless_started))
    drop = weakly(body.close_unless_started)
    if running_loop() is not None and (task := asyncio.current_task()) is not None:
        task.add_done_callback(lambda task: drop() if task.cancelled() else None)


def _request_finished(**kwargs: object) -> None:
    reference = _close_unless_started.get()
    close_unless_started = reference() if reference is not None else None
    if close_unless_started is not None:
        close_unless_started()


request_finished.connect(_request_finished, dispatch_uid="llm_throttle.unsent")
