"""What the rows have in common: saved with the version, and known by a slug that stays."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Self

from django.core.exceptions import ValidationError
from django.db import models, router, transaction
from django.utils.translation import gettext_lazy as _

SLUG_MESSAGE = _(
    "Use only the letters a to z and A to Z, digits, hyphens and underscores: no spaces, colons, "
    "braces or accented letters."
)
SLUG_HELP = _(
    "The name that the code and the metrics use. Letters a to z and A to Z, digits, hyphens and "
    "underscores. It cannot be changed later."
)


class PolicyRow(models.Model):
    """A row that policies are built from: it changes together with the version, or not at all."""

    class Meta:
        abstract = True

    def save(self, *args: Any, **kwargs: Any) -> None:
        # The version is bumped by signals, which Django sends outside of its own transaction.
        using = kwargs.get("using") or router.db_for_write(type(self), instance=self)
        with transaction.atomic(using=using):
            super().save(*args, **kwargs)


class Named(PolicyRow):
    """A row that is known by a slug which stays what it is."""

    slug = models.SlugField(
        _("slug"), unique=True, help_text=SLUG_HELP, error_messages={"invalid": SLUG_MESSAGE}
    )
    name = models.CharField(
        _("name"), max_length=100, blank=True, help_text=_("For people. Empty: the slug is shown.")
    )

    loaded_slug: str | None = None
    """The slug that the row has in the database, None before it is saved."""

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return self.name or self.slug

    def save(self, *args: Any, **kwargs: Any) -> None:
        super().save(*args, **kwargs)
        self.loaded_slug = self.slug

    @classmethod
    def from_db(
        cls, db: str | None, field_names: Collection[str], values: Collection[Any], **kwargs: Any
    ) -> Self:
        instance = super().from_db(db, field_names, values, **kwargs)
        instance.loaded_slug = instance.__dict__.get("slug")
        return instance

    def clean(self) -> None:
        super().clean()
        if self.loaded_slug is not None and self.slug != self.loaded_slug:
            raise ValidationError({"slug": self._slug_is_fixed()})

    def _slug_is_fixed(self) -> ValidationError:
        return ValidationError(
            _(
                "The slug “%(slug)s” cannot be changed: what runs now is counted under it. "
                "Create a new one, then delete this one."
            ),
            code="slug_fixed",
            params={"slug": self.loaded_slug},
        )
