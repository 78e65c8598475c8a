"""The methods of the README and of the page on one's own methods, as their reader has them."""

import re
from types import SimpleNamespace

from pages import blocks

METHOD_BLOCKS = {
    found[1]: block
    for name in ("README.md", "docs/own-method.md")
    for block in blocks(name, "python")
    if (
        found := re.match(
            r"from fl_lightning import (?:ClientMemory, )?FederatedCallback\n+class (\w+)\(", block
        )
    )
}
"""The two that start from nothing but ``FederatedCallback`` and what it keeps."""


def hide(namespace):
    """Make the classes as if made in a function: the command line knows methods by bare names, and FedBN is the shipped one."""
    for name in METHOD_BLOCKS.keys() & namespace.keys():
        namespace[name].__qualname__ = f"methods.<locals>.{name}"


def methods():
    """The classes by name, made anew from the pages' text."""
    namespace = {}
    for block in METHOD_BLOCKS.values():
        exec(block, namespace)  # noqa: S102  # our own pages
    hide(namespace)
    return SimpleNamespace(**{name: namespace[name] for name in METHOD_BLOCKS})
