"""Other frameworks on the same workloads, a file for each; a file is imported only where its framework is installed.

Each has a class ``Peer(workload, model_name, data)`` with ``run(rounds)``. All of them read the naive loop's images one at a
time, augmented one by one, and take the same optimizer steps; evaluation, logging and checkpoints are off.
"""
