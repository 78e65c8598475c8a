"""Rules for all methods. A rule looks at one recorded run, or compares runs that differ in one respect."""

# the order of the imports is the order of the rules in a certificate
from fl_lightning.verification.rules import state  # isort: skip
from fl_lightning.verification.rules import local_steps  # isort: skip
from fl_lightning.verification.rules import traffic  # isort: skip
from fl_lightning.verification.rules import resume_and_ranks  # isort: skip
from fl_lightning.verification.rules.registry import REMEDIES, RULES, Rule

__all__ = ["REMEDIES", "RULES", "Rule", "local_steps", "resume_and_ranks", "state", "traffic"]
