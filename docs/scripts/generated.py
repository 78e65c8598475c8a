"""Write the parts of the pages that are made from the code: ``python docs/scripts/generated.py``.

Each stands between two comments, ``<!-- name -->`` and ``<!-- end of name -->``; a test compares them.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from methods_table import quiet_table

from fl_lightning import FederatedCallback
from fl_lightning.verification.battery import RULES
from fl_lightning.verification.claims import CLAIMS

DOCS = Path(__file__).parents[1]


def round_hooks() -> str:
    """Return the round with its hooks, from the docstring of :class:`~fl_lightning.FederatedCallback`."""
    block = re.search(r"One round is ::\n\n(.*?)\n\n\S", inspect.getdoc(FederatedCallback) or "", re.DOTALL)
    assert block is not None
    return "```text\n" + inspect.cleandoc(block[1]) + "\n```"


def rules() -> str:
    """Return the rules and claims of ``verify`` with the first lines of their docstrings."""
    return "\n\n".join(
        f"{title}\n\n{_list(checks)}"
        for title, checks in (
            ("**Rules**", RULES),
            ("**Claims**", CLAIMS),
        )
    )


def _list(checks: Mapping[str, Callable[..., object]]) -> str:
    first_lines = {name: (inspect.getdoc(check) or "").splitlines()[0] for name, check in checks.items()}
    return "\n".join(f"- `{name}`: {line.replace('``', '`')}" for name, line in first_lines.items())


GENERATED: dict[str, tuple[str, Callable[[], str]]] = {
    "methods": ("methods.md", quiet_table),
    "round": ("own-method.md", round_hooks),
    "rules": ("verify.md", rules),
}
"""The page of each part, and what makes it."""


def between(name: str, page: str) -> str:
    """Return the text of a page between the comments of a part."""
    found = re.search(rf"<!-- {name} -->\n(.*?)\n?<!-- end of {name} -->", page, re.DOTALL)
    assert found is not None, f"no part {name}"
    return found[1]


def replaced(name: str, page: str, part: str) -> str:
    """Return a page with the text between the comments of a part replaced."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    head, rest = page.split(start)
    return f"{head}{start}{part}\n{end}{rest.split(end)[1]}"


def main() -> None:
    """Write every part anew."""
    for name, (file, make) in GENERATED.items():
        (DOCS / file).write_text(replaced(name, (DOCS / file).read_text(), make()))


if __name__ == "__main__":
    main()
