"""When a result is stale: its run was computed by other source or other versions than now."""

from collections.abc import Mapping


def differences(computed_by: list[dict[str, str]], now: Mapping[str, str]) -> str:
    """Say what of a run was computed otherwise than it would be now; empty if nothing was.

    Methods that a run had not yet, such as those after a shared first stage, do not count.
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
