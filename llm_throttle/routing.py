"""The socket that shows positions, for the project's ``URLRouter`` (inside its middleware)."""

from __future__ import annotations

from typing import Any

from django.urls import path

from .consumers import QueuePositionConsumer

position_socket: Any = QueuePositionConsumer.as_asgi()  # Django's path() expects a view

websocket_urlpatterns = [path("ws/llm-throttle/<str:upstream>/", position_socket)]
