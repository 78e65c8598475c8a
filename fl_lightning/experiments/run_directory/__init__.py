"""Run directory: the folder with the checkpoints, metrics, results and pictures of a run."""
