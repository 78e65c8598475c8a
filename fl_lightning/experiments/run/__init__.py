"""Start of runs from the command line or Python: trainer, progress line, signals and result."""
