"""Addresses of the sockets."""

from __future__ import annotations

from typing import Any

from django.urls import path

from demo_project.consumers import ChatConsumer
from llm_throttle.routing import websocket_urlpatterns as position_sockets

chat_socket: Any = ChatConsumer.as_asgi()  # Django's path() expects a view

websocket_urlpatterns = [path("ws/chat/", chat_socket), *position_sockets]
