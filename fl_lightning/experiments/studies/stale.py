"""Stale results: other source or other versions computed their runs."""

from collections.abc import Mapping


def differences(computed_by: list[dict[str, str]], now: Mapping[str, str]) -> str:
    """Name the source and versions of a run that differ from those of now, empty if all are equal.

    Methods that the run did not have yet, as in a shared first stage, do not count.
    """
    if not computed_by:
        return "it does not say what computed it"
    found = {
        f"{name} {before[name]}, now {now[name]}"
        for before in computed_by
        for name in now
        if before.get(name, now[name]) != now[name]
    }
    return "; ".join(sorted(found))
