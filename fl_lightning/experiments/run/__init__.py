"""Runs from the command line or from Python: trainer, progress, interruption and result."""
