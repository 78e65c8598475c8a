"""Equalities that a method can promise in ``FederatedCallback.equalities``.

An equality compares two computations of the same numbers in float64. The tolerance is 1e-10; equalities in
``BITWISE`` must hold bit for bit.
"""

from collections.abc import Callable, Sequence
from math import inf

import torch

from fl_lightning.cohort.cohort import SERVER
from fl_lightning.testing.federation import CLIENT_SIZES
from fl_lightning.verification.differences import NotApplicable, difference, largest_difference
from fl_lightning.verification.memory import entries
from fl_lightning.verification.observation import ObservedRun, State
from fl_lightning.verification.trials import (
    CLIENT_LR,
    CLIENTS,
    EVERYONE,
    ONE_STEP,
    RESTING,
    WITHOUT_MOMENTUM,
    Setup,
    Trials,
    rests_from,
)

Gap = tuple[float, str]
"""Pair: the largest difference between two computations, and the tensor in which it occurs."""

Equality = Callable[[Trials], Gap]

EQUALITIES: dict[str, Equality] = {}
"""Equalities by name."""

BITWISE = ("weights_of_fedavg",)
"""Names of the equalities that hold bit for bit. All other equalities hold up to rounding errors."""


def equality(compare: Equality) -> Equality:
    """Add a function to :data:`EQUALITIES` under its name. Use it as a decorator."""
    EQUALITIES[compare.__name__] = compare
    return compare


@equality
def own_twin(trials: Trials) -> Gap:
    """Compare the method's federated training (E = 1) with its centralised training.

    Each client takes one local step per round (E = 1), and all clients have the same batch size.
    """
    return _rounds_apart(trials.run(**ONE_STEP), trials.run(**ONE_STEP, centralised=True))


@equality
def own_twin_when_frozen(trials: Trials) -> Gap:
    """Compare federated and centralised training, but only in rounds with frozen statistics.

    The comparison is the same as in ``own_twin``. The centralised run resumes from the last
    federated round before the freeze.
    """
    federated = trials.run(**ONE_STEP)
    treated = [{seen.treatments[x] for x in federated.names("mean", "var")} for seen in federated.rounds]
    frozen = [number for number, treatments in enumerate(treated, 1) if treatments == {"frozen"}]
    if not frozen:
        raise NotApplicable("in no round of this run are the statistics of all layers frozen")
    before = trials.checkpoint(ONE_STEP, frozen[0] - 1) if frozen[0] > 1 else None
    twin = trials.run(**ONE_STEP, centralised=True, resume=before)
    return _rounds_apart(federated, twin)


@equality
def own_twin_without_bn(trials: Trials) -> Gap:
    """Compare federated and centralised training of a model with Group Normalization instead of BN.

    In such a model, the gradient on the union of the batches is the mean of the clients' gradients.
    """
    return _rounds_apart(
        trials.run(**ONE_STEP, norm="gn"), trials.run(**ONE_STEP, norm="gn", centralised=True)
    )


@equality
def centralised_bn(trials: Trials) -> Gap:
    """Compare the method's federated run with centralised BN, at E = 1 and equal batch sizes.

    Each client takes one local step per round (E = 1), and all clients have the same batch size.
    Centralised training computes each step on the union of the clients' batches. Weights and
    statistics are compared.
    """
    return _rounds_apart(trials.run(**ONE_STEP), trials.run(**ONE_STEP, bare=True, centralised=True))


@equality
def union_statistics(trials: Trials) -> Gap:
    """Compare the server's statistics to ``nn.BatchNorm2d`` on the union of the batches.

    One comparison has equal batch sizes, and another has unequal batch sizes. Client i has K_i
    values with mean u_i and variance s_i^2; the union has ``N = sum K_i`` values with mean u. The
    new running variance is ``(1 - beta) v + beta N/(N-1) (mean s_i^2 + mean (u_i - u)^2)``.

    The weights are constant. Only the first BN layer is compared, because its inputs do not depend
    on the normalization.
    """
    if trials.make().needs_joint_forward:
        raise NotApplicable("the method requires batches of equal size")
    gaps = []
    for batch_sizes in (None, (4, 8, 20, 6, 16)):
        resting: Setup = {**ONE_STEP, **RESTING, "batch_sizes": batch_sizes}
        run = trials.run(**resting)
        names = run.names("mean", "var")[:2]
        gaps.append(_rounds_apart(run, trials.run(**resting, bare=True, centralised=True), names))
    return max(gaps)


@equality
def equal_passes(trials: Trials) -> Gap:
    """Compare the pooled statistics of a round under two aggregation weights.

    Each client makes a pass over equally many samples, and counts alike in the statistics.
    """
    runs = [trials.run(weighting=weighting).rounds[0] for weighting in ("examples", "uniform")]
    pooled = [name for name, treatment in runs[0].treatments.items() if treatment == "pooled"]
    return largest_difference(runs[0].server, runs[1].server, pooled)


@equality
def weights_of_fedavg(trials: Trials) -> Gap:
    """Compare all trainable parameters bit for bit to FedAvg with BN.

    The equality holds for any number E of local steps and for any participation.
    """
    run = trials.run()
    return _rounds_apart(run, trials.run(bare=True), run.names("weight", "affine"))


