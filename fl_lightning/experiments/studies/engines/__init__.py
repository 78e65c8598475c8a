"""Engines that run the cells of a study, each by a command line."""
