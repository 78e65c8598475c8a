"""What a method sends, per participating client and round: the table of payloads."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from fl_lightning import FederatedModule
from fl_lightning.callbacks import (
    BNSCAFFOLD,
    FBN,
    SCAFFOLD,
    BatchRenormalization,
    ClientEvaluation,
    CommunicationLedger,
    FedBABU,
    FedBN,
    FedDNA,
    FedExFixBN,
    FedProx,
    FedTAN,
    FixBN,
    HybridBN,
    MaintainedMomentum,
    MomentMatching,
    SiloBN,
    SlidingWindowFixBN,
    StaticBN,
)
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.models import FBNCNN, ResNet20
from fl_lightning.optimizers.server import FedAdam
from fl_lightning.round.communication import round_communication, total
from fl_lightning.round.plan import sample_cohort
from fl_lightning.round.policy import resolve_policy
from tests.support.helpers import Received, SaveRounds, blobs, federated_run, fit, small_cnn

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
TRAINABLE, STATISTICS, LAYERS = 269_722, 1_376, 19
"""ResNet-20: trainable floats, floats of statistics (and of gamma and beta), BN layers."""
CNN_TRAINABLE, CNN_STATISTICS, CNN_LAYERS = 1_310_922, 768, 4
"""FBN's CNN."""


def traffic(model, methods=(), round_number=1, rounds=2, clients=1):
    """A round's traffic, without training."""
    cohort = RoundCohort(model, clients)
    cohort.broadcast(
        round_number=round_number,
        client_ids=range(clients),
        weights=torch.full((clients,), 1 / clients),
        local_steps=[1] * clients,
        policy=resolve_policy(methods, round_number, rounds),
        optimizer=MOMENTUM,
    )
    for method in (method for method in methods if isinstance(method, FedTAN)):
        module = FederatedModule(model, MOMENTUM, local_steps=1)
        method.configure_batch_norm(module)
        method.on_round_start(None, module, cohort)
        for name in (name for name, kind in cohort.buffer_kinds.items() if kind == "counter"):
            cohort.buffers[name].add_(1)  # as the forward pass of the joint step does
        method.on_local_step_end(None, module, cohort, 0)
    return round_communication(cohort, methods, lambda block: range(clients))


def payload(model, methods=(), round_number=1, clients=1):
    """Bytes up and down of all clients of one round, without training."""
    return total(traffic(model, methods, round_number, clients=clients).by_kind().values())


def found_in_round(method, round_number):
    """A method that has found its T*."""
    method.freeze_round = round_number
    return method


BASE = TRAINABLE + STATISTICS
TABLE = [
    ([], 1, BASE, 1, 1.084),
    ([FixBN(freeze_round=1)], 1, BASE, 1, 1.084),
    ([FixBN(freeze_round=1)], 2, TRAINABLE, 1, 1.079),
    ([FixBN(freeze_round=0, freeze="affine")], 1, TRAINABLE, 1, 1.079),
    ([FixBN(freeze_round=0, freeze="both")], 1, TRAINABLE - STATISTICS, 1, 1.073),
    ([SlidingWindowFixBN(10, 0.01)], 2, BASE, 1, 1.084),
    ([found_in_round(SlidingWindowFixBN(10, 0.01), 1)], 2, TRAINABLE, 1, 1.079),
    ([FedExFixBN()], 2, BASE + 1, 1, 1.084),
    ([found_in_round(FedExFixBN(), 1)], 2, TRAINABLE, 1, 1.079),
    ([FBN()], 1, BASE, 1, 1.084),
    ([MomentMatching()], 1, BASE, 1, 1.084),
    ([FedDNA()], 1, BASE, 1, 1.084),
    ([SiloBN()], 1, TRAINABLE, 1, 1.079),
    ([FedBN()], 1, TRAINABLE - STATISTICS, 1, 1.073),
    ([StaticBN()], 1, TRAINABLE, 1, 1.079),
    ([FedTAN()], 1, BASE + 2 * STATISTICS, 3 * LAYERS + 1, 1.095),
    ([FedTAN(backward="own")], 1, BASE + STATISTICS, 2 * LAYERS + 1, 1.090),
    ([FedTAN(backward="none")], 1, BASE + STATISTICS, 2 * LAYERS + 1, 1.090),
    ([MaintainedMomentum("local")], 1, BASE, 1, 1.084),
    ([MaintainedMomentum("global")], 1, 2 * TRAINABLE + STATISTICS, 1, 2.163),
    ([MaintainedMomentum("global"), FixBN(freeze_round=0)], 1, 2 * TRAINABLE, 1, 2.158),
    ([SCAFFOLD()], 1, 2 * TRAINABLE + STATISTICS, 1, 2.163),
    ([SCAFFOLD(), FixBN(freeze_round=0)], 1, 2 * TRAINABLE, 1, 2.158),
    ([SCAFFOLD(), FixBN(freeze_round=0, freeze="both")], 1, 2 * (TRAINABLE - STATISTICS), 1, 2.147),
    ([SCAFFOLD(), FedBN()], 1, 2 * (TRAINABLE - STATISTICS), 1, 2.147),
    ([BNSCAFFOLD()], 1, 2 * BASE, 1, 2.169),
    ([BNSCAFFOLD(gradients=False)], 1, BASE + STATISTICS, 1, 1.090),
    ([BatchRenormalization()], 1, BASE, 1, 1.084),
    ([FedProx(0.1)], 1, BASE, 1, 1.084),
    ([ClientEvaluation()], 1, BASE, 1, 1.084),
    ([CommunicationLedger()], 1, BASE, 1, 1.084),
]


