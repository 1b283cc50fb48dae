"""The demo's settings, with what a scenario has to change given by the environment."""

import json
import os

from demo_project.settings import *  # noqa: F403 - all of it

LLM_THROTTLE = LLM_THROTTLE | json.loads(os.environ.get("ACCEPTANCE_THROTTLE", "{}"))  # noqa: F405 - the demo's
MIDDLEWARE = ["tests.acceptance.middleware.dawdle", *MIDDLEWARE]  # noqa: F405 - as above
ROOT_URLCONF = "tests.acceptance.urls"
if "ACCEPTANCE_POSTGRES" in os.environ:
    DATABASES["default"] = {  # noqa: F405 - as above
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "acceptance",
        "USER": "postgres",
        "HOST": os.environ["ACCEPTANCE_POSTGRES"],
    }
DATABASES["default"]["ATOMIC_REQUESTS"] = bool(os.environ.get("ACCEPTANCE_ATOMIC"))  # noqa: F405 - as above
