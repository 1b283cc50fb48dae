"""The chat page, and the chat behind it."""

from __future__ import annotations

from typing import Any

from django.http import (
    HttpRequest,
    HttpResponse,
    HttpResponseBase,
    JsonResponse,
    StreamingHttpResponse,
)
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import ensure_csrf_cookie
from django.views.generic import TemplateView

from demo_project.events import reply_events
from demo_project.prompts import MAX_MESSAGE, SDKS, BadPrompt, Prompt
from demo_project.replies import reply
from demo_project.seeds import UPSTREAM
from demo_project.store import left
from llm_throttle.models import Upstream
from llm_throttle.views import ThrottledChatMixin


@method_decorator([never_cache, ensure_csrf_cookie], name="dispatch")
class ChatPage(TemplateView):
    """Type a message, see the reply stream in."""

    template_name = "demo_project/chat.html"
    extra_context = {"max_message": MAX_MESSAGE, "sdks": SDKS}  # noqa: RUF012 - as Django has it

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        upstream = Upstream.objects.filter(slug=UPSTREAM).first()
        return super().get_context_data(capacity=upstream.capacity if upstream else 0, **kwargs)

    def get(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if request.session.session_key is None:
            request.session.create()  # what a guest is known by
        return super().get(request, *args, **kwargs)


class PromptFirst(View):
    """Judges the body before anything else does: a bad one never costs a slot."""

    prompt: Prompt

    async def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if request.method == "POST":
            try:
                self.prompt = Prompt.from_request(request)
            except BadPrompt as problem:
                return problem.as_response()
        return await super().dispatch(request, *args, **kwargs)


class ChatView(PromptFirst, ThrottledChatMixin, View):
    """The reply as server-sent events; a slot is held for as long as it streams."""

    upstream = UPSTREAM

    async def post(self, request: HttpRequest) -> StreamingHttpResponse:
        events = reply_events(reply(self.prompt), self.lease.report)
        return StreamingHttpResponse(events, content_type="text/event-stream")


async def left_in_the_store(request: HttpRequest) -> HttpResponse:
    """What the store believes to be in flight and waiting; for staff."""
    user = await request.auser()
    if not user.is_staff:
        return JsonResponse({"detail": "For staff."}, status=403)
    return JsonResponse(await left())
