"""The chat once more, for projects that are not async: a sync view, and one of REST framework.

Under ASGI their waits end when the client leaves, and their bodies stream chunk by chunk; under
WSGI they are the only kind that streams.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from typing import Any

from anthropic import Anthropic
from django.conf import settings
from django.http import HttpRequest, HttpResponseBase, StreamingHttpResponse
from django.views import View
from openai import OpenAI
from rest_framework.authentication import SessionAuthentication, TokenAuthentication
from rest_framework.exceptions import APIException, ParseError
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.views import APIView

from demo_project.events import Report, broken_off, encode
from demo_project.prompts import BadPrompt, Prompt
from demo_project.replies import MAX_TOKENS, key
from demo_project.seeds import UPSTREAM
from llm_throttle.rest_framework import EventStreamRenderer
from llm_throttle.views import ThrottledChatMixin

# The views


class SyncChatView(ThrottledChatMixin, View):
    """The reply as server-sent events, by a sync view and the SDKs' sync clients."""

    upstream = UPSTREAM
    prompt: Prompt

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if request.method == "POST":
            try:
                self.prompt = Prompt.from_request(request)
            except BadPrompt as problem:
                return problem.as_response()
        response: HttpResponseBase = super().dispatch(request, *args, **kwargs)
        return response

    def post(self, request: HttpRequest) -> StreamingHttpResponse:
        return as_events(self.prompt, self.lease.report)


class ApiChatView(ThrottledChatMixin, APIView):
    """The same for API clients: signed in by session or token, or guests."""

    upstream = UPSTREAM
    authentication_classes = (TokenAuthentication, SessionAuthentication)
    renderer_classes = (JSONRenderer, EventStreamRenderer)
    prompt: Prompt

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        if request.method == "POST":  # still before the slot
            try:
                self.prompt = Prompt.from_json(request.data)
            except BadPrompt as problem:
                raise Unusable(problem) from problem
            except RecursionError:  # brackets within brackets: REST framework lets it through
                raise ParseError from None

    def post(self, request: Request) -> StreamingHttpResponse:
        return as_events(self.prompt, self.lease.report)


class Unusable(APIException):
    """A prompt that is refused, in REST framework's shape."""

    def __init__(self, problem: BadPrompt) -> None:
        super().__init__(str(problem))
        self.status_code = problem.status


def as_events(prompt: Prompt, report: Report) -> StreamingHttpResponse:
    return StreamingHttpResponse(
        reply_events(sync_reply(prompt), report), content_type="text/event-stream"
    )


# The reply


def reply_events(texts: Iterator[str], report: Report) -> Iterator[bytes]:
    """``token`` events and ``done``, or ``error`` where the provider fails."""
    try:
        with closing(texts):  # type: ignore[type-var]  # generators, both
            for text in texts:
                yield encode("token", text=text)
    except Exception as error:
        yield broken_off(error, report)
    else:
        yield encode("done")


def sync_reply(prompt: Prompt) -> Iterator[str]:
    """The answer, piece by piece. Closing the iterator closes the call."""
    return REPLIES[prompt.sdk](prompt.message)


def reply_by_anthropic(message: str) -> Iterator[str]:
    call = anthropic(settings.UPSTREAM_URL).messages.stream(
        model=settings.ANTHROPIC_MODEL,
        max_tokens=MAX_TOKENS,
        messages=[{"role": "user", "content": message}],
    )
    with call as stream:
        yield from stream.text_stream


def reply_by_openai(message: str) -> Iterator[str]:
    stream = openai(settings.UPSTREAM_URL).chat.completions.create(
        model=settings.OPENAI_MODEL,
        max_completion_tokens=MAX_TOKENS,
        messages=[{"role": "user", "content": message}],
        stream=True,
    )
    with stream:
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content


REPLIES = {"anthropic": reply_by_anthropic, "openai": reply_by_openai}


# One client per process: its connections may be used by any thread.


@cache
def anthropic(address: str) -> Anthropic:
    return Anthropic(base_url=address, api_key=key("ANTHROPIC_API_KEY"), **common())


@cache
def openai(address: str) -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key=key("OPENAI_API_KEY"), **common())


def common() -> dict[str, Any]:
    # A retry inside a slot would be a second call that nobody counted.
    return {"max_retries": 0, "timeout": settings.UPSTREAM_TIMEOUT}


if hasattr(os, "register_at_fork"):  # a child must not speak on its parent's connections
    os.register_at_fork(after_in_child=anthropic.cache_clear)
    os.register_at_fork(after_in_child=openai.cache_clear)
