"""Addresses of the sockets."""

from __future__ import annotations

from typing import Any

from channels.generic.websocket import AsyncWebsocketConsumer
from django.urls import path, re_path

from demo_project.consumers import ChatConsumer
from llm_throttle.routing import websocket_urlpatterns as position_sockets

chat_socket: Any = ChatConsumer.as_asgi()  # Django's path() expects a view


class NoSuchSocket(AsyncWebsocketConsumer):
    """Where nothing else is: Channels would raise an error of the server's."""

    async def connect(self) -> None:
        await self.close()


no_such_socket: Any = NoSuchSocket.as_asgi()

websocket_urlpatterns = [
    path("ws/chat/", chat_socket),
    *position_sockets,
    re_path("", no_such_socket),
]
