"""Whose share a request is: the user whom the view knows, in every kind of view. IDENT-01."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

import pytest
from adrf.views import APIView as AsyncAPIView
from asgiref.sync import iscoroutinefunction, sync_to_async
from django.contrib.auth.models import Group, User
from django.core.exceptions import ImproperlyConfigured
from django.http import JsonResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.utils.decorators import sync_and_async_middleware
from django.utils.functional import SimpleLazyObject
from django.views import View
from rest_framework.authentication import (
    BaseAuthentication,
    SessionAuthentication,
    TokenAuthentication,
)
from rest_framework.authtoken.models import Token
from rest_framework.decorators import api_view, authentication_classes
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.generics import GenericAPIView
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from llm_throttle import admit
from llm_throttle.admission import snapshot
from llm_throttle.identity import Caller, Identity
from llm_throttle.models import Tier, TierLimit, Upstream
from llm_throttle.views import ThrottledChatMixin, throttled
from tests.waiting_room import eventually, is_empty


class Bearer(BaseAuthentication):
    """As a library for signed tokens does it: no session, no table."""

    def authenticate(self, request: Any) -> Any:
        kind, _, name = request.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer":
            return None
        user = User.objects.filter(username=name).first()
        if user is None:
            raise AuthenticationFailed
        return user, {"sub": name}

    def authenticate_header(self, request: Any) -> str:
        return "Bearer"


AUTHENTICATION = [TokenAuthentication, Bearer, SessionAuthentication]


def answer(request: Any) -> JsonResponse:
    """Who the store believes is here, and whom the view would name."""
    holders = [(holder.flow, holder.tier) for holder in snapshot("sim").holders]
    return JsonResponse({"holders": holders, "user": request.user.get_username()})


class Sync(ThrottledChatMixin, View):
    upstream = "sim"

    def get(self, request: Any) -> JsonResponse:
        return answer(request)


class Async(ThrottledChatMixin, View):
    upstream = "sim"

    async def get(self, request: Any) -> JsonResponse:
        return await sync_to_async(answer)(request)


class Rest(ThrottledChatMixin, APIView):
    upstream = "sim"
    authentication_classes = AUTHENTICATION

    def get(self, request: Any) -> JsonResponse:
        return answer(request)


class Generic(ThrottledChatMixin, GenericAPIView):
    upstream = "sim"
    authentication_classes = AUTHENTICATION

    def get(self, request: Any) -> JsonResponse:
        return answer(request)


class Actions(ThrottledChatMixin, ViewSet):
    upstream = "sim"
    authentication_classes = AUTHENTICATION

    def list(self, request: Any) -> JsonResponse:
        return answer(request)


class AsyncRest(ThrottledChatMixin, AsyncAPIView):
    upstream = "sim"
    authentication_classes = AUTHENTICATION

    async def get(self, request: Any) -> JsonResponse:
        return await sync_to_async(answer)(request)


@api_view(["GET"])
@authentication_classes(AUTHENTICATION)
@throttled("sim")
def rest_function(request: Any) -> JsonResponse:
    return answer(request)


@throttled("sim")
def function(request: Any) -> JsonResponse:
    return answer(request)


@throttled("sim")
async def async_function(request: Any) -> JsonResponse:
    return await sync_to_async(answer)(request)


IN_REST_FRAMEWORK = {
    "apiview": Rest.as_view(),
    "generic": Generic.as_view(),
    "viewset": Actions.as_view({"get": "list"}),
    "api_view": rest_function,
    "adrf": AsyncRest.as_view(),
}
IN_DJANGO = {
    "view": Sync.as_view(),
    "async-view": Async.as_view(),
    "function": function,
    "async-function": async_function,
}
urlpatterns = [path(f"{name}/", view) for name, view in (IN_REST_FRAMEWORK | IN_DJANGO).items()]


@pytest.fixture(autouse=True)
def urls(settings: Any, rows: Upstream) -> None:
    settings.ROOT_URLCONF = __name__
    rows.capacity = 4
    rows.save()
    TierLimit.objects.update(cap=3, depth_per_user=1)


@pytest.fixture
def ann() -> User:
    """In the tier ``gold`` by her group."""
    group = Group.objects.create(name="gold")
    Tier.objects.get(slug="gold").groups.add(group)
    user = User.objects.create_user("ann")
    user.groups.add(group)
    return user


@pytest.fixture
def bob() -> User:
    """In the default tier."""
    return User.objects.create_user("bob")


def token(user: User) -> dict[str, str]:
    key, _ = Token.objects.get_or_create(user=user)
    return {"Authorization": f"Token {key}"}


def bearer(user: User) -> dict[str, str]:
    return {"Authorization": f"Bearer {user.username}"}


def holds(user: User, tier: str) -> list[list[str]]:
    return [[f"user:{user.pk}", tier]]


@pytest.mark.parametrize("name", IN_REST_FRAMEWORK)
@pytest.mark.parametrize("sign", [token, bearer])
def test_rest_frameworks_user_counts_and_not_the_sessions(
    name: str, sign: Callable[[User], dict[str, str]], ann: User, bob: User
) -> None:
    client = Client()
    client.force_login(ann)
    response = client.get(f"/{name}/", headers=sign(bob))
    assert response.json() == {"holders": holds(bob, "free"), "user": "bob"}
    assert response["X-LLM-Throttle-Tier"] == "free"
    response = client.get(f"/{name}/")
    assert response.json() == {"holders": holds(ann, "gold"), "user": "ann"}


@pytest.mark.parametrize("name", IN_REST_FRAMEWORK)
def test_the_depth_is_that_of_rest_frameworks_user(name: str, ann: User, bob: User) -> None:
    client = Client()
    client.force_login(ann)
    held = admit("sim", user=bob)
    somewhere_else = contextvars.Context()
    somewhere_else.run(held.__enter__)
    response = client.get(f"/{name}/", headers=token(bob))
    assert (response.status_code, response.json()["reason"]) == (429, "user_depth")
    assert client.get(f"/{name}/").status_code == 200
    somewhere_else.run(held.__exit__, None, None, None)
    assert eventually(is_empty)


@pytest.mark.parametrize("name", IN_REST_FRAMEWORK | IN_DJANGO)
async def test_two_users_at_once_under_asgi(name: str, ann: User, bob: User) -> None:
    signs = {ann: await sync_to_async(token)(ann), bob: await sync_to_async(token)(bob)}
    found = {}

    async def one(user: User) -> None:
        client = AsyncClient()
        if name in IN_DJANGO:
            await client.aforce_login(user)
            response = await client.get(f"/{name}/")
        else:
            response = await client.get(f"/{name}/", headers=signs[user])
        found[user] = response["X-LLM-Throttle-Tier"]

    await asyncio.gather(one(ann), one(bob))
    assert found == {ann: "gold", bob: "free"}


@sync_and_async_middleware
def tokens_instead_of_sessions(get_response: Any) -> Any:
    """As libraries have it for projects without REST framework."""

    def sign_in(request: Any) -> None:
        name = request.headers.get("X-User")
        if name == "lazy-bob":
            request.user = SimpleLazyObject(lambda: User.objects.get(username="bob"))
        elif name:
            request.user = User.objects.get(username=name)

    async def async_middleware(request: Any) -> Any:
        await sync_to_async(sign_in)(request)
        return await get_response(request)

    def middleware(request: Any) -> Any:
        sign_in(request)
        return get_response(request)

    return async_middleware if iscoroutinefunction(get_response) else middleware


@pytest.mark.parametrize("name", IN_DJANGO)
@pytest.mark.parametrize("header", ["bob", "lazy-bob"])
async def test_a_user_whom_a_middleware_put_in_the_sessions_place_counts(
    name: str, header: str, ann: User, bob: User, settings: Any
) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.tokens_instead_of_sessions"]
    client = AsyncClient()
    await client.aforce_login(ann)
    response = await client.get(f"/{name}/", headers={"X-User": header})
    assert response.json() == {"holders": holds(bob, "free"), "user": "bob"}
    response = await client.get(f"/{name}/")
    assert response.json() == {"holders": holds(ann, "gold"), "user": "ann"}


# Guests


@pytest.mark.parametrize("name", IN_REST_FRAMEWORK | IN_DJANGO)
@pytest.mark.parametrize(
    ("address", "flow"),
    [
        ("192.0.2.7", "ip:192.0.2.7"),
        ("fe80::1%eth0", "ip:fe80::/64"),
        ("2001:db8:1:2:3::4", "ip:2001:db8:1:2::/64"),
        ("::ffff:192.0.2.7", "ip:192.0.2.7"),
        ("", "ip:unknown"),
    ],
)
def test_guests_are_told_apart_by_address_and_believed_nothing(
    name: str, address: str, flow: str
) -> None:
    forged = {"X-Forwarded-For": "198.51.100.1", "Forwarded": "for=198.51.100.1"}
    response = Client(REMOTE_ADDR=address).get(f"/{name}/", headers=forged)
    assert response.json() == {"holders": [[flow, "guest"]], "user": ""}


@pytest.mark.parametrize("name", ["view", "async-view", "apiview"])
def test_behind_a_proxy_only_what_it_wrote_counts(name: str, settings: Any) -> None:
    settings.LLM_THROTTLE |= {"TRUSTED_PROXIES": 1}
    client = Client(REMOTE_ADDR="10.0.0.1")
    sent = {"X-Forwarded-For": "203.0.113.9, 198.51.100.1"}
    assert client.get(f"/{name}/", headers=sent).json()["holders"] == [["ip:198.51.100.1", "guest"]]


# Resolvers of one's own


def by_key(caller: Caller) -> str:
    return f"key:{caller.request.headers['X-Key']}"


async def by_key_async(caller: Caller) -> str:
    await asyncio.sleep(0)
    assert caller.is_signed_in in (True, False)
    return by_key(caller)


def nonsense(caller: Caller) -> object:
    return 7


def raises(caller: Caller) -> str:
    raise RuntimeError("no such key")


async def raises_async(caller: Caller) -> str:
    raise RuntimeError("no such key")


@pytest.mark.parametrize("name", IN_REST_FRAMEWORK | IN_DJANGO)
@pytest.mark.parametrize("resolver", [by_key, by_key_async])
async def test_a_resolver_of_ones_own_may_be_sync_or_async_in_every_kind_of_view(
    name: str, resolver: Any, settings: Any, ann: User
) -> None:
    settings.LLM_THROTTLE |= {"FLOW_RESOLVER": f"{__name__}.{resolver.__name__}"}
    client = AsyncClient()
    await client.aforce_login(ann)
    response = await client.get(f"/{name}/", headers={"X-Key": "k7"})
    assert response.json()["holders"] == [["key:k7", "gold"]]


@pytest.mark.parametrize("name", IN_REST_FRAMEWORK | IN_DJANGO)
@pytest.mark.parametrize("resolver", [nonsense, raises, raises_async])
def test_a_resolver_that_fails_says_so_and_takes_no_slot(
    name: str, resolver: Any, settings: Any
) -> None:
    settings.LLM_THROTTLE |= {"TIER_RESOLVER": f"{__name__}.{resolver.__name__}"}
    with pytest.raises(ImproperlyConfigured, match="TIER_RESOLVER"):
        Client().get(f"/{name}/")
    response = Client(raise_request_exception=False).get(f"/{name}/")
    assert response.status_code == 500
    seen = snapshot("sim")
    assert (seen.in_flight, seen.waiting) == (0, 0)


def test_a_resolver_may_turn_a_caller_away(settings: Any) -> None:
    settings.LLM_THROTTLE |= {"FLOW_RESOLVER": f"{__name__}.turns_away"}
    for name in (*IN_DJANGO, *IN_REST_FRAMEWORK):
        assert Client().get(f"/{name}/").status_code == 403
    assert is_empty()


def turns_away(caller: Caller) -> str:
    from django.core.exceptions import PermissionDenied

    raise PermissionDenied


def test_an_identity_of_ones_own_needs_no_resolver() -> None:
    with admit("sim", identity=Identity("batch", "gold")):
        [holder] = snapshot("sim").holders
        assert (holder.flow, holder.tier) == ("batch", "gold")
