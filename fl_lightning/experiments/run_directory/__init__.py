"""Run directory: the folder, checkpoints, metrics, results and pictures of a run."""
