"""Studies: one file describes all runs of a table or figure, and one command starts the runs."""
