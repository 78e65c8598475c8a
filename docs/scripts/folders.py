"""Two folders of the documentation: one with figures, one with numbers."""

from pathlib import Path

FIGURES_FOLDER = Path(__file__).parents[1] / "figures"
NUMBERS_FOLDER = Path(__file__).parents[1] / "numbers"
