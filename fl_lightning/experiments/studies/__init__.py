"""Studies: the runs of a table or a figure, from one file and by one command."""
