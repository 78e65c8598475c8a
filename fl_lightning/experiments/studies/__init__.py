"""Studies: all runs of a table or figure, described by one file and started by one command."""
