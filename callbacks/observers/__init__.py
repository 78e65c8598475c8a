"""Observers: callbacks that measure a run and leave its training unchanged."""
