"""Rules for what clients send, receive and keep."""

from collections.abc import Iterator
from itertools import pairwise

from fl_lightning.testing.federation import Disturbance
from fl_lightning.verification.differences import (
    NotApplicable,
    difference,
)
from fl_lightning.verification.memory import entries, large_of_server
from fl_lightning.verification.observation import ObservedRun, State
from fl_lightning.verification.renumbering import (
    knows_no_client,
)
from fl_lightning.verification.rules.registry import Violations, rule
from fl_lightning.verification.trials import Trials


@rule("return how many floats a client sends and receives")
def payload(trials: Trials) -> Violations:
    """Check that ``extra_payload`` and ``extra_exchanges`` return integers >= 0.

    ``extra_payload`` must count the optimizer state that clients receive.
    """
    for seen in trials.run().rounds:
        up, down = seen.payload
        for count in (up, down, seen.exchanges):
            if type(count) is not int or count < 0:
                yield f"extra_payload and extra_exchanges must return whole numbers >= 0: {count!r} in {seen}"
        if seen.received > down:
            yield f"extra_payload must count received optimizer state: {seen.received} floats, not {down}, in {seen}"
    return f"{up} floats up and {down} down beside the averaged state"


@rule("count all sent and received floats in extra_payload", "attackers know what all clients send")
def traffic(trials: Trials) -> Violations:
    """Check that ``extra_payload`` counts all traffic except weights, statistics and losses.

    - Upload: one client trains on other data, and sends the same weights, statistics and loss as
      before. The server's state must stay the same.
    - Download: values that only the server has are changed: tensors of at least 8 floats in the
      method's memory, and untrained parameters that the server changes. If clients then take other
      local steps, they have received these values, and ``extra_payload`` must count them.
    - Start of a round: if a client starts from new values, the round must count these values.
    """
    usual, number = trials.run(), 3
    yield from _uncounted(usual)
    seen = usual.rounds[number - 1]
    up, down = seen.payload
    if (up and down) or trials.make().needs_joint_forward:
        raise NotApplicable(f"the method declares {up} floats up and {down} down")
    client = seen.clients[1]
    if not up:
        other = trials.run(disturbance=Disturbance(client, number, ("data",), replayed=True))
        names = [name for name in usual.kinds if seen.treatments[name] != "local"]
        memories = [large_of_server(run.rounds[number - 1].memory) for run in (usual, other)]
        place = difference(seen.server, other.rounds[number - 1].server, names) or difference(*memories)
        if place is not None:
            yield f"data that reach the server must be declared: those of client {client} change {place} in {seen}"
    if not down:
        changed = trials.run(disturbance=Disturbance(client, number, ("memory",))).rounds[number - 1]
        place = None if difference(seen.start, changed.start) else difference(seen.trained, changed.trained)
        if place is not None:
            yield f"memory that the server sends must be declared: it changes {place} of clients that start {seen} alike"
    return "nothing undeclared crosses the network"


def _uncounted(run: ObservedRun) -> Iterator[str]:
    """Yield a client that starts a round from more new floats than the round counts as download."""
    known: dict[int, State] = {}
    for seen, client in ((one, client) for one in run.rounds for client in one.clients):
        start, last = seen.row(seen.start, client), known.get(client, run.rounds[0].broadcast)
        new = {
            name: value.numel() if seen.treatments[name] in ("averaged", "pooled") else int((value != last[name]).sum())
            for name, value in start.items()
            if value.is_floating_point() and seen.treatments[name] != "local"
        }  # fmt: skip
        if (floats := sum(new.values())) > (counted := seen.downloads[client] // 8):
            yield f"what clients receive must be counted: client {client} starts {seen} from {floats} new floats, not {counted}"
        known[client] = start


@rule("change only the memory of clients in cohort.client_ids")
def absent_clients(trials: Trials) -> Violations:
    """Check that a round does not change the memory of absent clients.

    A method may discard the memory of all clients at once.
    """
    memories = [(seen, entries(seen.memory)[1]) for seen in trials.run().rounds]
    if not any(memory for _, memory in memories) or knows_no_client(trials):
        raise NotApplicable("the method has no memory by client")
    for (_, before), (seen, after) in pairwise(memories):
        for client in (before.keys() | after.keys()) - {*seen.clients} if before and after else ():
            if place := difference(before.get(client, {}), after.get(client, {})):
                yield f"an absent client's memory must not change: {place} of client {client} did in {seen}"
    return "their memory is constant bit for bit"


@rule(
    "correct the server in on_after_aggregate, or declare extra_exchanges or needs_joint_forward",
    "attackers know the honest clients' messages",
)
def exchange_in_a_round(trials: Trials) -> Violations:
    """Check that a client's message does not depend on other clients' data in the same round.

    The rule does not apply to methods that declare exchanges inside a round, or to attacks.
    """
    usual = trials.run()
    undeclared = [seen for seen in usual.rounds[1:] if not seen.exchanges]
    if not undeclared or trials.make().needs_joint_forward:
        raise NotApplicable(f"the method declares exchanges inside a round: {usual.rounds[1].exchanges}")
    for seen in (undeclared[0], undeclared[-1]):
        yield from _reached(trials, Disturbance(seen.clients[1], seen.number, ("data",)), seen.number)
    return "a client's message depends on the broadcast, its data and its memory"


@rule("count sent optimizer state in extra_payload; keep all other state at the client")
def clients_own_state(trials: Trials) -> Violations:
    """Check that state that a client does not send affects only this client.

    A client does not send local, frozen and discarded state. It does not send the state of its
    optimizer either, unless ``extra_payload`` counts this state.
    """
    usual, number = trials.run(), 3
    seen = usual.rounds[number - 1]
    sends_optimizer = seen.payload[0] >= max(seen.received, 1)
    what = ("local", "frozen", "discarded", *([] if sends_optimizer else ["optimizer"]))
    disturbance = Disturbance(seen.clients[-1], number, what)
    other = trials.run(disturbance=disturbance)
    names = [name for name in usual.kinds if seen.treatments[name] != "local"]
    if wrong := difference(seen.server, other.rounds[number - 1].server, names):
        yield f"state that a client keeps must not reach the server: that of client {disturbance.client} changes {wrong}"
    yield from _reached(trials, disturbance, number + 1)
    return "state that a client keeps affects no other client"


def _reached(trials: Trials, disturbance: Disturbance, number: int) -> Iterator[str]:
    """Yield what a disturbance of one client changes at the other clients in a given round."""
    first, second = (run.rounds[number - 1] for run in (trials.run(), trials.run(disturbance=disturbance)))
    kind = " or ".join(disturbance.what) + (" state" if disturbance.what != ("data",) else "")
    for client in (client for client in first.clients if client != disturbance.client):
        for verb, rows, others in (
            ("starts from", first.start, second.start),
            ("sends", first.sent, second.sent),
        ):
            if wrong := difference(first.row(rows, client), second.row(others, client)):
                yield (
                    f"a client's {kind} must not affect other clients: that of client {disturbance.client} in round "
                    f"{disturbance.round} changes {wrong}, which client {client} {verb} in {first}"
                )
