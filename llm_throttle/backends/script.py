"""What goes to ``scheduler.lua`` and what comes back: commands to arguments, answers to replies."""

from __future__ import annotations

from base64 import b32encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.resources import files
from itertools import batched
from typing import Any

from ..scheduling import commands, decisions
from ..scheduling.commands import Call, Command
from ..scheduling.decisions import Answer, Notice, Reply
from ..scheduling.policy import Policy
from ..scheduling.recovery import Timing
