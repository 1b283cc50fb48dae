"""Who is turned away before the handler costs no slot and no place, and hears what it heard before.

IDENT-03. The only slot is taken all the while: whoever asked for one would wait, or be refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.views import View
from rest_framework.authentication import SessionAuthentication, TokenAuthentication
from rest_framework.generics import CreateAPIView
from rest_framework.permissions import IsAdminUser, IsAuthenticated
from rest_framework.serializers import CharField, Serializer
from rest_framework.throttling import UserRateThrottle
from rest_framework.views import APIView

from llm_throttle import admit
from llm_throttle.admission import snapshot
from llm_throttle.identity import Identity
from llm_throttle.models import Upstream
from llm_throttle.views import ThrottledChatMixin
from tests.waiting_room import eventually, is_empty

ROUNDS = 20


class Strict(Serializer[Any]):
    model = CharField()


class Never(UserRateThrottle):
    def allow_request(self, request: Any, view: Any) -> bool:
        return False

    def wait(self) -> float:
        return 7


class Chat(View):
    def post(self, request: Any) -> HttpResponse:
        return HttpResponse()


class Rest(CreateAPIView):
    authentication_classes = (TokenAuthentication, SessionAuthentication)
    permission_classes = (IsAuthenticated,)
    serializer_class = Strict

    def perform_create(self, serializer: Any) -> None:
        pass


class ForStaff(Rest):
    permission_classes = (IsAdminUser,)


class RateLimited(APIView):
    throttle_classes = (Never,)

    def get(self, request: Any) -> HttpResponse:
        return HttpResponse()


def guarded(view: type) -> Any:
    return type(view.__name__, (ThrottledChatMixin, view), {"upstream": "sim"}).as_view()


urlpatterns = [
    path(f"{prefix}/{name}/", make(view))
    for prefix, make in {"bare": lambda view: view.as_view(), "guarded": guarded}.items()
    for name, view in {"chat": Chat, "rest": Rest, "staff": ForStaff, "rate": RateLimited}.items()
]

BAD_TOKEN = {"headers": {"Authorization": "Token nonsense"}}
TURNED_AWAY: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "bad token": ("post", "rest", BAD_TOKEN, 401),
    "no permission": ("post", "staff", {}, 403),
    "CSRF": ("post", "chat", {}, 403),
    "CSRF in REST framework": ("post", "rest", {}, 403),
    "wrong method": ("get", "chat", {}, 405),
    "wrong method in REST framework": ("get", "rest", {}, 405),
    "OPTIONS": ("options", "chat", {}, 200),
    "missing": ("get", "nowhere", {}, 404),
    "rate": ("get", "rate", {}, 429),
}


@pytest.fixture(autouse=True)
def urls(settings: Any, rows: Upstream) -> None:
    settings.ROOT_URLCONF = __name__


@pytest.fixture
def full(rows: Upstream) -> Iterator[None]:
    rows.capacity = 1
    rows.save()
    with admit("sim", identity=Identity("holder", "gold")):
        yield


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("case", TURNED_AWAY)
def test_under_wsgi(case: str, user: User) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(user)
    method, name, options, status = TURNED_AWAY[case]
    bare = getattr(client, method)(f"/bare/{name}/", **options)
    for _ in range(ROUNDS):
        response = getattr(client, method)(f"/guarded/{name}/", **options)
        assert response.status_code == bare.status_code == status
        if name != "nowhere":
            assert response.content == bare.content
        assert response.get("Retry-After") == bare.get("Retry-After")
        assert "X-LLM-Throttle-Ticket" not in response
    seen = snapshot("sim")
    assert (seen.in_flight, seen.waiting) == (1, 0)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("case", TURNED_AWAY)
async def test_under_asgi(case: str, user: User) -> None:
    client = AsyncClient(enforce_csrf_checks=True)
    await client.aforce_login(user)
    method, name, options, status = TURNED_AWAY[case]
    for _ in range(ROUNDS):
        response = await getattr(client, method)(f"/guarded/{name}/", **options)
        assert response.status_code == status
    seen = snapshot("sim")
    assert (seen.in_flight, seen.waiting) == (1, 0)


BODIES = {
    "half of a body": ('{"model": "cl', 400),
    "no JSON": ("Hello", 400),
    "a field is missing": ("{}", 400),
    "a kind that nobody reads": (b"\x00", 415),
    "good": (json.dumps({"model": "claude"}), 201),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_body_that_the_handler_turns_away_costs_a_moment(case: str, user: User) -> None:
    client = Client()
    client.force_login(user)
    body, status = BODIES[case]
    kind = "application/octet-stream" if status == 415 else "application/json"
    bare = client.post("/bare/rest/", body, content_type=kind)
    for _ in range(ROUNDS):
        response = client.post("/guarded/rest/", body, content_type=kind)
        assert (response.status_code, response.content) == (bare.status_code, bare.content)
        assert response.status_code == status
    assert eventually(is_empty)
