"""Clients see each other through the server alone, and what a method keeps of them is theirs."""

from fl_lightning.verification.comparison import NotApplicable, Violated, first_difference
from fl_lightning.verification.federation import Disturbance
from fl_lightning.verification.memory import by_client, knows_no_client
from fl_lightning.verification.observation import Run
from fl_lightning.verification.trials import CLIENTS, Trials


def absent_clients(trials: Trials) -> str:
    """What the method keeps of a client does not change in a round without it, unless it forgets all clients at once."""
    rounds = trials.run().rounds
    kept = [by_client(seen.memory) for seen in rounds]
    first = next((index for index, memory in enumerate(kept) if memory), None)
    if (
        first is None
        or not _is_of_clients(set(kept[first]), rounds[first].clients)
        or knows_no_client(trials)
    ):
        raise NotApplicable("it keeps nothing by client")
    for number in range(first + 1, len(rounds)):
        before, after, present = kept[number - 1], kept[number], rounds[number].clients
        if not after:
            continue
        for client in (before.keys() | after.keys()) - set(present):
            place = first_difference(before.get(client, {}), after.get(client, {}))
            if place is not None:
                raise Violated(
                    f"what is kept of client {client} changes in round {number + 1}, without it: {place}"
                )
    return "what is kept of them stays bit for bit"


def exchange(trials: Trials) -> str:
    """Within a round, what a client sends does not depend on another client's data, unless exchanges are declared."""
    usual = trials.run()
    apart = [number for number, seen in enumerate(usual.rounds, 1) if number > 1 and not seen.exchanges]
    if not apart or trials.make().needs_joint_forward:
        raise NotApplicable(f"it declares exchanges inside a round: {usual.rounds[1].exchanges}")
    for number in (apart[0], apart[-1]):
        disturbance = Disturbance(usual.rounds[number - 1].clients[1], number, ("data",))
        _unreached(usual, trials.run(disturbance=disturbance), disturbance, number, "other data")
    return "what a client sends depends on the broadcast, its own data and memory"


def own_state(trials: Trials) -> str:
    """What clients keep (local, frozen, reset state, optimizer state that is not sent) reaches nobody else."""
    usual = trials.run()
    for number in (2, 3):
        seen = usual.rounds[number - 1]
        sends_optimizer = seen.payload[0] >= max(seen.told, 1)
        what = ("local", "frozen", "reset", *([] if sends_optimizer else ["optimizer"]))
        client = next(one for one in reversed(seen.clients) if set(usual.rounds[number].clients) - {one})
        disturbance = Disturbance(client, number, what)
        other = trials.run(disturbance=disturbance)
        names = [name for name, kind in usual.kinds.items() if seen.policy[kind] != "local"]
        wrong = first_difference(seen.server, other.rounds[number - 1].server, names)
        if wrong:
            raise Violated(
                f"state that client {client} keeps for itself in round {number} reaches the server: {wrong}"
            )
        _unreached(usual, other, disturbance, number + 1, "other state of its own")
    return "a client's own state reaches nobody else"


def payload(trials: Trials) -> str:
    """``extra_payload`` gives two whole numbers, ``extra_exchanges`` one, none negative; optimizer state is received as declared."""
    for number, seen in enumerate(trials.run().rounds, 1):
        up, down = seen.payload
        for what, count in (
            ("extra_payload", up),
            ("extra_payload", down),
            ("extra_exchanges", seen.exchanges),
        ):
            if type(count) is not int or count < 0:
                raise Violated(f"{what} gives {count!r} in round {number}, not a whole number >= 0")
        if seen.told > down:
            raise Violated(
                f"all clients start round {number} with the same {seen.told} floats of optimizer state, and extra_payload "
                f"says that they receive {down}"
            )
    return f"{up} floats up and {down} down on top of the averaged state"


def _unreached(usual: Run, other: Run, disturbance: Disturbance, number: int, what: str) -> None:
    """Demand that the other clients of a round start from and send the same, bit for bit."""
    one, two = usual.rounds[number - 1], other.rounds[number - 1]
    for client in (client for client in one.clients if client != disturbance.client):
        for doing in ("start", "sent"):
            wrong = first_difference(*(seen.row(getattr(seen, doing), client) for seen in (one, two)))
            if wrong:
                verb = "starts from" if doing == "start" else "sends"
                raise Violated(
                    f"{what} of client {disturbance.client} in round {disturbance.round} changes what client {client} "
                    f"{verb} in round {number}: {wrong}"
                )


def _is_of_clients(keys: set[int], cohort: list[int]) -> bool:
    """Whether numbers are clients': of the cohort, of everyone, or (by mistake) its row numbers; not rounds, say."""
    return keys <= set(cohort) or keys >= set(CLIENTS) or keys == set(range(len(cohort)))
