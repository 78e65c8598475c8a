"""What a run leaves behind: its folder, checkpoints, metrics, results and pictures."""
