"""Checks of the rules for all methods, and of each method's equalities, on a tiny federation."""

from fl_lightning.verification.battery import certify
from fl_lightning.verification.certificate import Certificate

__all__ = ["Certificate", "certify"]
