"""The README's own methods, as its reader has them."""

import re
from pathlib import Path
from types import SimpleNamespace

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
METHOD_BLOCKS = {
    re.search(r"class (\w+)\(FederatedCallback\)", block)[1]: block
    for block in BLOCKS
    if "(FederatedCallback)" in block
}


def methods():
    """The classes by name, made anew from the README's text."""
    namespace = {}
    for block in METHOD_BLOCKS.values():
        exec(block, namespace)  # noqa: S102  # our own README
    for name in METHOD_BLOCKS:
        # as if made in a function: the command line knows methods by bare names, and FedBN is the shipped one
        namespace[name].__qualname__ = f"methods.<locals>.{name}"
    return SimpleNamespace(**{name: namespace[name] for name in METHOD_BLOCKS})
