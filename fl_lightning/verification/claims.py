"""What a method may claim beyond the rules for all: the vocabulary of ``FederatedCallback.claims``.

Every claim compares two ways to compute the same thing in float64; it holds up to 1e-10 where it does not say bitwise.
"""

from collections.abc import Callable
from math import inf
from typing import NamedTuple

import torch
from torch import nn

from fl_lightning.cohort.cohort import SERVER
from fl_lightning.verification.comparison import TOLERANCE, NotApplicable, distance, first_difference
from fl_lightning.verification.federation import SIZES
from fl_lightning.verification.memory import entries
from fl_lightning.verification.observation import Run, State
from fl_lightning.verification.trials import CLIENT_LR, CLIENTS, EVERYONE, ONE_STEP, Setup, Trials


class Gap(NamedTuple):
    """How far two computations are apart.

    Attributes:
        apart: The largest distance of their floats.
        place: The tensor that has it.
        weights: The largest distance of parameters alone.
    """

    apart: float
    place: str
    weights: float = 0.0


def own_twin(trials: Trials) -> Gap:
    """Equals the same callback on the union: E = 1, equal batches, every round, ``theta_fed = theta_central``."""
    return _rounds_apart(trials.run(ONE_STEP), trials.run(ONE_STEP, centralised=True))


def own_twin_when_frozen(trials: Trials) -> Gap:
    """The same from the first round with frozen statistics on, continued on the union from the federated state."""
    federated = trials.run(ONE_STEP)
    frozen = [number for number, seen in enumerate(federated.rounds, 1) if seen.policy["mean"] == "frozen"]
    if not frozen:
        raise NotApplicable("statistics are not frozen in this run")
    twin = trials.run(ONE_STEP, centralised=True, resume=frozen[0] - 1)
    return _rounds_apart(federated, twin)


def own_twin_without_bn(trials: Trials) -> Gap:
    """``own_twin`` on a model with Group Normalization: ``g(union) = mean g_i`` where no layer sees the batch."""
    return _rounds_apart(trials.run(ONE_STEP, norm="gn"), trials.run(ONE_STEP, norm="gn", centralised=True))


def centralised_bn(trials: Trials) -> Gap:
    """Equals ordinary BN on the union batch without the callback, weights and statistics: E = 1, equal batches."""
    return _rounds_apart(trials.run(ONE_STEP), trials.run(ONE_STEP, method="none", centralised=True))


def union_statistics(trials: Trials) -> Gap:
    """Server statistics are those that ``nn.BatchNorm2d`` tracks on the concatenation of what the clients' layer is given.

    ``v <- (1 - beta) v + beta N/(N-1) (mean s_i^2 + mean (u_i - u)^2)`` with ``N = sum K_i``; E = 1, batches of equal and of
    unequal size.
    """
    if trials.make().needs_joint_forward:
        raise NotApplicable("its layers are given all clients at once")
    equal = _from_tracked(trials.run(ONE_STEP, listens=True))
    unequal = _from_tracked(trials.run(ONE_STEP, listens=True, batch_sizes=(4, 8, 20, 6, 16)))
    return max(equal, unequal)


def weights_of_fedavg(trials: Trials) -> Gap:
    """Weights, gamma and beta are bitwise those of FedAvg with BN, any E and participation; only statistics differ."""
    run = trials.run()
    weights = [name for name, kind in run.kinds.items() if kind in ("weight", "affine")]
    for one, two in zip(run.rounds, trials.run(method="none").rounds, strict=True):
        place = first_difference(one.server, two.server, weights)
        if place is not None:
            apart, where = distance(one.server, two.server, weights)
            # bitwise is what is claimed: a difference below the tolerance counts as well
            return Gap(max(apart, 2 * TOLERANCE), where or place, apart)
    return Gap(0.0, "")


def fedavg_on_identical_clients(trials: Trials) -> Gap:
    """Equals FedAvg with BN where every client has the same data and takes part: ``theta_i = theta_j`` makes a mean idle."""
    alike = Setup(identities=(1,) * len(CLIENTS), script=EVERYONE)
    return _rounds_apart(trials.run(alike), trials.run(alike, method="none"))


def one_client_is_plain_training(trials: Trials) -> Gap:
    """With one client, any E and SGD without momentum it equals training without the callback."""
    alone = Setup(identities=(0,), script=((0,),) * len(EVERYONE), momentum=0.0)
    return _rounds_apart(trials.run(alone), trials.run(alone, method="none"))


def one_client_is_two_of_half_its_weight(trials: Trials) -> Gap:
    """A client of weight 2p equals two with the same data and weight p: all that the server combines weighs by ``n_i / n``."""
    one, two = (0, 1), (0, 1, 1)  # identities: the second client has twice the data of the first
    alike = trials.run(identities=two, script=((0, 1, 2),) * 4, weighting="uniform")
    return _rounds_apart(trials.run(identities=one, script=(one,) * 4), alike)


