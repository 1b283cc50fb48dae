"""``ThrottledChatMixin`` and ``@throttled``: a slot around a view, from its handler to its body."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.views import View

from .disconnects import watch
from .exceptions import LeaseLost
from .guards import (
    Handler,
    Take,
    async_guard,
    django_request,
    guard,
    guard_with_events,
    sync_guard,
)
from .lease import Lease


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

    def _guard_with_events(self, handler: Handler, upstream: str, take: Take) -> Handler:
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
                return await async_guard(handler, upstream)(*args, **kwargs)

        else:

            def guarded(*args: Any, **kwargs: Any) -> Any:
                its_self, args = _split_self(args)
                handler = functools.partial(view, *its_self)
                return sync_guard(handler, upstream)(*args, **kwargs)

        functools.update_wrapper(guarded, view)
        vars(guarded)["throttled_upstream"] = upstream  # the system checks read it
        return guarded

    return decorate


def _split_self(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """A method's ``self`` where there is one, and the arguments from the request on."""
    at = 0 if args and isinstance(django_request(args[0]), HttpRequest) else 1
    return args[:at], args[at:]
