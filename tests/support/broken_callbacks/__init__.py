"""Callbacks that are each wrong in one way, by what they are wrong in."""

from broken_callbacks import claims, clients, runs, server_state
from broken_callbacks.registry import FAILS

__all__ = ["FAILS", "claims", "clients", "runs", "server_state"]
