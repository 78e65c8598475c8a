"""Detection of stale results, computed by other source code or other versions of packages."""

from collections.abc import Mapping


def differences(computed_by: list[dict[str, str]], now: Mapping[str, str]) -> str:
    """Name the sources and versions of a run that differ from ``now``; empty if all are equal.

    Source of methods that the run did not use is ignored, as after a shared first stage.
    """
    if not computed_by:
        return "it does not say what computed it"
    changed = {
        f"{name} {before[name]}, now {now[name]}"
        for before in computed_by
        for name in now
        if before.get(name, now[name]) != now[name]
    }
    return "; ".join(sorted(changed))