@pytest.mark.parametrize(
    ("methods", "round_number", "floats", "exchanges", "megabytes"),
    TABLE,
    ids=lambda value: "+".join(type(one).__name__ for one in value) if isinstance(value, list) else None,
)
def test_resnet20_sends_what_the_table_of_payloads_says(methods, round_number, floats, exchanges, megabytes):
    assert payload(ResNet20(), methods, round_number) == (4 * floats, 4 * floats)
    assert 4 * floats / 1e6 == pytest.approx(megabytes, abs=0.0005)
    assert traffic(ResNet20(), methods, round_number).exchanges == exchanges


def test_fedtan_waits_58_times_a_round_of_resnet20_and_its_forward_only_form_39_times():
    assert traffic(ResNet20(), [FedTAN()]).exchanges == 58
    assert traffic(ResNet20(), [FedTAN(backward="own")]).exchanges == 39


@pytest.mark.parametrize(
    ("methods", "round_number", "floats", "exchanges"),
    [
        ([], 1, CNN_TRAINABLE + CNN_STATISTICS, 1),
        ([FBN()], 1, CNN_TRAINABLE + CNN_STATISTICS, 1),
        ([FixBN(freeze_round=1)], 2, CNN_TRAINABLE, 1),
        ([FedTAN()], 1, CNN_TRAINABLE + 3 * CNN_STATISTICS, 3 * CNN_LAYERS + 1),
    ],
)
def test_the_fbn_cnn_sends_what_the_table_of_payloads_says(methods, round_number, floats, exchanges):
    assert payload(FBNCNN(), methods, round_number) == (4 * floats, 4 * floats)
    assert traffic(FBNCNN(), methods, round_number).exchanges == exchanges


def test_hybrid_bn_also_sends_the_number_of_samples_of_its_pass():
    assert payload(ResNet20(), [HybridBN(mix=0.5)]) == (4 * (BASE + 1), 4 * BASE)


def test_the_fbn_cnn_is_5_247_megabytes_and_5_244_without_statistics():
    sent = [payload(FBNCNN(), methods)[0] / 1e6 for methods in ([], [SiloBN()])]
    assert sent == pytest.approx([5.247, 5.244], abs=0.0005)


@pytest.mark.parametrize(
    "norm", ["gn", "ln", "in", "gn_ws", "fed_ws", "weight_norm", "scaled_ws", "fn", "fixup"]
)
def test_a_model_without_batch_norm_sends_its_own_parameters_and_nothing_else(norm):
    model = ResNet20(norm=norm)
    own = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert traffic(model).by_kind() == {"weights": (own, own)}


