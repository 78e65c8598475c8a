"""Callbacks that are each wrong in one way, by what they are wrong in."""

from tests.support.broken_callbacks import clients, equalities, ranks, runs, server_state, updates
from tests.support.broken_callbacks.ranks import RIGHT
from tests.support.broken_callbacks.registry import FAILS

__all__ = ["FAILS", "RIGHT", "clients", "equalities", "ranks", "runs", "server_state", "updates"]
