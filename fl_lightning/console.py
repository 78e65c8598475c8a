"""Text for the terminal: tables, sizes and times."""

import sys
import textwrap
from collections.abc import Mapping

from rich.console import Console


def print_table(title: str, rows: Mapping[str, str]) -> None:
    """Print a table of names and values. On a terminal, long values are wrapped.

    Args:
        title: Line above the table; bold on a terminal.
        rows: Values by name.
    """
    console = Console(highlight=False)
    indent = max(map(len, rows)) + 2
    width = max(console.width - indent, 20) if console.is_terminal else sys.maxsize
    console.print(title, style="bold")
    for name, value in rows.items():
        lines = textwrap.wrap(value, width, break_long_words=False, break_on_hyphens=False)
        text = f"\n{'':{indent}}".join(lines)
        console.print(f"{name:<{indent}}{text}".rstrip(), markup=False, soft_wrap=True)


def format_bytes(count: float) -> str:
    """Format a number of bytes, such as ``"1.084 MB"`` (1 MB is 10^6 bytes)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def time_in_words(seconds: float) -> str:
    """Format a number of seconds as a time, such as ``"3.2 min"``."""
    for unit, size in (("s", 60), ("min", 60), ("h", 24)):
        if seconds < 2 * size:
            return f"{seconds:.3g} {unit}"
        seconds /= size
    return f"{seconds:.3g} days"
