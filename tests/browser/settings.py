"""The demo's settings, with what a test has to change given by the environment."""

import json
import os

from demo_project.settings import *  # noqa: F403 - all of it

LLM_THROTTLE = LLM_THROTTLE | json.loads(os.environ.get("BROWSER_THROTTLE", "{}"))  # noqa: F405 - the demo's
