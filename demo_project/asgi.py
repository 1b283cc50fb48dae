"""The ASGI application: the pages, the chat, sockets, and static files without a web server."""

from __future__ import annotations

import os
from importlib import import_module

from channels.auth import AuthMiddlewareStack
from channels.routing import ProtocolTypeRouter, URLRouter
from channels.security.websocket import AllowedHostsOriginValidator
from django.conf import settings
from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler
from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "demo_project.settings")

pages = ASGIStaticFilesHandler(get_asgi_application())

# Django imports the views at the first request. The SDKs take a second to import, which would
# stop the event loop under the first clients.
import_module(settings.ROOT_URLCONF)
sockets = import_module("demo_project.routing").websocket_urlpatterns

application = ProtocolTypeRouter(
    {
        "http": pages,
        # Cookies come with a socket from any page: other sites' pages are sent away.
        "websocket": AllowedHostsOriginValidator(AuthMiddlewareStack(URLRouter(sockets))),
    }
)
