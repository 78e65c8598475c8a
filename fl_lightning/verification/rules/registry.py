"""Registry of the rules for all methods."""

from collections.abc import Callable, Generator
from functools import wraps

from fl_lightning.verification.differences import (
    NotApplicable,
    Violated,
)
from fl_lightning.verification.trials import Trials

Rule = Callable[[Trials], str]
"""Function that checks a rule, and returns what was measured.

Raises:
    Violated: The method breaks the rule.
    NotApplicable: The rule does not apply to the method.
"""

Violations = Generator[str, None, str]
"""Generator that yields how a method breaks a rule, and returns what was measured."""

RULES: dict[str, Rule] = {}
"""Rules for all methods, in the order of a certificate. The keys are the names that it shows."""

REMEDIES: dict[str, str] = {}
"""Advice for each failed rule: how to change the method."""


def rule(remedy: str, attacks: str = "") -> Callable[[Callable[[Trials], Violations]], Rule]:
    """Return a decorator that adds a generator function to :data:`RULES` under its name.

    Args:
        remedy: How to change a method that breaks the rule.
        attacks: Reason why the rule does not apply to attacks, if it does not.
    """

    def add(violations: Callable[[Trials], Violations]) -> Rule:
        @wraps(violations)
        def check(trials: Trials) -> str:
            if attacks and trials.is_attack:
                raise NotApplicable(attacks)
            found = violations(trials)
            try:
                violation = next(found)
            except StopIteration as end:
                return str(end.value)
            raise Violated(violation)

        name = violations.__name__.replace("_", " ")
        RULES[name], REMEDIES[name] = check, remedy
        return check

    return add
