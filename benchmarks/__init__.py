"""Benchmarks of communication rounds against a naive FedAvg loop: ``python -m benchmarks``."""
