"""Rules for local steps, and for what changes the model and the optimizers."""

from copy import deepcopy
from itertools import product

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.batch_norm.kinds import STATISTICS
from fl_lightning.verification.differences import (
    TOLERANCE,
    Leaves,
    NotApplicable,
    apart,
    difference,
    largest_difference,
)
from fl_lightning.verification.rules.compare_runs import outcome
from fl_lightning.verification.rules.registry import Violations, rule
from fl_lightning.verification.trials import RESTING, WITH_SERVER_MOMENTUM, Trials

ROUNDING = 1e-12
"""Largest difference of weights or gradients that is attributed to rounding, in float64."""


@rule("change only rows of clients whose cohort.local_steps exceeds the step")
def done_clients(trials: Trials) -> Violations:
    """Check that a client's rows in ``cohort.extra`` do not change after its last local step."""
    for seen in trials.run().rounds:
        if seen.late:
            yield f"a client that has taken its local steps must not change: {seen.late} does in {seen}"
    return "a client's data in cohort.extra ends with its last step"


@rule(
    "change gradients, not weights; send weights, not updates", "attackers move weights at any learning rate"
)
def learning_rate_0(trials: Trials) -> Violations:
    """Check that a client learning rate of 0 changes no weights, at clients or at the server.

    A correction in ``on_after_aggregate`` may change the server's weights. The rule does not apply
    to attacks, or to methods that draw random numbers.
    """
    run = trials.run(**RESTING)
    if difference(outcome(run), outcome(trials.run(**RESTING, seed=1))) is not None:
        raise NotApplicable("the method depends on the seed, so noise may move weights")
    names = run.names("weight", "affine")
    for seen in run.rounds:
        at_server = largest_difference(seen.broadcast, seen.aggregated, names)
        moves = {"the server": at_server, "a client": largest_difference(seen.start, seen.sent, names)}
        for whose, (moved, name) in moves.items():
            if moved > ROUNDING:
                yield f"weights must not move at a learning rate of 0: {name} of {whose} moves by {moved:.2g} in {seen}"
    return "no weight moves at a learning rate of 0"


@rule("pool with cohort.mean, or add union_statistics to equalities")
def pooled_weights(trials: Trials) -> Violations:
    """Check that pooled statistics weight each client by ``n_i / n``, its share of the samples.

    The rule replaces a client by two clients, each with the same data and half the weight. The
    statistics must stay the same. The rule does not apply to a method that promises
    ``union_statistics`` or ``equal_passes``.
    """
    first = trials.run().rounds[0]
    pooled = [n for n in trials.run().names("mean", "var") if first.treatments[n] == "pooled"]
    if not pooled:
        raise NotApplicable("no statistics are pooled")
    for promised in {"union_statistics", "equal_passes"}.intersection(trials.make().equalities):
        raise NotApplicable(f"{promised} is promised")
    identities = (0, 1, 1)  # client 2 has the same data as client 1
    two = trials.run(identities=identities, script=((0, 1, 2),) * 4, weighting="uniform")
    one = trials.run(identities=identities[:2], script=((0, 1),) * 4)
    gap, name = largest_difference(one.rounds[0].server, two.rounds[0].server, pooled)
    if not gap <= TOLERANCE:
        yield f"pooled statistics must weigh clients by n_i / n: {name} differs by {gap:.2g} if a client is split in two"
    return f"clients weigh n_i / n (distance {gap:.1g})"


@rule("draw in each local step from cohort.generators")
def fresh_noise(trials: Trials) -> Violations:
    """Check that the noise in the gradients differs between clients, and between local steps."""
    run, other, bare = trials.run(**RESTING), trials.run(**RESTING, seed=1), trials.run(**RESTING, bare=True)
    if run.kinds != bare.kinds:
        raise NotApplicable("the method adds parameters to the model")
    drawn = 0
    for seen, again, plain in zip(run.rounds, other.rounds, bare.rounds, strict=True):
        of_others: dict[str, list[torch.Tensor]] = {}
        for (row, steps), (name, gradient) in product(enumerate(seen.steps), seen.grads[0].items()):
            if apart(gradient[row], again.grads[0][name][row]) <= ROUNDING:
                continue
            drawn += 1
            grads = [
                (seen.grads[step][name][row], plain.grads[step][name][row]) for step in range(min(steps, 2))
            ]
            first, *second = (noisy - clean for noisy, clean in grads)
            others = of_others.setdefault(name, [])
            for between, noises in {"local steps": second, "clients": others}.items():
                if first.abs().max() > ROUNDING and any(apart(first, noise) <= ROUNDING for noise in noises):
                    yield f"noise must differ between {between}: that of client {seen.clients[row]} repeats in {seen}"
            others.append(first)
    if not drawn:
        raise NotApplicable("no gradient depends on the seed")
    return "no noise in the gradients repeats at another client or in the next local step"


@rule('set statistics in on_round_end; declare statistics that the server computes alone "discarded"')
def server_optimizer(trials: Trials) -> Violations:
    """Check that the server optimizer does not affect statistics.

    Two runs differ in learning rate, momentum and weight decay of the server optimizer. After round
    1, the server must have the same statistics in both runs.
    """
    run = trials.run()
    first, second = run.rounds[0], trials.run(**WITH_SERVER_MOMENTUM).rounds[0]
    names = [name for name in run.names(*STATISTICS) if first.treatments[name] != "discarded"]
    gap, name = largest_difference(first.server, second.server, names)
    if gap:
        yield f"statistics must not depend on the server optimizer: {name} differs by {gap:.2g} in round 1"
    return "statistics do not depend on the server optimizer"


@rule("swap layers by swap_batch_norm, which is undone after the run, and add layers in extend_model")
def model_comes_back(trials: Trials) -> Violations:
    """Check that a run restores the model's original modules, shapes, dtypes, flags and hooks.

    Layers that ``extend_model`` adds must stay.
    """
    model = deepcopy(trials.settings.get("model", trials.reference_model()))
    trials.make().extend_model(model)
    after, before = _form(trials.run().model), _form(model.double())
    for place in {**before, **after}:
        now, once = after.get(place, "missing"), before.get(place, "missing")
        if now != once:
            yield f"a run must restore the model: {place} is {now}, was {once}"
    return "keys, shapes, types and modules are restored"


def _form(model: nn.Module) -> Leaves:
    """Return the structure of a model (types, shapes, flags and hooks) without its values.

    The keys are the names of modules and tensors.
    """
    form: Leaves = {f"{name} in state_dict": "yes" for name in model.state_dict()}
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        form[f"module {name!r}"] = f"{type(module)}({module.extra_repr()})"
        form[f"hooks of module {name!r}"] = sum(map(len, hooks))
        if isinstance(module, _BatchNorm):
            form[f"training of module {name!r}"] = module.training
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        form[name] = f"{tuple(value.shape)} {value.dtype}{' trainable' if value.requires_grad else ''}"
    return form
