"""The command line; ``from fl_lightning.cli import main`` runs it in a script of one's own."""

from fl_lightning.cli.command_line import main as main
