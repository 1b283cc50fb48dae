"""Settings of the demo: a chat product with several workers and one provider.

What another project copies from here is marked: the app in INSTALLED_APPS, a cache, LLM_THROTTLE.
"""

from __future__ import annotations

import os
from pathlib import Path

from demo_project import environment

BASE_DIR = Path(__file__).resolve().parent.parent

SECRET_KEY = "a demo on loopback: nothing of value is signed with this"  # noqa: S105 - as it says
DEBUG = False
# Browsers take every name under .localhost for this machine: one per tier keeps cookies apart.
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "[::1]", ".localhost"]
ROOT_URLCONF = "demo_project.urls"
ASGI_APPLICATION = "demo_project.asgi.application"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "channels",  # copy this, for chats and positions over sockets
    "rest_framework",
    "rest_framework.authtoken",
    "llm_throttle",  # copy this
    "demo_project",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "demo_project.middleware.content_security_policy",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "demo_project" / "templates"],  # before the admin's own log-in pages
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
DATABASES = {"default": environment.database(os.environ.get("DATABASE_URL", ""), BASE_DIR)}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# Copy this: a django-redis cache that all workers share.
CACHES = {
    "default": environment.cache(
        os.environ.get("REDIS_URL", ""), key_prefix=os.environ.get("CACHE_KEY_PREFIX", "")
    )
}
# Copy this: sockets need a channel layer.
CHANNEL_LAYERS = {"default": environment.channel_layer(os.environ.get("REDIS_URL", ""))}
# Copy this, or leave it out: every key has a default.
LLM_THROTTLE = {
    "CACHE": "default",
    "FLOW_RESOLVER": "demo_project.guests.resolve_flow",  # one flow per guest's session
}

LOGIN_REDIRECT_URL = "/"
LOGOUT_REDIRECT_URL = "/"
SESSION_COOKIE_SAMESITE = "Lax"
# The accounts' passwords are their names, and load tests sign in hundreds of them.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

STATIC_URL = "static/"
LANGUAGE_CODE = "en"
USE_TZ = True

# The provider. The SDKs read ANTHROPIC_API_KEY and OPENAI_API_KEY themselves; the simulated
# provider takes any key.
UPSTREAM_URL = environment.upstream(os.environ.get("UPSTREAM_URL", ""))
ANTHROPIC_MODEL = os.environ.get("ANTHROPIC_MODEL", "claude-haiku-5-5")
OPENAI_MODEL = os.environ.get("OPENAI_MODEL", "gpt-5.4-mini")
# How long a provider may be silent before the call counts as failed.
UPSTREAM_TIMEOUT = 60.0

# The views that `manage.py stampede --compare` measures against, and the limit they are to keep.
# They let calls past the gate, so nothing else switches them on.
COMPARED_CAPACITY = environment.number(os.environ, "DEMO_COMPARED_CAPACITY", 0)
