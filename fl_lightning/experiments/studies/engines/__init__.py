"""Engines that compute the cells of a study, each cell by a command line."""
