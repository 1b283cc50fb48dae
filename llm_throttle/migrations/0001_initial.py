# ruff: noqa: E501, I001, RUF012 - written by makemigrations

import django.core.validators
import django.db.models.deletion
import llm_throttle.models
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        ("auth", "0012_alter_user_first_name_max_length"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name="Tier",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "slug",
                    models.SlugField(
                        error_messages={
                            "invalid": "Use only the letters a to z and A to Z, digits, hyphens and underscores: no spaces, colons, braces or accented letters."
                        },
                        help_text="The name that the code and the metrics use. Letters a to z and A to Z, digits, hyphens and underscores. It cannot be changed later.",
                        unique=True,
                        verbose_name="slug",
                    ),
                ),
                (
                    "name",
                    models.CharField(
                        blank=True,
                        help_text="For people. Empty: the slug is shown.",
                        max_length=100,
                        verbose_name="name",
                    ),
                ),
                (
                    "is_default",
                    models.BooleanField(
                        default=False,
                        help_text="The tier of signed-in users that neither an assignment nor a group places.",
                        verbose_name="default for signed-in users",
                    ),
                ),
                (
                    "is_anonymous",
                    models.BooleanField(
                        default=False,
                        help_text="The tier of callers who are not signed in.",
                        verbose_name="for guests",
                    ),
                ),
                (
                    "groups",
                    models.ManyToManyField(
                        blank=True,
                        help_text="Members of these groups are in this tier. Of several tiers the one with the highest weight counts.",
                        related_name="llm_throttle_tiers",
                        to="auth.group",
                        verbose_name="groups",
                    ),
                ),
            ],
            options={
                "verbose_name": "tier",
                "verbose_name_plural": "tiers",
                "ordering": ("slug",),
            },
        ),
        migrations.CreateModel(
            name="TierAssignment",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "expires_at",
                    models.DateTimeField(
                        blank=True,
                        help_text="From then on the user's groups decide again. Empty: never.",
                        null=True,
                        verbose_name="expires at",
                    ),
                ),
                (
                    "tier",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="assignments",
                        to="llm_throttle.tier",
                        verbose_name="tier",
                    ),
                ),
                (
                    "user",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="llm_throttle_assignment",
                        to=settings.AUTH_USER_MODEL,
                        verbose_name="user",
                    ),
                ),
            ],
            options={
                "verbose_name": "tier assignment",
                "verbose_name_plural": "tier assignments",
                "ordering": ("tier", "user"),
            },
        ),
        migrations.CreateModel(
            name="Upstream",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "slug",
                    models.SlugField(
                        error_messages={
                            "invalid": "Use only the letters a to z and A to Z, digits, hyphens and underscores: no spaces, colons, braces or accented letters."
                        },
                        help_text="The name that the code and the metrics use. Letters a to z and A to Z, digits, hyphens and underscores. It cannot be changed later.",
                        unique=True,
                        verbose_name="slug",
                    ),
                ),
                (
                    "name",
                    models.CharField(
                        blank=True,
                        help_text="For people. Empty: the slug is shown.",
                        max_length=100,
                        verbose_name="name",
                    ),
                ),
                (
                    "capacity",
                    models.PositiveIntegerField(
                        help_text="How many calls may run at once, over all workers and tiers. Lowering it cuts no running stream: nobody is let in until enough have ended. 0 lets nobody in.",
                        validators=[
                            django.core.validators.MinValueValidator(0),
                            django.core.validators.MaxValueValidator(1000000),
                        ],
                        verbose_name="capacity",
                    ),
                ),
                (
                    "queue_depth",
                    models.PositiveIntegerField(
                        blank=True,
                        help_text="How many requests may wait, all tiers together. 0: nobody waits. Empty: only the tiers' own queue depths count.",
                        null=True,
                        validators=[
                            django.core.validators.MinValueValidator(0),
                            django.core.validators.MaxValueValidator(1000000),
                        ],
                        verbose_name="queue depth",
                    ),
                ),
                (
                    "max_hold",
                    models.PositiveIntegerField(
                        default=300,
                        help_text="Seconds. A stream that runs for longer is ended and its slot taken back.",
                        validators=[
                            django.core.validators.MinValueValidator(1),
                            django.core.validators.MaxValueValidator(86400),
                        ],
                        verbose_name="longest hold",
                    ),
                ),
                (
                    "drain",
                    models.PositiveIntegerField(
                        default=50,
                        help_text="Milliseconds, 0 to 500. A slot stays taken for so long after a call was broken off, because the service itself notices a little later.",
                        validators=[
                            django.core.validators.MinValueValidator(0),
                            django.core.validators.MaxValueValidator(500),
                        ],
                        verbose_name="drain",
                    ),
                ),
                (
                    "grace",
                    models.PositiveIntegerField(
                        default=15,
                        help_text="Seconds. A waiting client whose connection drops may come back to its place for so long. 0: the place is lost at once.",
                        validators=[
                            django.core.validators.MinValueValidator(0),
                            django.core.validators.MaxValueValidator(86400),
                        ],
                        verbose_name="keep my place",
                    ),
                ),
                (
                    "is_paused",
                    models.BooleanField(
                        default=False,
                        help_text="Lets nobody in. Waiters stay in line within their budgets; running streams go on.",
                        verbose_name="paused",
                    ),
                ),
                (
                    "version",
                    llm_throttle.models.VersionField(
                        default=1,
                        editable=False,
                        help_text="Goes up with every edit. Workers follow the highest they have seen.",
                        verbose_name="version",
                    ),
                ),
            ],
            options={
                "verbose_name": "upstream",
                "verbose_name_plural": "upstreams",
                "ordering": ("slug",),
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("capacity__range", (0, 1000000))),
                        name="llm_throttle_upstream_capacity_range",
                        violation_error_message="The capacity is 0 to 1,000,000.",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("queue_depth__range", (0, 1000000))),
                        name="llm_throttle_upstream_queue_depth_range",
                        violation_error_message="The queue depth is 0 to 1,000,000.",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("max_hold__range", (1, 86400))),
                        name="llm_throttle_upstream_max_hold_range",
                        violation_error_message="The longest hold is 1 to 86,400 s.",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("drain__range", (0, 500))),
                        name="llm_throttle_upstream_drain_range",
                        violation_error_message="The drain is 0 to 500 ms.",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("grace__range", (0, 86400))),
                        name="llm_throttle_upstream_grace_range",
                        violation_error_message="Keep my place lasts 0 to 86,400 seconds.",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="TierLimit",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "cap",
                    models.PositiveIntegerField(
                        blank=True,
                        help_text="The most slots this tier may hold at once. Empty: the whole capacity.",
                        null=True,
                        validators=[
                            django.core.validators.MinValueValidator(0),
                            django.core.validators.MaxValueValidator(1000000),
                        ],
                        verbose_name="cap",
                    ),
                ),
                (
                    "reserved",
                    models.PositiveIntegerField(
                        blank=True,
                        default=0,
                        help_text="Slots kept free for this tier whoever else waits. Empty or 0: none.",
                        validators=[
                            django.core.validators.MinValueValidator(0),
                            django.core.validators.MaxValueValidator(1000000),
                        ],
                        verbose_name="reserved",
                    ),
                ),
                (
                    "weight",
                    models.PositiveIntegerField(
                        blank=True,
                        default=1,
                        help_text="1 to 1000. Its share while tiers compete: 10 gets ten slots for each one of a tier with 1. Empty: 1.",
                        validators=[
                            django.core.validators.MinValueValidator(1),
                            django.core.validators.MaxValueValidator(1000),
                        ],
                        verbose_name="weight",
                    ),
                ),
                (
                    "wait_budget",
                    models.PositiveIntegerField(
                        blank=True,
                        default=0,
                        help_text="Seconds that a request may wait for a slot before it is refused. Empty or 0: it never waits.",
                        validators=[
                            django.core.validators.MinValueValidator(0),
                            django.core.validators.MaxValueValidator(86400),
                        ],
                        verbose_name="wait budget",
                    ),
                ),
                (
                    "queue_depth",
                    models.PositiveIntegerField(
                        blank=True,
                        help_text="How many requests of this tier may wait. 0: none. Empty: only the upstream's own queue depth counts.",
                        null=True,
                        validators=[
                            django.core.validators.MinValueValidator(0),
                            django.core.validators.MaxValueValidator(1000000),
                        ],
                        verbose_name="queue depth",
                    ),
                ),
                (
                    "depth_per_user",
                    models.PositiveIntegerField(
                        blank=True,
                        default=8,
                        help_text="1 to 100. How many requests one user may have waiting and running. Empty: 8.",
                        validators=[
                            django.core.validators.MinValueValidator(1),
                            django.core.validators.MaxValueValidator(100),
                        ],
                        verbose_name="depth per user",
                    ),
                ),
                (
                    "tier",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="limits",
                        to="llm_throttle.tier",
                        verbose_name="tier",
                    ),
                ),
                (
                    "upstream",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="limits",
                        to="llm_throttle.upstream",
                        verbose_name="upstream",
                    ),
                ),
            ],
            options={
                "verbose_name": "tier limit",
                "verbose_name_plural": "tier limits",
                "ordering": ("upstream", "-weight", "tier"),
            },
        ),
        migrations.AddConstraint(
            model_name="tier",
            constraint=models.UniqueConstraint(
                condition=models.Q(("is_default", True)),
                fields=("is_default",),
                name="llm_throttle_one_default_tier",
                violation_error_message="Another tier is the default for signed-in users.",
            ),
        ),
        migrations.AddConstraint(
            model_name="tier",
            constraint=models.UniqueConstraint(
                condition=models.Q(("is_anonymous", True)),
                fields=("is_anonymous",),
                name="llm_throttle_one_anonymous_tier",
                violation_error_message="Another tier is the one for guests.",
            ),
        ),
        migrations.AddConstraint(
            model_name="tierlimit",
            constraint=models.UniqueConstraint(
                fields=("upstream", "tier"),
                name="llm_throttle_one_limit_per_tier",
                violation_error_message="This upstream has limits for this tier already. Load the page again to see them.",
            ),
        ),
        migrations.AddConstraint(
            model_name="tierlimit",
            constraint=models.CheckConstraint(
                condition=models.Q(("reserved__lte", models.F("cap"))),
                name="llm_throttle_tierlimit_reserved_within_cap",
                violation_error_message="A tier cannot reserve more slots than its cap.",
            ),
        ),
        migrations.AddConstraint(
            model_name="tierlimit",
            constraint=models.CheckConstraint(
                condition=models.Q(("cap__range", (0, 1000000))),
                name="llm_throttle_tierlimit_cap_range",
                violation_error_message="The cap is 0 to 1,000,000.",
            ),
        ),
        migrations.AddConstraint(
            model_name="tierlimit",
            constraint=models.CheckConstraint(
                condition=models.Q(("reserved__range", (0, 1000000))),
                name="llm_throttle_tierlimit_reserved_range",
                violation_error_message="Reserved is 0 to 1,000,000.",
            ),
        ),
        migrations.AddConstraint(
            model_name="tierlimit",
            constraint=models.CheckConstraint(
                condition=models.Q(("weight__range", (1, 1000))),
                name="llm_throttle_tierlimit_weight_range",
                violation_error_message="The weight is 1 to 1000.",
            ),
        ),
        migrations.AddConstraint(
            model_name="tierlimit",
            constraint=models.CheckConstraint(
                condition=models.Q(("wait_budget__range", (0, 86400))),
                name="llm_throttle_tierlimit_wait_budget_range",
                violation_error_message="The wait budget is 0 to 86,400 s.",
            ),
        ),
        migrations.AddConstraint(
            model_name="tierlimit",
            constraint=models.CheckConstraint(
                condition=models.Q(("queue_depth__range", (0, 1000000))),
                name="llm_throttle_tierlimit_queue_depth_range",
                violation_error_message="The queue depth is 0 to 1,000,000.",
            ),
        ),
        migrations.AddConstraint(
            model_name="tierlimit",
            constraint=models.CheckConstraint(
                condition=models.Q(("depth_per_user__range", (1, 100))),
                name="llm_throttle_tierlimit_depth_per_user_range",
                violation_error_message="The depth per user is 1 to 100.",
            ),
        ),
    ]
