"""The line *Beside FedAvg* of a certificate."""

from fl_lightning.verification.differences import difference
from fl_lightning.verification.trials import Trials


def beside_fedavg(trials: Trials) -> str:
    """Compare the method's default run with FedAvg, and return the result as text.

    If the runs differ, the text gives the distance that clients move in round 1, divided by the
    distance in FedAvg.
    """
    run, plain = trials.run(), trials.run(bare=True)
    first, second = ([(x.treatments, x.start, x.sent, x.server) for x in one.rounds] for one in (run, plain))
    if difference(first, second) is None:
        return "training equals FedAvg bit for bit: the method changes no state"
    squares = [
        sum(
            float((one.rounds[0].sent[name] - one.rounds[0].start[name]).square().sum())
            for name in one.names("weight", "affine")
        )
        for one in (run, plain)
    ]
    return f"clients move {(squares[0] / squares[1]) ** 0.5:.4g} times as far from the server in round 1"
