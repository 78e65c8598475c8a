"""Write the generated parts of the pages: ``python docs/scripts/generated.py``.

A generated part is the text between two comments, ``<!-- name -->`` and ``<!-- end of name -->``. A
test compares the parts with the code.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import audit
from methods_table import FAMILIES, family, quiet_table

from fl_lightning import FederatedCallback
from fl_lightning.models.norm import NORMS
from fl_lightning.verification.equalities import EQUALITIES
from fl_lightning.verification.rules import REMEDIES, RULES

DOCS = Path(__file__).parents[1]


def round_hooks() -> str:
    """Return the pseudo-code of a round. The docstring of ``FederatedCallback`` contains it."""
    block = re.search(r"One round is ::\n\n(.*?)\n\n\S", inspect.getdoc(FederatedCallback) or "", re.DOTALL)
    assert block is not None
    return "```text\n" + inspect.cleandoc(block[1]) + "\n```"


def rules() -> str:
    """Return the rules and equalities of ``verify`` as Markdown.

    Each rule has its docstring and its remedy. Each equality has one line.
    """
    sections = [
        f"### {name}\n\n{_text(check)}\n\n**Remedy:** {_sentence(REMEDIES[name])}"
        for name, check in RULES.items()
    ]
    return "\n\n".join(["## Rules", *sections, "## Equalities", _list(EQUALITIES)])


def norms() -> str:
    """Return the table of norm layers in Markdown."""
    return "\n".join(
        [
            "| `norm` | layers |",
            "|---|---|",
            *(f"| `{name}` | {x.rstrip('.')} |" for name, x in NORMS.items()),
        ]
    )


def _sentence(words: str) -> str:
    """Return words as a sentence, with a capital and a full stop."""
    return f"{words[0].upper()}{words[1:].rstrip('.')}."


def _text(check: Callable[..., object]) -> str:
    """Return the docstring of a rule as Markdown."""
    text = (inspect.getdoc(check) or "").replace("``", "`")
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)


def _list(checks: Mapping[str, Callable[..., object]]) -> str:
    first_lines = {name: (inspect.getdoc(check) or "").splitlines()[0] for name, check in checks.items()}
    return "\n".join(f"- `{name}`: {line.replace('``', '`')}" for name, line in first_lines.items())


GENERATED: dict[str, tuple[str, Callable[[], str]]] = {
    "audit": ("audit.md", audit.table),
    "account": ("audit.md", audit.account),
    "measures": ("audit.md", audit.measures),
    "readings": ("audit.md", audit.readings),
    **{name: ("methods.md", partial(family, name)) for name in FAMILIES},
    "methods": ("methods.md", quiet_table),
    "norms": ("models.md", norms),
    "round": ("own-method.md", round_hooks),
    "rules": ("verify-rules.md", rules),
}
"""For each generated part: the page that contains it, and the function that returns its text."""


def between(name: str, page: str) -> str:
    """Return the text that a generated part has in the page now."""
    found = re.search(rf"<!-- {name} -->\n(.*?)\n?<!-- end of {name} -->", page, re.DOTALL)
    assert found is not None, f"no part {name}"
    return found[1]


def replaced(name: str, page: str, part: str) -> str:
    """Return a page in which a generated part has a new text.

    Args:
        name: Name of the part.
        page: Text of the page.
        part: New text of the part.
    """
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    head, rest = page.split(start)
    return f"{head}{start}{part}\n{end}{rest.split(end)[1]}"


def main() -> None:
    """Write all generated parts into their pages."""
    for name, (file, make) in GENERATED.items():
        (DOCS / file).write_text(replaced(name, (DOCS / file).read_text(), make()))


if __name__ == "__main__":
    main()
