"""Other frameworks on the same workloads, a file for each, imported only if installed.

Each file has a class ``Peer(workload, model_name, data)`` with ``run(rounds)``. All peers read and
augment the naive loop's images one at a time, and take the same optimizer steps; evaluation,
logging and checkpoints are off.
"""