@equality
def fedavg_on_identical_clients(trials: Trials) -> Gap:
    """Compare to FedAvg with BN. All clients have the same data, and hence the same weights."""
    alike: Setup = {"identities": (1,) * len(CLIENTS), "script": EVERYONE}
    return _rounds_apart(trials.run(**alike), trials.run(**alike, bare=True))


@equality
def one_client_is_plain_training(trials: Trials) -> Gap:
    """Compare a run with a single client to the same run without the method.

    The client uses SGD without momentum. The equality holds for any number E of local steps.
    """
    alone: Setup = {"identities": (0,), "script": ((0,),) * len(EVERYONE), **WITHOUT_MOMENTUM}
    return _rounds_apart(trials.run(**alone), trials.run(**alone, bare=True))


@equality
def one_client_is_two_of_half_its_weight(trials: Trials) -> Gap:
    """Compare a client of weight 2p to two copies of this client, each of weight p.

    The results are equal if means over clients use the weights ``n_i / n``.
    """
    one, two = (0, 1), (0, 1, 1)  # two: client 2 is a copy of client 1, with the same data
    alike = trials.run(identities=two, script=((0, 1, 2),) * 4, weighting="uniform")
    return _rounds_apart(trials.run(identities=one, script=(one,) * 4), alike)


@equality
def moments_of_the_mixture(trials: Trials) -> Gap:
    """Compare the server's statistics to the mean and variance of a mixture of all clients.

    Client i has weight p_i, and sends mean mu_i and variance sigma_i^2. The mixture has the mean
    ``mu = sum p_i mu_i`` and the variance ``sum p_i (sigma_i^2 + mu_i^2) - mu^2``.
    """
    gaps = []
    for seen in trials.run().rounds:
        for name in (name for name in seen.sent if name.endswith("running_mean")):
            variance = name.replace("running_mean", "running_var")
            mean = seen.shares @ seen.sent[name]
            squares = seen.shares @ (seen.sent[variance] + seen.sent[name] ** 2)
            expected = {name: mean, variance: squares - mean**2}
            gaps.append(largest_difference(expected, seen.server, expected))
    return max(gaps)


@equality
def server_keeps_the_mean(trials: Trials) -> Gap:
    """Compare the server's memory to the weighted mean of the memory of all clients.

    The mean of the clients' memory c_i is ``sum (n_i / n) c_i``. This mean includes absent clients.
    """
    gaps = []
    for seen in trials.run().rounds:
        server, clients = entries(seen.memory)
        held = {place.replace(f"[{SERVER}]", ""): leaf for place, leaf in server.items()}
        mean: State = {}
        for client, memory in clients.items():
            for place in (place for place in memory if torch.is_tensor(held.get(place))):
                mean[place] = mean.get(place, 0) + memory[place] * CLIENT_SIZES[client] / sum(CLIENT_SIZES)
        if not mean:
            raise NotApplicable(
                "no tensor of the server's memory has the name of a tensor of the clients' memory"
            )
        gaps.append(largest_difference(held, mean, mean))
    return max(gaps)


@equality
def statistics_of_its_weights(trials: Trials) -> Gap:
    """Check that the server's statistics change if the server's weights change, and only then."""
    second, last = (trials.run(client_lr_schedule=rests_from(3)).rounds[number].server for number in (1, 3))
    names = [name for name in last if "running" in name]
    moving = trials.run().rounds
    if difference(moving[1].server, moving[3].server, names) is None:
        return inf, "the statistics of rounds 2 and 4, which are equal for different weights"
    return largest_difference(second, last, names)


@equality
def proximal_term(trials: Trials) -> Gap:
    """Compare two local steps to steps of SGD that add ``mu (theta_i - theta)`` to the gradient.

    In the first step, the term is 0.
    """
    mu = getattr(trials.make(), "mu", None)
    if mu is None:
        raise NotApplicable("the method has no mu")
    one: Setup = {**ONE_STEP, "script": (CLIENTS,), **WITHOUT_MOMENTUM}
    two: Setup = {**one, "local_steps": 2}
    first = trials.run(**one, bare=True).rounds[0]
    plain, pulled = trials.run(**two, bare=True).rounds[0].server, trials.run(**two).rounds[0].server
    names = [name for name in plain if "running" not in name and "num_batches" not in name]
    pull = {name: mu * (first.server[name] - first.broadcast[name]) for name in names}
    return largest_difference({name: plain[name] - CLIENT_LR * pull[name] for name in names}, pulled, names)


def _rounds_apart(first: ObservedRun, second: ObservedRun, names: Sequence[str] | None = None) -> Gap:
    """Return the largest difference between the server states of two runs.

    If one run has fewer rounds, its rounds are compared to the last rounds of the other run.
    ``names`` are the tensors to compare (default: all tensors except counters).
    """
    common = min(len(first.rounds), len(second.rounds))
    pairs = zip(first.rounds[-common:], second.rounds[-common:], strict=True)
    names = names or [name for name, kind in first.kinds.items() if kind != "counter"]
    return max(largest_difference(one.server, two.server, names) for one, two in pairs)
