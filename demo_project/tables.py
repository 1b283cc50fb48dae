"""Aligned text tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(
    head: Sequence[str], rows: Sequence[Sequence[object]], *, left: Sequence[int] = (0,)
) -> str:
    """The rows under their heads; the columns in *left* are flush left, numbers flush right."""
    lines = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
