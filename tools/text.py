"""How do figures look to people? Tables, ages, a bar for what takes time, and the log for who asks."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence

_BAR = 30
_STEPS = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as they need; the first one to the left, numbers to the right."""
    if not rows:
        return
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        first, *others = row
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells])


def age(seconds: float) -> str:
    """The two largest units of a time span: `3d 4h`, `12m 5s`, `0s`."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for step, unit in _STEPS:
        count, left = divmod(left, step)
        if count or parts:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2]) or "0s"


def log_to_stderr() -> None:
    """Show what the library logs for people who asked for it."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")


@contextlib.contextmanager
def bar(total: int, what: str = "") -> Iterator[Callable[[int], None]]:
    """A bar on stderr, where somebody looks at it; call it with how many are done."""
    shows = sys.stderr.isatty() and total > 0

    def show(count: int) -> None:
        if shows:
            filled = _BAR * min(count, total) // total
            picture = "#" * filled + "." * (_BAR - filled)
            print(f"\r[{picture}] {count:,} of {total:,} {what}", end="", file=sys.stderr, flush=True)

    show(0)
    yield show
    if shows:
        print(file=sys.stderr)
