"""A sorted list of tuples: the pure twin of a sorted set in the store."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any


class Ordered:
    """Unique tuples in order; ranks and ranges by binary search."""

    def __init__(self) -> None:
        self._items: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._items)

    def __getitem__(self, rank: int) -> tuple[Any, ...]:
        return self._items[rank]

    def add(self, item: tuple[Any, ...]) -> None:
        rank = bisect_left(self._items, item)
        if rank == len(self._items) or self._items[rank] != item:
            self._items.insert(rank, item)

    def remove(self, item: tuple[Any, ...]) -> None:
        rank = bisect_left(self._items, item)
        if rank < len(self._items) and self._items[rank] == item:
            del self._items[rank]

    def rank(self, item: tuple[Any, ...]) -> int:
        """How many items come before this one, whether it is in or not."""
        return bisect_left(self._items, item)

    def up_to(self, bound: tuple[Any, ...], limit: int) -> list[tuple[Any, ...]]:
        """The first items that are <= ``bound``, ``limit`` at most."""
        return self._items[: min(limit, bisect_right(self._items, bound))]

    def between(
        self, low: tuple[Any, ...], high: tuple[Any, ...], limit: int
    ) -> list[tuple[Any, ...]]:
        """The first items that are > ``low`` and <= ``high``, ``limit`` at most."""
        start = bisect_right(self._items, low)
        return self._items[start : min(start + limit, bisect_right(self._items, high))]

    def starting(self, prefix: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """The items that begin with ``prefix``."""
        low = bisect_left(self._items, prefix)
        size = len(prefix)
        high = bisect_right(self._items, prefix, key=lambda item: item[:size])
        return self._items[low:high]
