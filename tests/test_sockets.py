"""Sockets and rude clients: what is no message is told, and what is too much ends the socket."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Room
from .socket_clients import chat, hear
from .waiting_room import overview

pytestmark = [
    pytest.mark.django_db,  # Channels looks after old connections before every message
    pytest.mark.usefixtures("flow_by_user"),
]


@pytest.mark.parametrize(
    ("text", "code", "close"),
    [
        ("no json", "not_json", 4400),
        ("[" * 100_000, "too_large", 4413),
        ("[" * 50_000, "not_json", 4400),
        ('"' + "x" * 70_000 + '"', "too_large", 4413),
    ],
)
async def test_what_is_no_message_is_told_and_closes_the_socket(
    room: Room, text: str, code: str, close: int
) -> None:
    async with chat() as socket:
        await socket.send_to(text_data=text)
        assert (await hear(socket, "error"))["code"] == code
        assert await socket.receive_output(1) == {"type": "websocket.close", "code": close}
    assert overview().in_flight == 0


@pytest.mark.parametrize("message", [[], 7, None, {}, {"type": "dance"}, {"type": ["message"]}])
async def test_an_unknown_type_is_told_and_the_socket_goes_on(room: Room, message: Any) -> None:
    async with chat() as socket:
        await socket.send_json_to(message)
        assert (await hear(socket, "error"))["code"] == "unknown_type"
        await socket.send_json_to({"type": "message", "text": "hello"})
        await hear(socket, "done")


async def test_binary_frames_are_refused(room: Room) -> None:
    async with chat() as socket:
        await socket.send_to(bytes_data=b"{}")
        assert (await hear(socket, "error"))["code"] == "not_json"


async def test_a_flood_of_messages_closes_the_socket(room: Room) -> None:
    async with chat() as socket:
        for _ in range(1000):
            await socket.send_json_to({"type": "cancel"})
        while (error := await hear(socket, "error"))["code"] == "idle":
            pass
        assert error["code"] == "flood"
        assert await socket.receive_output(1) == {"type": "websocket.close", "code": 4429}
        assert await socket.receive_nothing()


async def test_text_that_is_no_unicode_comes_back_as_it_went(room: Room) -> None:
    async with chat() as socket:
        await socket.send_to(text_data='{"type": "message", "text": "\\ud800"}')
        assert (await hear(socket, "token"))["text"] == "\ud800"
        await hear(socket, "done")
