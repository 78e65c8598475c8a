"""A LightningCLI parser whose errors are one or two lines."""

import re
import sys
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser


class ConciseParser(LightningArgumentParser):
    """Prints the one line of an error that matters, without pages of usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print a short form of a parser's message to stderr and exit with status 2."""
        print(repr(message), file=sys.stderr)
        sys.exit(2)
