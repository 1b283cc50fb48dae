"""A project with one view of each kind, for each server to serve."""

import json
import os

SECRET_KEY = "only for tests"
USE_TZ = True
DEBUG = False
ALLOWED_HOSTS = os.environ.get("SERVERS_HOSTS", "*").split(",")
ROOT_URLCONF = "tests.servers.urls"
WSGI_APPLICATION = "tests.servers.wsgi.application"
ASGI_APPLICATION = "tests.servers.asgi.application"
INSTALLED_APPS = [
    *os.environ.get("SERVERS_APPS", "").split(),
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "channels",
    "rest_framework",
    "llm_throttle",
]
MIDDLEWARE = [
    "django.middleware.gzip.GZipMiddleware",
    "tests.servers.views.replaces_responses",
    "django.middleware.http.ConditionalGetMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("SERVERS_DATABASE", ":memory:"),
        "OPTIONS": {"timeout": 20, "transaction_mode": "IMMEDIATE"},
    }
}
if "SERVERS_POSTGRES" in os.environ:
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "HOST": os.environ["SERVERS_POSTGRES"],
            "NAME": "servers",
            "USER": "postgres",
        }
    }
REDIS = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")
CACHES = {
    "default": {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": REDIS,
        "KEY_PREFIX": os.environ.get("SERVERS_PREFIX", "servers"),
    }
}
CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        "CONFIG": {"hosts": [REDIS]},
    }
}
if os.environ.get("SERVERS_ALONE"):  # one process, and no store beside it
    CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
    CHANNEL_LAYERS = {"default": {"BACKEND": "channels.layers.InMemoryChannelLayer"}}
LLM_THROTTLE = {
    "FLOW_RESOLVER": "tests.servers.views.flow_of",
    "BEAT": 0.5,
    "WORKER_TTL": 5.0,
    "RECOVERY_WINDOW": 0,
    "KEEP_ALIVE": 0.5,
    "START_GRACE": 2.0,
    "POLICY_MAX_AGE": 3600,
    **json.loads(os.environ.get("SERVERS_THROTTLE", "{}")),
}
REST_FRAMEWORK = {"DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"]}
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"()": "tests.servers.logs.Line"}},
    "handlers": {"lines": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["lines"], "level": "WARNING"},
    "loggers": {"django": {"handlers": [], "propagate": True}},
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
