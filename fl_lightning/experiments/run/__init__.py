"""Runs, started from the command line or Python: trainer, progress, interruption and result."""
