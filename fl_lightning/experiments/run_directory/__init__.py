"""Run directory: the folder of a run, with its checkpoints, metrics, results and pictures."""
