"""One view of each kind, guarded, and the same view as it would be without us.

What a view does is said by the query: ``?do=raise``. Guarded ones note in ``SEEN`` how many slots
are held while they run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from adrf.views import APIView as AsyncAPIView
from adrf.viewsets import ViewSet as AsyncViewSet
from django.contrib.auth.decorators import login_required
from django.contrib.auth.mixins import LoginRequiredMixin
from django.http import FileResponse, HttpResponse, JsonResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase, HttpResponseRedirect
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_http_methods
from django.views.generic import TemplateView
from rest_framework.decorators import action, api_view
from rest_framework.generics import GenericAPIView
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from llm_throttle.admission import snapshot
from llm_throttle.views import ThrottledChatMixin, throttled

UPSTREAM = "sim"
SEEN: list[int] = []


class Broken(Exception):
    """What a view raises that fails."""


def chunks() -> Iterator[bytes]:
    yield b"one "
    SEEN.append(snapshot(UPSTREAM).in_flight)
    yield b"two"


async def async_chunks() -> AsyncIterator[bytes]:
    for chunk in chunks():
        yield chunk


def answer(request: Any, *, is_async: bool = False, make: Any = HttpResponse) -> Any:
    """What the views have in common."""
    SEEN.append(snapshot(UPSTREAM).in_flight)
    what = request.GET.get("do", "plain")
    if what == "raise":
        raise Broken
    if what == "none":
        return None
    if what == "stream":
        return StreamingHttpResponse(async_chunks() if is_async else chunks())
    if what == "file":
        return FileResponse(open(__file__, "rb"))
    if what == "json":
        return JsonResponse({"answer": 42})
    if what == "redirect":
        return HttpResponseRedirect("/elsewhere/")
    return make(b"plain")


class Sync:
    def get(self, request: Any, **kwargs: Any) -> HttpResponseBase:
        return answer(request)

    post = get


class Async:
    async def get(self, request: Any, **kwargs: Any) -> HttpResponseBase:
        return answer(request, is_async=True)

    async def post(self, request: Any, **kwargs: Any) -> HttpResponseBase:
        return answer(request, is_async=True)


class Rest:
    def get(self, request: Any, **kwargs: Any) -> Any:
        return answer(request, make=lambda text: Response(text.decode()))

    post = get


class AsyncRest:
    async def get(self, request: Any, **kwargs: Any) -> Any:
        return answer(request, is_async=True, make=lambda text: Response(text.decode()))

    async def post(self, request: Any, **kwargs: Any) -> Any:
        return answer(request, is_async=True, make=lambda text: Response(text.decode()))


class Actions:
    def chat(self, request: Any, **kwargs: Any) -> Any:
        return answer(request, make=lambda text: Response(text.decode()))


class AsyncActions:
    async def chat(self, request: Any, **kwargs: Any) -> Any:
        return answer(request, is_async=True, make=lambda text: Response(text.decode()))


class OneAction(ViewSet):
    """Only one of its actions calls the provider."""

    def list(self, request: Any) -> Response:
        return Response(snapshot(UPSTREAM).in_flight)

    @action(detail=False, methods=["get", "post"])
    @throttled(UPSTREAM)
    def chat(self, request: Any) -> Any:
        return answer(request, make=lambda text: Response(text.decode()))


class OneBareAction(ViewSet):
    @action(detail=False, methods=["get", "post"])
    def chat(self, request: Any) -> Any:
        return answer(request, make=lambda text: Response(text.decode()))


class OneMethod(View):
    @throttled(UPSTREAM)
    def get(self, request: Any) -> HttpResponseBase:
        return answer(request)

    post = get


class OneAsyncMethod(View):
    @throttled(UPSTREAM)
    async def get(self, request: Any) -> HttpResponseBase:
        return answer(request, is_async=True)

    post = get


def function(request: Any) -> Any:
    return answer(request)


async def async_function(request: Any) -> Any:
    return answer(request, is_async=True)


def rest_function(request: Any) -> Any:
    return answer(request, make=lambda text: Response(text.decode()))


class Template(TemplateView):
    template_name = "views/page.html"

    def get(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        other = answer(request, make=lambda text: None)
        return super().get(request, *args, **kwargs) if _is_plain(request) else other

    post = get


def _is_plain(request: Any) -> bool:
    return request.GET.get("do", "plain") == "plain"


Make = Callable[..., Any]

ACTIONS = {"get": "chat", "post": "chat"}


def class_view(*bases: type, as_view: Make = lambda view: view.as_view()) -> tuple[Any, Any]:
    """The guarded view and the bare one; ThrottledChatMixin stands where the order has ``None``."""
    order = [base or ThrottledChatMixin for base in bases]
    guarded = type("Example", tuple(order), {"upstream": UPSTREAM})
    bare = type("Example", tuple(base for base in order if base is not ThrottledChatMixin), {})
    return as_view(guarded), as_view(bare)


def exempt(view: type) -> Any:
    return method_decorator(csrf_exempt, name="dispatch")(view).as_view()


def twice(around: Make, view: Make) -> tuple[Any, Any]:
    return around(throttled(UPSTREAM)(view)), around(view)


only = require_http_methods(["GET", "POST", "HEAD"])

KINDS: dict[str, tuple[Any, Any]] = {
    "sync View": class_view(None, Sync, View),
    "async View": class_view(None, Async, View),
    "TemplateView": class_view(None, Template),
    "APIView": class_view(None, Rest, APIView),
    "GenericAPIView": class_view(None, Rest, GenericAPIView),
    "ViewSet": class_view(None, Actions, ViewSet, as_view=lambda view: view.as_view(ACTIONS)),
    "adrf APIView": class_view(None, AsyncRest, AsyncAPIView),
    "adrf sync APIView": class_view(None, Rest, AsyncAPIView),
    "adrf ViewSet": class_view(
        None, AsyncActions, AsyncViewSet, as_view=lambda view: view.as_view(ACTIONS)
    ),
    "ViewSet action": (
        OneAction.as_view(ACTIONS, name="Chat", description="One"),
        OneBareAction.as_view(ACTIONS, name="Chat", description="One"),
    ),
    "method": (OneMethod.as_view(), class_view(Sync, View)[1]),
    "async method": (OneAsyncMethod.as_view(), class_view(Async, View)[1]),
    "function": twice(only, function),
    "async function": twice(only, async_function),
    "api_view": twice(api_view(["GET", "POST"]), rest_function),
    "csrf_exempt": class_view(None, Sync, View, as_view=exempt),
    "async csrf_exempt": class_view(None, Async, View, as_view=exempt),
    "login_required": class_view(
        None, Sync, View, as_view=lambda view: login_required(view.as_view())
    ),
    "async login_required": class_view(
        None, Async, View, as_view=lambda view: login_required(view.as_view())
    ),
    "login_required function": twice(lambda view: login_required(only(view)), function),
    "mixin, LoginRequiredMixin": class_view(None, LoginRequiredMixin, Sync, View),
    "LoginRequiredMixin, mixin": class_view(LoginRequiredMixin, None, Sync, View),
    "mixin last before View": class_view(Sync, None, View),
}

SLUGS = {kind: kind.lower().replace(" ", "-").replace(",", "") for kind in KINDS}

urlpatterns = [
    path(f"{prefix}/{SLUGS[kind]}/", view)
    for kind, views in KINDS.items()
    for prefix, view in zip(("guarded", "bare"), views, strict=True)
] + [path("one-action/", OneAction.as_view({"get": "list"}))]
