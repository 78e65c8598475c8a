"""Client and server optimizers, learning-rate schedules, and which optimizers are refused."""
