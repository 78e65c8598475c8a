"""Detection of stale results: source code or package versions have changed since the run."""

from collections.abc import Mapping


def differences(computed_by: list[dict[str, str]], now: Mapping[str, str]) -> str:
    """Describe which source code and package versions have changed since a run.

    The text is empty if nothing has changed. A name that is not in a record is ignored. For
    example, the record of a shared first stage does not contain methods that are used later.

    Args:
        computed_by: Records of source code and versions, one for each part of the run.
        now: The present source code and versions.
    """
    if not computed_by:
        return "the result does not name its source code and versions"
    changed = {
        f"{name} {before[name]}, now {now[name]}"
        for before in computed_by
        for name in now
        if before.get(name, now[name]) != now[name]
    }
    return "; ".join(sorted(changed))
