"""A run from its first line to its result, from the command line or from Python."""
