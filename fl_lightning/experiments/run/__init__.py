"""Runs from the command line or Python: trainer, progress line, signals and result."""
