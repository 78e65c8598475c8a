"""Weights & Biases: logger of a run, settings, and the workspace of a project."""
