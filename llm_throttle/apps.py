"""Where Django is told about the app: its signals and its checks."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class LlmThrottleConfig(AppConfig):
    name = "llm_throttle"
    verbose_name = _("LLM throttle")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import checks, policies, signals, worker  # noqa: F401 - registers the checks

        policies.connect()
        signals.policy_edited.connect(worker.publish_edit)
        worker.hear_sigterm()  # here, because a sync view's thread may not; also on first use
