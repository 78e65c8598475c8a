"""Executors: who computes the clients' forward and backward passes."""
