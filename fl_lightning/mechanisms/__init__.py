"""Bases that several methods share."""
