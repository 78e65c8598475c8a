"""Where the figures and the numbers of the documentation lie."""

from pathlib import Path

FIGURES_FOLDER = Path(__file__).parents[1] / "figures"
NUMBERS_FOLDER = Path(__file__).parents[1] / "numbers"
