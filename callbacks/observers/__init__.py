"""Observers: methods that measure a run and change none of its numbers."""
