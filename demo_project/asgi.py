"""The ASGI application: the pages, the chat, and static files without a web server in front."""

from __future__ import annotations

import os
from importlib import import_module

from django.conf import settings
from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler
from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "demo_project.settings")

application = ASGIStaticFilesHandler(get_asgi_application())

# Django imports the views at the first request. The SDKs take a second to import, which would
# stop the event loop under the first clients.
import_module(settings.ROOT_URLCONF)
