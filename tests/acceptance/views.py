"""Views that fail, block the loop or never pause, and an edit that is committed late or never."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.views import View
from rest_framework.exceptions import ParseError
from rest_framework.request import Request
from rest_framework.serializers import CharField, Serializer
from rest_framework.views import APIView

from demo_project.events import encode, reply_events
from demo_project.replies import reply
from demo_project.seeds import UPSTREAM
from demo_project.views import PromptFirst
from llm_throttle.models import Upstream
from llm_throttle.views import ThrottledChatMixin


class Strict(Serializer[Any]):
    model = CharField()


def fail(how: str) -> None:
    """What goes wrong between admission and the call of the provider."""
    if how == "invalid":
        Strict(data={}).is_valid(raise_exception=True)
    raise {
        "value": ValueError("unknown model"),
        "missing": Http404("no such chat"),
        "denied": PermissionDenied("not yours"),
        "parse": ParseError("malformed"),
    }[how]


class Fails(ThrottledChatMixin, View):
    upstream = UPSTREAM

    async def post(self, request: HttpRequest) -> HttpResponse:
        fail(request.GET["how"])
        raise AssertionError


class FailsSync(ThrottledChatMixin, View):
    upstream = UPSTREAM

    def post(self, request: HttpRequest) -> HttpResponse:
        fail(request.GET["how"])
        raise AssertionError


class FailsInRestFramework(ThrottledChatMixin, APIView):
    upstream = UPSTREAM

    def post(self, request: Request) -> HttpResponse:
        fail(request.query_params["how"])
        raise AssertionError


class Endless(ThrottledChatMixin, View):
    """A body that never awaits between its chunks."""

    upstream = UPSTREAM

    async def post(self, request: HttpRequest) -> StreamingHttpResponse:
        kind = request.GET.get("type", "text/event-stream")
        return StreamingHttpResponse(self.chunks(), content_type=kind)

    async def chunks(self) -> AsyncIterator[bytes]:
        give_up_at = time.monotonic() + 20
        while time.monotonic() < give_up_at:
            yield encode("token", text="again ")
        yield encode("done")


class Blocks(PromptFirst, ThrottledChatMixin, View):
    """A reply in whose midst the event loop stands still."""

    upstream = UPSTREAM

    async def post(self, request: HttpRequest) -> StreamingHttpResponse:
        seconds = float(request.GET["seconds"])
        return StreamingHttpResponse(self.events(seconds), content_type="text/event-stream")

    async def events(self, seconds: float) -> AsyncIterator[bytes]:
        is_first = True
        async for event in reply_events(reply(self.prompt), self.lease.report):
            yield event
            if is_first:
                time.sleep(seconds)  # noqa: ASYNC251 - the fault that is tried
                is_first = False


class ChangedMyMind(Exception):
    pass


def edit(request: HttpRequest) -> JsonResponse:
    """Set the capacity in a transaction that stays open for a while; commit it or not."""
    try:
        with transaction.atomic():
            upstream = Upstream.objects.get(slug=UPSTREAM)
            upstream.capacity = int(request.POST["capacity"])
            upstream.save()
            time.sleep(float(request.POST["hold"]))
            at = time.monotonic()
            if request.POST["end"] == "rollback":
                raise ChangedMyMind
    except ChangedMyMind:
        pass
    return JsonResponse({"at": at})
