"""Rules for all methods and claims of some, checked on a tiny federation in float64."""

from fl_lightning.verification.battery import certify
from fl_lightning.verification.certificate import Certificate

__all__ = ["Certificate", "certify"]
