"""The pages and the chat itself, without a server around them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from channels.routing import URLRouter
from channels.testing import WebsocketCommunicator
from django.contrib.auth import get_user_model
from django.test import AsyncClient, Client

from demo_project import guests, replies
from demo_project import settings as demo
from demo_project.prompts import MAX_BODY, MAX_MESSAGE
from demo_project.routing import websocket_urlpatterns
from demo_project.seeds import UPSTREAM, seed
from llm_throttle import worker
from llm_throttle.identity import Caller
from llm_throttle.models import TierLimit, Upstream

from .conftest import Running, StartProvider

COPIED = (
    "ROOT_URLCONF",
    "MIDDLEWARE",
    "TEMPLATES",
    "LOGIN_REDIRECT_URL",
    "LOGOUT_REDIRECT_URL",
    "UPSTREAM_URL",
    "UPSTREAM_TIMEOUT",
    "ANTHROPIC_MODEL",
    "OPENAI_MODEL",
    "COMPARED_CAPACITY",
)


@pytest.fixture(autouse=True)
def demo_settings(settings: Any, transactional_db: None) -> Iterator[None]:
    """The demo's pages over the test run's database, with a store in this process."""
    for name in COPIED:
        setattr(settings, name, getattr(demo, name))
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "demo_project"]
    settings.LLM_THROTTLE = {**demo.LLM_THROTTLE, "CACHE": "locmem", "RECOVERY_WINDOW": 0}
    worker.reset()
    seed()
    yield
    worker.reset()


@pytest.fixture(autouse=True)
async def close_clients() -> AsyncIterator[None]:
    """The event loop of a test ends before its connections would."""
    yield
    clients = replies._clients.pop(asyncio.get_running_loop(), None)
    if clients is not None:
        await asyncio.gather(clients.anthropic.close(), clients.openai.close())


async def ask(client: AsyncClient, body: Any, **options: Any) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    options = {"content_type": "application/json", **options}
    return await client.post("/chat/", content, **options)


async def events(response: Any) -> list[dict[str, Any]]:
    content = b"".join([part async for part in response])
    return [json.loads(block.removeprefix(b"data: ")) for block in content.split(b"\n\n") if block]


@pytest.fixture
async def running(start_provider: StartProvider, settings: Any) -> Running:
    running = await start_provider(latency=0.05)
    settings.UPSTREAM_URL = running.url
    return running


# The chat


@pytest.mark.parametrize("sdk", ["anthropic", "openai"])
async def test_a_reply_streams_through_each_sdk(running: Running, sdk: str) -> None:
    response = await ask(AsyncClient(), {"message": "Hello", "sdk": sdk})
    *tokens, end = await events(response)
    assert response.status_code == 200
    assert "".join(token["text"] for token in tokens)
    assert {token["type"] for token in tokens} == {"token"}
    assert end == {"type": "done"}
    assert response["X-LLM-Throttle-Tier"] == "guest"
    assert len(response["X-LLM-Throttle-Ticket"]) == 32
    assert int(response["X-LLM-Throttle-Waited-Ms"]) >= 0
    assert running.provider.stats.served == 1


@pytest.mark.parametrize("sdk", ["anthropic", "openai"])
async def test_a_provider_that_refuses_ends_the_stream_with_an_error_event(
    start_provider: StartProvider, settings: Any, sdk: str
) -> None:
    settings.UPSTREAM_URL = (await start_provider(capacity=0)).url
    response = await ask(AsyncClient(), {"message": "Hello", "sdk": sdk})
    assert await events(response) == [{"type": "error", "detail": "The provider answered 429."}]


@pytest.mark.parametrize("sdk", ["anthropic", "openai"])
async def test_a_provider_out_of_reach_ends_the_stream_with_an_error_event(
    settings: Any, sdk: str
) -> None:
    settings.UPSTREAM_URL = "http://127.0.0.1:9"
    response = await ask(AsyncClient(), {"message": "Hello", "sdk": sdk})
    assert [event["type"] for event in await events(response)] == ["error"]


BAD = {
    "nothing": b"",
    "no JSON": b"Hello",
    "half of it": b'{"message": "Hel',
    "not UTF-8": b'{"message": "\xff"}',
    "deeply nested": b"[" * 60_000,
    "no object": ["Hello"],
    "null": None,
    "no message": {"sdk": "openai"},
    "an empty message": {"message": " \n "},
    "a number": {"message": 7},
    "a list": {"message": ["Hello"]},
    "half a surrogate pair": b'{"message": "\\ud800"}',
    "an unknown SDK": {"message": "Hello", "sdk": "cohere"},
    "an SDK that is no text": {"message": "Hello", "sdk": ["openai"]},
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
async def test_bad_input_is_a_400_and_costs_no_slot(body: Any) -> None:
    response = await ask(AsyncClient(), body)
    assert response.status_code == 400
    assert response["Content-Type"] == "application/problem+json"
    assert response.json()["detail"]
    assert "X-LLM-Throttle-Ticket" not in response


@pytest.mark.parametrize(
    "body", [b" " * (MAX_BODY + 1), {"message": "x" * (MAX_MESSAGE + 1)}, b" " * 3_000_000]
)
async def test_too_much_input_is_a_413(body: Any) -> None:
    assert (await ask(AsyncClient(), body)).status_code == 413


async def test_a_form_is_not_json() -> None:
    for content_type, body in {
        "application/x-www-form-urlencoded": b"message=Hello",
        "multipart/form-data; boundary=x": b'--x\r\nContent-Disposition: form-data; name="message"'
        b"\r\n\r\nHello\r\n--x--\r\n",
        "multipart/form-data; boundary=": b"broken",
    }.items():
        client = AsyncClient(enforce_csrf_checks=True, raise_request_exception=False)
        client.cookies["csrftoken"] = "x" * 32
        headers = {"X-CSRFToken": "x" * 32}
        response = await ask(client, body, content_type=content_type, headers=headers)
        assert response.status_code in {400, 403}


async def test_other_sites_cannot_send_messages() -> None:
    response = await ask(AsyncClient(enforce_csrf_checks=True), {"message": "Hello"})
    assert response.status_code == 403


async def test_other_methods_cost_nothing() -> None:
    client = AsyncClient()
    assert (await client.get("/chat/")).status_code == 405
    assert (await client.head("/chat/")).status_code == 405
    options = await client.options("/chat/")
    assert options.status_code == 200
    assert "X-LLM-Throttle-Ticket" not in options


async def test_only_staff_may_ask_what_is_left() -> None:
    assert (await AsyncClient().get("/left.json")).status_code == 403


async def test_who_asks_for_an_event_stream_is_told_on_the_way(running: Running) -> None:
    headers = {"Accept": "text/event-stream"}
    response = await ask(AsyncClient(), {"message": "Hello"}, headers=headers)
    content = b"".join([part async for part in response]).decode()
    names = [line for line in content.splitlines() if line.startswith("event:")]
    assert names == ["event: granted"]
    assert content.rstrip().endswith('data: {"type": "done"}')
    assert response["X-LLM-Throttle-Ticket"] in content
    assert "X-LLM-Throttle-Waited-Ms" not in response


# Sockets


@asynccontextmanager
async def chat_socket() -> AsyncIterator[WebsocketCommunicator]:
    socket = WebsocketCommunicator(URLRouter(websocket_urlpatterns), "/ws/chat/")
    await socket.connect()
    yield socket
    await socket.disconnect()


@pytest.mark.parametrize("sdk", ["anthropic", "openai"])
async def test_a_reply_streams_over_a_socket(
    running: Running, sdk: str, closing_connections: None
) -> None:
    async with chat_socket() as socket:
        await socket.send_json_to({"type": "message", "message": "Hello", "sdk": sdk})
        heard = [await socket.receive_json_from(timeout=5)]
        while heard[-1]["type"] not in {"done", "error"}:
            heard.append(await socket.receive_json_from(timeout=5))
    assert (heard[0]["type"], heard[0]["tier"], heard[-1]["type"]) == ("granted", "guest", "done")
    assert "".join(message["text"] for message in heard[1:-1])


async def test_where_no_socket_is_the_handshake_is_refused() -> None:
    socket = WebsocketCommunicator(URLRouter(websocket_urlpatterns), "/ws/nothing/")
    assert (await socket.connect())[0] is False


async def test_a_bad_message_over_a_socket_is_told_and_costs_no_slot(
    closing_connections: None,
) -> None:
    async with chat_socket() as socket:
        for message in ({}, {"message": " "}, {"message": "Hello", "sdk": "cohere"}):
            await socket.send_json_to({"type": "message", **message})
            answer = await socket.receive_json_from(timeout=5)
            assert (answer["type"], answer["code"]) == ("error", "bad_message")


async def test_a_provider_that_refuses_is_an_error_over_a_socket(
    start_provider: StartProvider, settings: Any, closing_connections: None
) -> None:
    settings.UPSTREAM_URL = (await start_provider(capacity=0)).url
    async with chat_socket() as socket:
        await socket.send_json_to({"type": "message", "message": "Hello"})
        assert (await socket.receive_json_from(timeout=5))["type"] == "granted"
        assert (await socket.receive_json_from(timeout=5))["type"] == "error"


# The pages


def test_the_chat_page_gives_a_guest_a_session_and_runs_nothing_inline(client: Client) -> None:
    response = client.get("/")
    page = response.content.decode()
    assert response.status_code == 200
    assert response.cookies["sessionid"].value
    assert response.cookies["csrftoken"].value
    assert "share 30 slots" in page
    assert "style=" not in page
    assert "<style" not in page
    assert "onclick" not in page
    assert page.count("<script") == page.count('<script type="module" src=') == 1
    assert "default-src 'self'" in response["Content-Security-Policy"]


def test_the_chat_page_without_a_policy_still_answers(client: Client) -> None:
    Upstream.objects.all().delete()
    assert client.get("/").status_code == 200


@pytest.mark.parametrize(
    ("name", "cap", "wait"),
    [("premium", 30, 60), ("pro", 20, 45), ("free", 15, 12), ("guest", 5, 8)],
)
def test_the_page_tells_the_tier_and_what_it_allows(
    client: Client, name: str, cap: int, wait: int
) -> None:
    page = client.get("/", {"as": name}, follow=True)
    assert page.context["limits"] == {
        "tier": name,
        "cap": cap,
        "capacity": 30,
        "wait": wait,
        "depth": 2 if name == "guest" else 8,
    }
    assert f"up to <strong>{cap}</strong> of 30 slots" in page.content.decode()


def test_an_edit_of_the_policy_is_on_the_page(client: Client) -> None:
    TierLimit.objects.filter(tier__slug="guest").update(wait_budget=0, cap=1)
    page = client.get("/").content.decode()
    assert "up to <strong>1</strong> of 30 slots" in page
    assert "never waits" in page


@pytest.mark.parametrize("name", ["admin", "premium-1", "nobody", ""])
def test_nobody_becomes_an_operator_or_another_account_by_a_link(client: Client, name: str) -> None:
    page = client.get("/", {"as": name}, follow=True)
    assert not page.wsgi_request.user.is_authenticated


def test_an_operator_among_the_tiers_accounts_is_not_signed_in_by_a_link(client: Client) -> None:
    get_user_model().objects.filter(username="pro").update(is_staff=True)
    assert not client.get("/", {"as": "pro"}, follow=True).wsgi_request.user.is_authenticated


# Four tiers side by side


def test_the_frames_have_hosts_of_their_own(client: Client) -> None:
    for host in ("127.0.0.1:8123", "[::1]:8123", "pro.demo.localhost:8123"):
        address = client.get("/side-by-side/", headers={"host": host})["Location"]
        assert address == "http://demo.localhost:8123/side-by-side/"
    response = client.get("/side-by-side/", headers={"host": "demo.localhost:8123"})
    page = response.content.decode()
    for tier in ("premium", "pro", "free", "guest"):
        assert f'src="http://{tier}.demo.localhost:8123/?as={tier}"' in page
        assert f"http://{tier}.demo.localhost:8123" in response["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in response["Content-Security-Policy"]


def test_only_that_page_may_frame_the_chat(client: Client) -> None:
    response = client.get("/", headers={"host": "pro.demo.localhost:8123"})
    assert "frame-ancestors http://demo.localhost:8123" in response["Content-Security-Policy"]
    assert "X-Frame-Options" not in response
    assert client.get("/accounts/login/")["X-Frame-Options"] == "DENY"


def test_signing_in_and_out(client: Client) -> None:
    wrong = client.post("/accounts/login/", {"username": "pro", "password": "guess"})
    assert "do not go together" in wrong.content.decode()
    client.post("/accounts/login/", {"username": "pro", "password": "pro"})
    page = client.get("/").content.decode()
    assert "Log out" in page
    assert "/admin/" not in page
    assert client.post("/accounts/logout/").status_code == 302
    assert "Log in" in client.get("/").content.decode()


def test_the_operator_is_shown_the_way_to_the_admin(client: Client) -> None:
    client.post("/accounts/login/", {"username": "admin", "password": "admin"})
    assert 'href="/admin/"' in client.get("/").content.decode()


# Guests


def test_each_session_of_a_guest_is_a_flow_of_its_own(client: Client) -> None:
    first, second = (Client().get("/").wsgi_request for _ in range(2))
    flows = [guests.resolve_flow(Caller(UPSTREAM, request=request)) for request in (first, second)]
    assert flows[0] != flows[1]
    assert guests.resolve_flow(Caller(UPSTREAM, request=first)) == flows[0]
    assert first.session.session_key not in flows[0]


def test_guests_without_a_session_are_known_by_their_address(client: Client) -> None:
    request = client.get("/accounts/login/").wsgi_request
    assert guests.resolve_flow(Caller(UPSTREAM, request=request)).startswith("ip:")