def test_kinds_of_state_are_told_apart():
    found = traffic(ResNet20(), [MaintainedMomentum("global")], clients=3).by_kind()
    floats = {
        "weights": TRAINABLE - STATISTICS,
        "BN gamma, beta": STATISTICS,
        "BN statistics": STATISTICS,
        "MaintainedMomentum": TRAINABLE,
    }
    assert found == {kind: (3 * 4 * count, 3 * 4 * count) for kind, count in floats.items()}


def test_the_logged_payload_is_that_of_all_participants():
    module = federated_run(local_steps=1, participation=2).module
    bytes_per_client = 8 * (sum(p.numel() for p in module.model.parameters()) + 20)
    assert (
        module.metrics["comm/upload_bytes"] == module.metrics["comm/download_bytes"] == 2 * bytes_per_client
    )
    assert module.record.upload_bytes == 3 * 2 * bytes_per_client


@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, lr=1.0, momentum=0.9), FedAdam])
def test_what_the_server_remembers_is_not_sent(optimizer):
    rows = []
    for server in (None, optimizer):
        module = federated_run(rounds=2, server_optimizer=server, local_steps=1).module
        rows.append({name: value for name, value in module.metrics.items() if name.startswith("comm/")})
    assert rows[0] == rows[1]


def test_non_persistent_buffers_and_counters_are_not_sent():
    model = small_cnn()
    floats = sum(p.numel() for p in model.parameters()) + 20
    model.register_buffer("scratch", torch.zeros(1000), persistent=False)
    assert payload(model, clients=3) == (3 * 4 * floats, 3 * 4 * floats)
    metrics = federated_run(model=model, rounds=1).module.metrics
    assert metrics["comm/upload_bytes"] == metrics["comm/download_bytes"] == 3 * 8 * floats


def test_what_freezes_later_is_received_once_beside_what_is_frozen_already():
    """FedBABU's head is frozen from round 1, FixBN's statistics from round 3."""
    received = {}

    class Beside(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            received[pl_module.round] = {
                client
                for client, (up, down) in pl_module.communication.sent.get("BN statistics", {}).items()
                if up < down
            }

    federated_run(FedBABU(), FixBN(freeze_round=2), Beside(), data=blobs, rounds=4)
    assert received == {1: set(), 2: set(), 3: {0, 1, 2}, 4: set()}


def test_frozen_statistics_are_received_once_in_the_first_round_after_the_freeze(tmp_path):
    statistics = 8 * 2 * (4 + 6)
    books = CommunicationLedger()
    settings = {"local_steps": 1, "participation": 2}
    seen = [set(sample_cohort(5, 2, 0, number)) for number in range(1, 9)]
    newcomers = [len(seen[r] - set().union(*seen[3:r])) for r in range(3, 8)]
    module = FederatedModule(small_cnn(), MOMENTUM, **settings)
    rounds = Received()
    fit(module, blobs(5, sizes=(40,) * 5), 8, [FixBN(freeze_round=3), books, rounds, SaveRounds(tmp_path)])
    upload = rounds.received[3][0]
    assert [up for up, _ in rounds.received] == [upload + 2 * statistics] * 3 + [upload] * 5
    assert [down for _, down in rounds.received[3:]] == [upload + count * statistics for count in newcomers]
    assert books.kinds["BN statistics"] == (6 * statistics, (6 + sum(newcomers)) * statistics)
    resumed = FederatedModule(small_cnn(), MOMENTUM, **settings)
    again = Received()
    methods = [FixBN(freeze_round=3), CommunicationLedger(), again]
    fit(resumed, blobs(5, sizes=(40,) * 5), 8, methods, tmp_path / "5.ckpt")
    assert again.received == rounds.received[5:]


def test_nothing_is_sent_on_one_machine():
    module = FederatedModule(small_cnn(), MOMENTUM, local_steps=1, centralised=True)
    fit(module, blobs(), 2, [FedTAN(restart_momentum=False), MaintainedMomentum("global")])
    assert (module.record.upload_bytes, module.record.download_bytes) == (0, 0)
    assert module.metrics["comm/exchanges"] == 0
