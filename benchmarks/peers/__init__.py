"""Other frameworks on the same workloads, one file for each.

A file is imported only if its framework is installed. It has a class ``Peer(workload, model_name, data)`` with a method ``run(rounds)``. All
frameworks read the same images as the naive loop, augment them one at a time, and take the same
optimizer steps. Evaluation, logging and checkpoints are off.
"""
