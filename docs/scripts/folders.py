"""Folders of the documentation's figures and numbers."""

from pathlib import Path

FIGURES_FOLDER = Path(__file__).parents[1] / "figures"
NUMBERS_FOLDER = Path(__file__).parents[1] / "numbers"
