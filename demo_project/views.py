"""The chat page, and the chat behind it."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from django.contrib.auth import authenticate, login, logout
from django.http import (
    HttpRequest,
    HttpResponse,
    HttpResponseBase,
    JsonResponse,
    StreamingHttpResponse,
)
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import ensure_csrf_cookie
from django.views.generic import TemplateView

from demo_project.events import reply_events
from demo_project.middleware import policy
from demo_project.prompts import MAX_MESSAGE, SDKS, BadPrompt, Prompt
from demo_project.replies import reply
from demo_project.seeds import UPSTREAM
from demo_project.store import left
from llm_throttle import policies
from llm_throttle.exceptions import UnknownUpstream
from llm_throttle.identity import Caller, identify
from llm_throttle.views import ThrottledChatMixin

# Hosts of the page with four tiers at once. Cookies belong to a host, and the browser takes a
# frame from a host next door for the same site, so that each frame is signed in by itself.
FRAMES_HOST = "demo.localhost"
# What the page's script imports, so that the browser fetches all of it at once.
MODULES = (
    *(f"llm_throttle/{name}.js" for name in ("client", "transports", "timing", "event_stream")),
    "llm_throttle/places.js",
    *(f"demo_project/{name}.js" for name in ("turn", "line", "refusal", "words", "parts")),
    *(f"demo_project/{name}.js" for name in ("conversations", "announcer")),
)
FRAMED = ("premium", "pro", "free", "guest")


@method_decorator([never_cache, ensure_csrf_cookie], name="dispatch")
class ChatPage(TemplateView):
    """Type a message, see where you stand in line, see the reply stream in."""

    template_name = "demo_project/chat.html"
    extra_context = {  # noqa: RUF012 - as Django has it
        "max_message": MAX_MESSAGE,
        "sdks": SDKS,
        "modules": MODULES,
    }

    def get(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if request.GET.get("as") in FRAMED:
            become(request, request.GET["as"])
            return redirect("chat-page")
        if request.session.session_key is None:
            request.session.create()  # what a guest is known by
        response = super().get(request, *args, **kwargs)
        response.xframe_options_exempt = True  # the policy below says it more exactly
        response["Content-Security-Policy"] = policy({"frame-ancestors": frames_origin(request)})
        return response

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return super().get_context_data(
            limits=limits_of(self.request),
            is_framed=self.request.headers.get("Sec-Fetch-Dest") == "iframe",
            side_by_side=f"{frames_origin(self.request)}{reverse('side-by-side')}",
            **kwargs,
        )


def become(request: HttpRequest, name: str) -> None:
    """Sign in as one of the accounts whose password is their name anyway, or as nobody.

    The operator's account is not among them.
    """
    user = authenticate(request, username=name, password=name)
    if user is None or user.is_staff:
        logout(request)
    else:
        login(request, user)


def limits_of(request: HttpRequest) -> dict[str, Any] | None:
    """The caller's tier and what it allows; None where there is no policy yet."""
    try:
        rules = policies.load(UPSTREAM)
    except UnknownUpstream:
        return None
    tier = identify(Caller(UPSTREAM, request.user, request)).tier
    found = next((one for one in rules if one.slug == tier), None)
    return found and {
        "tier": tier,
        "cap": found.cap,
        "capacity": rules.capacity,
        "wait": found.wait_budget_ms // 1000,
        "depth": found.depth_per_user,
    }


class SideBySide(TemplateView):
    """Four chat pages in frames, each signed in as another tier."""

    template_name = "demo_project/side_by_side.html"

    def get(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if urlsplit(f"//{request.get_host()}").hostname != FRAMES_HOST:
            return redirect(f"{frames_origin(request)}{request.path}")
        response = super().get(request, *args, **kwargs)
        sources = " ".join(frame["origin"] for frame in self.frames())
        response["Content-Security-Policy"] = policy({"frame-src": sources})
        return response

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return super().get_context_data(frames=self.frames(), **kwargs)

    def frames(self) -> list[dict[str, str]]:
        return [
            {"tier": tier, "origin": frames_origin(self.request, f"{tier}.")} for tier in FRAMED
        ]


def frames_origin(request: HttpRequest, below: str = "") -> str:
    """The origin of the page with the frames, or of a host below it, at this request's port."""
    port = urlsplit(f"//{request.get_host()}").port
    return f"{request.scheme}://{below}{FRAMES_HOST}{f':{port}' if port else ''}"


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
    """The reply as server-sent events; a slot is held for as long as it streams.

    Who asks for an event stream is told on the way where it stands in line. Other clients get no
    response before they have a slot, and a refusal as a plain 429 or 503.
    """

    upstream = UPSTREAM

    def setup(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        super().setup(request, *args, **kwargs)
        self.queue_events = "text/event-stream" in request.headers.get("Accept", "")

    async def post(self, request: HttpRequest) -> StreamingHttpResponse:
        events = reply_events(reply(self.prompt), self.lease.report)
        return StreamingHttpResponse(events, content_type="text/event-stream")


async def left_in_the_store(request: HttpRequest) -> HttpResponse:
    """What the store believes to be in flight and waiting; for staff."""
    user = await request.auser()
    if not user.is_staff:
        return JsonResponse({"detail": "For staff."}, status=403)
    return JsonResponse(await left())
