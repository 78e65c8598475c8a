"""Engines, which run the cells of a study as command lines."""