def moments_of_the_mixture(trials: Trials) -> Gap:
    """Server statistics are ``mu = sum p_i mu_i`` and ``sum p_i (sigma_i^2 + mu_i^2) - mu^2`` of what the clients send."""
    worst = Gap(0.0, "")
    for seen in trials.run().rounds:
        for name in (name for name in seen.sent if name.endswith("running_mean")):
            variance = name.replace("running_mean", "running_var")
            means, squares = seen.sent[name], seen.sent[variance] + seen.sent[name] ** 2
            mean = seen.shares @ means
            found = {name: mean, variance: seen.shares @ squares - mean**2}
            worst = max(worst, Gap(*distance(found, seen.server, found)))
    return worst


def server_keeps_the_mean(trials: Trials) -> Gap:
    """What it keeps of the server is the mean of what it keeps of all clients, absent ones too: ``c = sum n_i / n c_i``."""
    worst = Gap(0.0, "")
    for seen in trials.run().rounds:
        memory = entries(seen.memory)
        kept = {place.replace(f"[{SERVER}]", ""): leaf for place, leaf in memory.pop(None, {}).items()}
        mean: State = {}
        for client, size in enumerate(SIZES):
            own = memory.get(client, {})
            for place in (place for place in own if torch.is_tensor(kept.get(place))):
                mean[place] = mean.get(place, 0) + own[place] * size / sum(SIZES)
        if not mean:
            raise NotApplicable("it keeps nothing both of the server and of clients")
        worst = max(worst, Gap(*distance(kept, mean, mean)))
    return worst


def statistics_of_its_weights(trials: Trials) -> Gap:
    """Evaluated statistics are those of the weights beside them: they rest where the weights rest, and move where those move."""
    second, last = (trials.run(rests=3).rounds[number].server for number in (1, 3))
    names = [name for name in last if "running" in name]
    moving = trials.run().rounds
    if first_difference(moving[1].server, moving[3].server, names) is None:
        return Gap(inf, "statistics of round 2 and round 4, which are equal")
    return Gap(*distance(second, last, names))


def proximal_term(trials: Trials) -> Gap:
    """The second local step adds ``mu (theta_i - theta)`` to the gradient, with the callback's ``mu``: SGD without momentum."""
    mu = getattr(trials.make(), "mu", None)
    if mu is None:
        raise NotApplicable("it has no mu")
    two = Setup(script=(CLIENTS,), local_steps=2, momentum=0.0)
    first = trials.run(two, method="none", local_steps=1).rounds[0]
    plain, pulled = trials.run(two, method="none").rounds[0].server, trials.run(two).rounds[0].server
    names = [name for name in plain if "running" not in name and "num_batches" not in name]
    pull = {name: mu * (first.server[name] - first.broadcast[name]) for name in names}
    return Gap(*distance({name: plain[name] - CLIENT_LR * pull[name] for name in names}, pulled, names))


CLAIMS: dict[str, Callable[[Trials], Gap]] = {
    claim.__name__: claim
    for claim in (
        own_twin,
        own_twin_when_frozen,
        own_twin_without_bn,
        centralised_bn,
        union_statistics,
        weights_of_fedavg,
        fedavg_on_identical_clients,
        one_client_is_plain_training,
        one_client_is_two_of_half_its_weight,
        moments_of_the_mixture,
        server_keeps_the_mean,
        statistics_of_its_weights,
        proximal_term,
    )
}


def fedavg(trials: Trials) -> Gap:
    """Distance to FedAvg with BN, which is no callback: E = 1."""
    return _rounds_apart(trials.run(ONE_STEP), trials.run(ONE_STEP, method="none"))


def centralised_frozen_bn(trials: Trials) -> Gap:
    """Distance to centralised training with BN frozen at its initial statistics: E = 1."""
    return _rounds_apart(trials.run(ONE_STEP), trials.run(ONE_STEP, method="frozen", centralised=True))


REFERENCES = CLAIMS | {"fedavg": fedavg, "centralised_frozen_bn": centralised_frozen_bn}
"""What the distance to is measured for every method, whether it claims it or not."""


def _rounds_apart(first: Run, second: Run) -> Gap:
    """The largest distance of the server's floats over the rounds that both runs have, which end together."""
    common = min(len(first.rounds), len(second.rounds))
    pairs = zip(first.rounds[-common:], second.rounds[-common:], strict=True)
    floats = [name for name, kind in first.kinds.items() if kind != "counter"]
    weights = [name for name, kind in first.kinds.items() if kind in ("weight", "affine")]
    return max(
        Gap(*distance(one.server, two.server, floats), distance(one.server, two.server, weights)[0])
        for one, two in pairs
    )


def _from_tracked(run: Run) -> Gap:
    worst = Gap(0.0, "")
    for name in run.rounds[0].inputs:
        layer = run.model.get_submodule(name)
        assert isinstance(layer, nn.BatchNorm2d)
        tracked = nn.BatchNorm2d(layer.num_features, layer.eps, layer.momentum).double()
        for seen in run.rounds:
            with torch.no_grad():
                tracked(torch.cat(seen.inputs[name]))
            state = {
                f"{name}.{key}": value for key, value in tracked.state_dict().items() if "running" in key
            }
            worst = max(worst, Gap(*distance(state, seen.server, state)))
    return worst
