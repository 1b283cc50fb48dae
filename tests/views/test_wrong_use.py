"""What a developer gets wrong fails at start or with a clear answer, and keeps no slot."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.test import Client
from django.urls import path
from django.views import View
from rest_framework.decorators import api_view
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from llm_throttle import admit
from llm_throttle.admission import snapshot
from llm_throttle.exceptions import NestedAdmission
from llm_throttle.models import Upstream
from llm_throttle.views import ThrottledChatMixin, throttled
from tests.waiting_room import eventually, is_empty

from .conftest import Complaints
from .kinds import SLUGS


class Plain(View):
    def get(self, request: Any) -> HttpResponse:
        return HttpResponse()


@pytest.mark.parametrize("bases", [(View,), (Plain,), (APIView,), (ViewSet,)])
def test_the_mixin_right_of_the_view_fails_when_the_class_is_made(bases: tuple[type, ...]) -> None:
    with pytest.raises(ImproperlyConfigured, match="left of the view class"):
        type("Chat", (*bases, ThrottledChatMixin), {"upstream": "sim"})


def test_the_wrong_order_is_also_found_further_up() -> None:
    abstract = type("Abstract", (ThrottledChatMixin,), {"upstream": "sim"})
    with pytest.raises(ImproperlyConfigured, match="Chat"):
        type("Chat", (Plain, abstract), {})


def test_a_view_without_an_upstream_fails_when_the_urls_are_read() -> None:
    chat = type("Chat", (ThrottledChatMixin, Plain), {})
    with pytest.raises(ImproperlyConfigured, match="Chat does not say its upstream"):
        chat.as_view()
    assert chat.as_view(upstream="sim")
    viewset = type("Chats", (ThrottledChatMixin, ViewSet), {})
    with pytest.raises(ImproperlyConfigured, match="Chats does not say its upstream"):
        viewset.as_view({"get": "list"})


def test_an_upstream_may_be_a_property() -> None:
    chat = type("Chat", (ThrottledChatMixin, Plain), {"upstream": property(lambda view: "sim")})
    assert chat.as_view()


@pytest.mark.parametrize(
    "wrong",
    [Plain, api_view(["GET"])(Plain.as_view()), APIView.as_view(), ViewSet.as_view({"get": "x"})],
    ids=["class", "api_view", "APIView", "ViewSet"],
)
def test_throttled_around_what_authenticates_later_fails_at_import(wrong: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match="below @api_view"):
        throttled("sim")(wrong)


def test_a_view_that_returns_nothing_gets_djangos_own_error(client: Client) -> None:
    with pytest.raises(ValueError, match="didn't return an HttpResponse object"):
        client.get(f"/guarded/{SLUGS['sync View']}/?do=none")
    assert eventually(is_empty)


def unknown(request: Any) -> HttpResponse:
    raise AssertionError("never called")


def nested(request: Any) -> HttpResponse:
    with admit("sim", user=request.user):
        return HttpResponse()


urlpatterns = [
    path("unknown/", throttled("nowhere")(unknown)),
    path("nested/", throttled("sim")(nested)),
]


def test_an_upstream_without_a_row_is_said_in_log_and_answer(
    client: Client, settings: Any, complaints: Complaints
) -> None:
    settings.ROOT_URLCONF = __name__
    response = client.get("/unknown/")
    assert (response.status_code, response.json()["reason"]) == (503, "unserviceable")
    assert 1 <= int(response["Retry-After"]) <= 60
    assert "No upstream has the slug 'nowhere'" in repr(complaints)


def test_an_upstream_that_is_deleted_lets_nobody_in(client: Client, rows: Upstream) -> None:
    assert client.get(f"/guarded/{SLUGS['sync View']}/").status_code == 200
    rows.delete()
    response = client.get(f"/guarded/{SLUGS['sync View']}/")
    assert (response.status_code, response.json()["reason"]) == (503, "unserviceable")


def test_a_view_that_asks_for_a_second_slot_fails_at_once(client: Client, settings: Any) -> None:
    settings.ROOT_URLCONF = __name__
    with pytest.raises(NestedAdmission):
        client.get("/nested/")
    assert eventually(is_empty)


def test_two_streams_open_in_one_thread_are_not_one_within_the_other(client: Client) -> None:
    """As a test suite has it that reads neither response."""
    url = f"/guarded/{SLUGS['function']}/?do=stream"
    open_ones = [client.get(url) for _ in range(2)]
    assert [response.status_code for response in open_ones] == [200, 200]
    assert snapshot("sim").in_flight == 2
    for response in open_ones:
        response.close()
    assert eventually(is_empty)
