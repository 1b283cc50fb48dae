"""One user's tier, whatever groups the user is in."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils.translation import gettext_lazy as _

from .rows import PolicyRow
from .tier import Tier


class TierAssignment(PolicyRow):
    """One user's tier, whatever groups the user is in."""

    user = models.OneToOneField(
        settings.AUTH_USER_MODEL,
        models.CASCADE,
        related_name="llm_throttle_assignment",
        verbose_name=_("user"),
    )
    tier = models.ForeignKey(
        Tier, models.CASCADE, related_name="assignments", verbose_name=_("tier")
    )
    expires_at = models.DateTimeField(
        _("expires at"),
        null=True,
        blank=True,
        help_text=_("From then on the user's groups decide again. Empty: never."),
    )

    class Meta:
        ordering = ("tier", "user")
        verbose_name = _("tier assignment")
        verbose_name_plural = _("tier assignments")

    def __str__(self) -> str:
        return f"{self.user} → {self.tier}"
