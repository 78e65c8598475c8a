"""The command line; ``from fl_lightning.cli import main`` runs it in a script of one's own."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "main":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fl_lightning.cli.command_line import main  # all that a run needs, which ``--version`` does without

    return main
