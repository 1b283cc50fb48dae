"""The migrations are those that the models call for."""

from __future__ import annotations

import pytest
from django.core.management import call_command


@pytest.mark.django_db
def test_no_migration_is_missing():
    call_command("makemigrations", "llm_throttle", check=True, dry_run=True, verbosity=0)
