"""Columns of the two tables of a study's results."""

COSTS = ("rounds", "samples", "upload_bytes", "download_bytes", "exchanges", "train_seconds", "diverged")
IN_WORDS = ("method", "model", "partition")
FROM_RESULT = (
    *IN_WORDS,
    "planned_rounds",
    "diverged_round",
    "provenance",
    "data",
    "computed_by",
    "environment",
)
CELL_COLUMNS = (
    "seed", "fold", "phase", "metric", "published", "published_deviation", "learning_rate", *COSTS, "directory", "why",
    "loaded", *(f"run_{name}" if name in IN_WORDS else name for name in FROM_RESULT),
)  # fmt: skip
"""Columns of a cell. ``run_method`` describes the run, since an axis may have the name ``method``."""
VALUE_COLUMNS = ("seed", "fold", "metric", "value")
