"""Weights & Biases: logger of a run, its settings, and the workspace of a project."""
