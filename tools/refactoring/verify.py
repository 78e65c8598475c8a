"""What ``verify`` says of the tests' broken methods and of the shipped methods: which lines of a certificate fail."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import common


def methods() -> Iterator[tuple[str, Callable[[], Any]]]:
    """All methods by name, with what makes each."""
    from fl_lightning import FederatedCallback, callbacks

    broken = import_module("tests.support.broken_callbacks")
    for kind, classes in ("broken", broken.FAILS), ("right", broken.RIGHT):
        for cls in classes:
            yield f"{kind} {cls.__module__.rpartition('.')[2]}.{cls.__name__}", cls
    for name in callbacks.__all__:
        cls = getattr(callbacks, name)
        examples = cls.examples if issubclass(cls, FederatedCallback) else ()
        for number, settings in enumerate(examples, 1):
            # by number, since a setting may have another name afterwards
            yield f"shipped {name}, example {number}", partial(cls, **settings)


def certified(make: Callable[[], Any]) -> None:
    """Print the lines of a method's certificate by their status."""
    from fl_lightning.verification import certify

    lines: dict[str, list[str]] = {}
    certificate = certify(make, references=False)
    for finding in (*certificate.rules, *certificate.equalities):
        lines.setdefault(finding.status, []).append(finding.line)
    print(json.dumps({status: sorted(found) for status, found in lines.items() if status != "PASSED"}))


def look(only: str, folder: Path) -> dict[str, Any]:
    """Verify the methods whose name contains a text."""
    found = {}
    for name, make in methods():
        if only not in name:
            continue
        own = folder / name.replace(" ", "_")
        own.mkdir()
        ended = common.fork(partial(certified, make), own)
        last = ended.err.strip().splitlines()[-1:]
        found[name] = json.loads(ended.out.splitlines()[-1]) if ended.status == 0 else {"raises": last}
        print(f"{name}: {ended.seconds} s {found[name]}", flush=True)
    return found


if __name__ == "__main__":
    common.main(__doc__, look)
