"""The methods of the README and of the pages on one's own methods, as their reader has them."""

import re
from types import SimpleNamespace

from fl_lightning import FederatedCallback
from tests.support.pages import METHOD_PAGES, blocks

METHOD_BLOCKS = {
    found[1]: block
    for name in ("README.md", *METHOD_PAGES)
    for block in blocks(name, "python")
    if (
        found := re.match(
            r"from fl_lightning import (?:ClientMemory, )?FederatedCallback\n+class (\w+)\(", block
        )
    )
}
"""The classes whose block imports only ``FederatedCallback`` and its memory."""

PAGE_OF = {
    found[1]: name
    for name in ("README.md", *METHOD_PAGES)
    for block in blocks(name, "python")
    for found in re.finditer(r"^class (\w+)\((?!SwappedBatchNorm|nn\.)", block, re.MULTILINE)
}
"""The page of each class that is not a layer."""


def hide():
    """Make the pages' classes look like local classes, so that a bare name such as FedBN means the shipped class only."""
    for kind in FederatedCallback.__subclasses__():
        if kind.__name__ in METHOD_BLOCKS and not kind.__module__.startswith("fl_lightning."):
            # jsonargparse imports the module even of a local class
            kind.__module__, kind.__qualname__ = "builtins", f"methods.<locals>.{kind.__name__}"


def methods():
    """The classes by name, made anew from the pages' text."""
    namespace = {}
    for block in METHOD_BLOCKS.values():
        exec(block, namespace)  # noqa: S102  # our own pages
    hide()
    return SimpleNamespace(**{name: namespace[name] for name in METHOD_BLOCKS})
