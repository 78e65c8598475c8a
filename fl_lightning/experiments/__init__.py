"""Experiments: what starts, stores, shows and compares runs; no number depends on it."""
