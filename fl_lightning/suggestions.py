"""Near names for messages about a misspelt one."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause such as ``"; did you mean FixBN?"``, empty where nothing known comes near.

    Args:
        name: The name that was found.
        known: The names that exist. Upper and lower case are taken as equal.
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    matches = [by_lower[match] for match in get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)]
    return f"; did you mean {' or '.join(matches)}?" if matches else ""
