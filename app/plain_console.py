"""Where commands print: names and paths appear as they are, whatever rich could read into them."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_WIDEST = 10_000


def plain_console() -> Console:
    """On stdout; takes "[x]" and ":x:" for text, and cuts no line, so that it can be copied."""
    return Console(markup=False, emoji=False, highlight=False, soft_wrap=True)


def print_whole(table: Table) -> None:
    """A table whose cells are not cut, however narrow the terminal is: they are to be copied."""
    console = plain_console()
    wide = console.options.update(max_width=_WIDEST)
    console.width = max(console.width, Measurement.get(console, wide, table).maximum)
    console.print(table)
