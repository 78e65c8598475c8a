"""The command line. Scripts can import it with ``from fl_lightning.cli import main``."""

from typing import TYPE_CHECKING

import lazy_loader  # type: ignore[import-untyped]  # lazy_loader is untyped

if TYPE_CHECKING:
    from fl_lightning.cli.command_line import main as main

# imported on first use, so that mistakes in files are reported before PyTorch is imported
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs={"command_line": ["main"]})
