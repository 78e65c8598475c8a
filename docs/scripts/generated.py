"""Write the generated parts of the pages: ``python docs/scripts/generated.py``.

A generated part is the text between two comments, ``<!-- name -->`` and ``<!-- end of name -->``. A
test compares the parts with the code.
"""

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import audit
from methods_table import quiet_table

from fl_lightning import FederatedCallback
from fl_lightning.verification.battery import REMEDIES, RULES
from fl_lightning.verification.claims import CLAIMS

DOCS = Path(__file__).parents[1]
sys.path.append(str(DOCS.parent / "tests" / "support"))
from broken_callbacks import FAILS  # a module of tests/support


def round_hooks() -> str:
    """Return the pseudo-code of a round from the docstring of ``FederatedCallback``."""
    block = re.search(r"One round is ::\n\n(.*?)\n\n\S", inspect.getdoc(FederatedCallback) or "", re.DOTALL)
    assert block is not None
    return "```text\n" + inspect.cleandoc(block[1]) + "\n```"


def rules() -> str:
    """Return all rules with docstring and remedy, and all claims with one line each."""
    counts = Counter(line for lines in FAILS.values() for line in lines)
    sections = [
        f"### {name}\n\n{_text(check)}\n\nIf it fails: {REMEDIES[name]}. The tests have {counts[name]} broken "
        f"method{'s' * (counts[name] > 1)} that fail{'s' * (counts[name] == 1)} this rule."
        for name, check in RULES.items()
    ]
    return "\n\n".join(["## Rules", *sections, "## Claims", _list(CLAIMS)])


def _text(check: Callable[..., object]) -> str:
    """Return the docstring of a rule as Markdown."""
    text = (inspect.getdoc(check) or "").replace("``", "`")
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)


def _list(checks: Mapping[str, Callable[..., object]]) -> str:
    first_lines = {name: (inspect.getdoc(check) or "").splitlines()[0] for name, check in checks.items()}
    return "\n".join(f"- `{name}`: {line.replace('``', '`')}" for name, line in first_lines.items())


GENERATED: dict[str, tuple[str, Callable[[], str]]] = {
    "audit": ("audit.md", audit.table),
    "measures": ("audit.md", audit.measures),
    "readings": ("audit.md", audit.readings),
    "methods": ("methods.md", quiet_table),
    "round": ("own-method.md", round_hooks),
    "rules": ("verify.md", rules),
}
"""The page of each part, and the function that returns its text."""


def between(name: str, page: str) -> str:
    """Return the text of a page between the two comments of a part."""
    found = re.search(rf"<!-- {name} -->\n(.*?)\n?<!-- end of {name} -->", page, re.DOTALL)
    assert found is not None, f"no part {name}"
    return found[1]


def replaced(name: str, page: str, part: str) -> str:
    """Return a page with a new text between the two comments of a part.

    Args:
        name: Name of the part.
        page: Text of the page.
        part: The new text.
    """
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    head, rest = page.split(start)
    return f"{head}{start}{part}\n{end}{rest.split(end)[1]}"


def main() -> None:
    """Rewrite all generated parts."""
    for name, (file, make) in GENERATED.items():
        (DOCS / file).write_text(replaced(name, (DOCS / file).read_text(), make()))


if __name__ == "__main__":
    main()
