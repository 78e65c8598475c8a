"""Experiments: they start, store, show and compare runs and affect no number of a run."""
