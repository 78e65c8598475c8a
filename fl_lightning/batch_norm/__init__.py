"""Batch Normalization layers and their state, whatever trains them."""
