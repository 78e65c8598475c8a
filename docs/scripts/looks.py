"""What the figures of the documentation share: where they go, and their colours."""

from pathlib import Path

from fl_lightning.pictures.style import BLACK, BLUE, GREY, VERMILLION

FIGURES_FOLDER = Path(__file__).parents[1] / "figures"
NUMBERS_FOLDER = Path(__file__).parents[1] / "numbers"
PURPLE, ORANGE, GREEN = "#CC79A7", "#E69F00", "#009E73"
"""Colours of Okabe and Ito, as those of ``fl_lightning.pictures.style``."""

__all__ = [
    "BLACK",
    "BLUE",
    "FIGURES_FOLDER",
    "GREEN",
    "GREY",
    "NUMBERS_FOLDER",
    "ORANGE",
    "PURPLE",
    "VERMILLION",
]
