"""Each fault of the views behind the URLs with its id."""

from __future__ import annotations

from types import ModuleType

from django.contrib.auth.decorators import login_required
from django.db import transaction
from django.urls import include, path
from django.views import View
from rest_framework.viewsets import ViewSet

from llm_throttle.views import ThrottledChatMixin, throttled

from .found import found, in_database


def test_W003_requests_that_wait_inside_a_transaction(settings):
    settings.DATABASES["default"]["ATOMIC_REQUESTS"] = True
    try:
        assert "non_atomic_requests" in found()["W003"]
    finally:
        settings.DATABASES["default"]["ATOMIC_REQUESTS"] = False


@throttled("anthropic")
def chat(request):
    raise AssertionError


class Chat(ThrottledChatMixin, View):
    upstream = "anthropic"


class Actions(ViewSet):
    @throttled("openai")
    def list(self, request):
        raise AssertionError


def use_urls(settings, *views) -> None:
    urls = ModuleType("urls_of_a_check")
    inner = [path(f"{number}/", view) for number, view in enumerate(views)]
    urls.urlpatterns = [path("chat/", include(inner))]
    settings.ROOT_URLCONF = urls


def test_W003_goes_when_no_guarded_view_runs_in_a_transaction(settings, monkeypatch):
    monkeypatch.setitem(settings.DATABASES["default"], "ATOMIC_REQUESTS", True)
    exempt = [transaction.non_atomic_requests(view) for view in (chat, Chat.as_view())]
    use_urls(settings, *exempt)
    assert "W003" not in found()
    use_urls(settings, *exempt, Actions.as_view({"get": "list"}))
    assert "W003" in found()


def test_W009_a_view_that_names_an_upstream_without_a_row(upstream, settings):
    use_urls(settings, chat, Chat.as_view(), login_required(Chat.as_view(upstream="cohere")))
    assert set(in_database()) == {"W009"}
    assert 'Chat names the upstream "cohere", which does not exist' in in_database()["W009"]
    use_urls(settings, chat, Actions.as_view({"get": "list"}))
    assert '"openai"' in in_database()["W009"]
    use_urls(settings, chat, Chat.as_view())
    assert in_database() == {}


def test_urls_that_cannot_be_read_are_djangos_to_report(upstream, settings):
    settings.ROOT_URLCONF = "no.such.module"
    assert in_database() == {}
