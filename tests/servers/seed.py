"""Make the tables and one upstream per name given: ``slug`` or ``slug:capacity``."""

import os
import sys

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.servers.settings")


def main(slugs: list[str]) -> None:
    django.setup()
    from django.core.management import call_command

    from llm_throttle.models import Tier, TierLimit, Upstream

    call_command("migrate", verbosity=0)
    tier = Tier.objects.create(slug="any", is_default=True, is_anonymous=True)
    for name in slugs:
        slug, _, capacity = name.partition(":")
        upstream = Upstream.objects.create(slug=slug, capacity=int(capacity or 1), max_hold=60)
        TierLimit.objects.create(upstream=upstream, tier=tier, wait_budget=3, depth_per_user=100)


if __name__ == "__main__":
    main(sys.argv[1:])
