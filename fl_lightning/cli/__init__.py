"""The command line, which ``from fl_lightning.cli import main`` makes available to scripts."""

from fl_lightning.cli.command_line import main as main
