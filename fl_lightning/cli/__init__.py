"""The command line, which ``from fl_lightning.cli import main`` makes available to scripts."""

from typing import TYPE_CHECKING

import lazy_loader  # type: ignore[import-untyped]  # has no types

if TYPE_CHECKING:
    from fl_lightning.cli.command_line import main as main

# late: mistakes in files are told without PyTorch
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs={"command_line": ["main"]})
