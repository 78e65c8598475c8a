"""Callbacks that are each wrong in one way, by what they are wrong in."""

from support.broken_callbacks import claims, clients, ranks, runs, server_state, updates
from support.broken_callbacks.ranks import RIGHT
from support.broken_callbacks.registry import FAILS

__all__ = ["FAILS", "RIGHT", "claims", "clients", "ranks", "runs", "server_state", "updates"]
