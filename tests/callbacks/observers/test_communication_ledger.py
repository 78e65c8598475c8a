"""The books of a run's communication: simulated times by hand, every byte booked once, exact after a resume."""

import csv
import json
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from PIL import Image
from torch import nn

from fl_lightning import FederatedModule
from fl_lightning.callbacks import (
    FBN,
    CommunicationLedger,
    FedTAN,
    FixBN,
    MaintainedMomentum,
    SlidingWindowFixBN,
    StaticBN,
)
from fl_lightning.callbacks.observers.network_link import NetworkLink
from tests.support.command_line import run as command
from tests.support.command_line import write_config
from tests.support.helpers import SGD, SaveRounds, States, blobs, distance, federated_run, fit, small_cnn

LINK = NetworkLink(upload_mbps=1, download_mbps=4, latency_ms=100)
RIGHT = NetworkLink.seconds
TRAINABLE = sum(parameter.numel() for parameter in small_cnn().parameters())
STATISTICS = 20


class Rows(Callback):
    """The row of metrics of each round, without what a clock says."""

    def __init__(self):
        self.rows = []

    def on_train_epoch_start(self, trainer, pl_module):
        self._keep(trainer, pl_module)

    def on_train_end(self, trainer, pl_module):
        self._keep(trainer, pl_module)

    def _keep(self, trainer, pl_module):
        if trainer.global_step:
            row = {name: value for name, value in pl_module.metrics.items() if not name.startswith("time/")}
            self.rows = [old for old in self.rows if old["round"] != row["round"]] + [row]


def run(methods=(), link=LINK, data=None, extra=(), **settings):
    """The ledger after a run, the rows and the module; the ledger stands first."""
    ledger, seen = CommunicationLedger(link), Rows()
    settings = {"local_steps": 1, "data": data or blobs(4, (24, 40, 32)), **settings}
    module = federated_run(ledger, *methods, seen, *extra, **settings).module
    return ledger, seen.rows, module


def test_a_round_takes_what_its_bytes_and_its_exchange_take():
    _, rows, _ = run()
    sent = 8 * (TRAINABLE + STATISTICS)  # float64
    by_hand = 0.1 + 8 * sent / 1e6 + 8 * sent / 4e6
    assert [row["comm/simulated_s"] for row in rows] == pytest.approx([by_hand] * 3, rel=1e-12)
    assert rows[-1]["comm/total_simulated_s"] == pytest.approx(3 * by_hand, rel=1e-12)
    assert rows[-1]["comm/total_bytes_per_client"] == 3 * 2 * sent


def test_fedtan_waits_three_times_for_every_layer():
    _, rows, _ = run([FedTAN()])
    sent = 8 * (TRAINABLE + 3 * STATISTICS)
    by_hand = (3 * 2 + 1) * 0.1 + 8 * sent / 1e6 + 8 * sent / 4e6
    assert rows[0]["comm/simulated_s"] == pytest.approx(by_hand, rel=1e-12)
    assert rows[-1]["comm/total_exchanges"] == 3 * 7


def test_a_round_waits_for_its_slowest_client():
    link = NetworkLink(1, 4, 100, seconds_per_local_step=0.5)
    ledger, rows, module = run(link=link, rounds=4, local_steps=None, local_epochs=1, participation=2)
    sent = 8 * (TRAINABLE + STATISTICS)
    steps = [3, 5, 4, 3]  # 24, 40 and 32 examples in batches of 8
    times = [0.1 + 8 * sent / 1e6 + 8 * sent / 4e6 + 0.5 * count for count in steps]
    cohorts = [module.plan.cohort(number) for number in (1, 2, 3, 4)]
    by_hand = [max(times[client] for client in cohort) for cohort in cohorts]
    assert [row["comm/simulated_s"] for row in rows] == pytest.approx(by_hand, rel=1e-12)
    for client, (rounds, up, down, exchanges, seconds) in ledger.clients.items():
        assert rounds == exchanges == sum(client in cohort for cohort in cohorts)
        assert up == down == rounds * sent
        assert seconds == pytest.approx(rounds * times[client], rel=1e-12)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda self, up, down, exchanges, steps=0: RIGHT(LINK, up, down, 1, steps),
        lambda self, up, down, exchanges, steps=0: RIGHT(LINK, up, down, 8 * exchanges) / 8,
        lambda self, up, down, exchanges, steps=0: RIGHT(LINK, 0, down, exchanges),
    ],
    ids=["latency once a round", "bytes for bits", "download only"],
)
def test_a_wrong_time_is_far_from_the_one_by_hand(wrong, monkeypatch):
    monkeypatch.setattr(NetworkLink, "seconds", wrong)
    _, rows, _ = run([FedTAN()], rounds=1)
    monkeypatch.undo()
    sent = 8 * (TRAINABLE + 3 * STATISTICS)
    by_hand = 7 * 0.1 + 8 * sent / 1e6 + 8 * sent / 4e6
    assert abs(rows[0]["comm/simulated_s"] - by_hand) > 0.02 * by_hand


METHODS = {
    "FedAvg": list,
    "FixBN": lambda: [FixBN(freeze_round=2)],
    "sliding window": lambda: [SlidingWindowFixBN(2, 1e9)],
    "FedTAN": lambda: [FedTAN()],
    "StaticBN": lambda: [StaticBN()],
    "FBN, global momentum": lambda: [FBN(), MaintainedMomentum("global")],
}
EVERY_METHOD = pytest.mark.parametrize("name", METHODS)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
EVALUATED = {"limit_val_batches": 1, "check_val_every_n_epoch": 2}


@EVERY_METHOD
def test_every_byte_is_booked_once_by_client_by_kind_and_by_round(name):
    settings = {"rounds": 4, "participation": 2, "client_optimizer": MOMENTUM, "trainer": EVALUATED}
    ledger, rows, module = run(METHODS[name](), **settings)
    record = module.record
    for index, (total, metric) in enumerate(
        ((record.upload_bytes, "upload"), (record.download_bytes, "download"))
    ):
        assert total > 0
        assert sum(row[f"comm/{metric}_bytes"] for row in rows) == total
        assert rows[-1][f"comm/total_{metric}_bytes"] == total
        assert sum(pair[index] for pair in ledger.kinds.values()) == total
        assert sum(numbers[1 + index] for numbers in ledger.clients.values()) == total
    assert sum(row["comm/exchanges"] for row in rows) == rows[-1]["comm/total_exchanges"]
    assert sum(row["comm/simulated_s"] for row in rows) == rows[-1]["comm/total_simulated_s"]
    assert sum(numbers[0] for numbers in ledger.clients.values()) == 4 * 2


@EVERY_METHOD
def test_the_books_are_the_same_last_in_the_list(name):
    first, _, _ = run(METHODS[name](), participation=2, client_optimizer=MOMENTUM, trainer=EVALUATED)
    last = CommunicationLedger(LINK)
    module = FederatedModule(small_cnn(), MOMENTUM, local_steps=1, participation=2)
    fit(module, blobs(4, (24, 40, 32)), 3, [*METHODS[name](), last], **EVALUATED)
    assert first.state_dict() == last.state_dict()


@EVERY_METHOD
def test_a_resumed_run_has_the_same_rows_and_books(name, tmp_path):
    settings = {"participation": 2, "client_optimizer": MOMENTUM, "trainer": EVALUATED}
    settings |= {"rounds": 4, "link": NetworkLink(latency_ms=7)}
    whole, rows, _ = run(METHODS[name](), extra=[SaveRounds(tmp_path)], **settings)
    for start in (1, 3):
        resumed, later, _ = run(METHODS[name](), ckpt_path=tmp_path / f"{start}.ckpt", **settings)
        assert later[-1] == rows[-1]
        assert [row for row in later if row["round"] > start] == rows[start:]
        assert resumed.state_dict() == whole.state_dict()


def test_statistics_are_no_longer_sent_once_the_window_has_found_t_star():
    ledger, rows, _ = run([SlidingWindowFixBN(2, 1e9)], rounds=6)
    frozen = rows[-1]["fixbn/freeze_round"]
    assert 1 < frozen < 5
    sent = 4 * frozen * 8 * STATISTICS
    assert ledger.kinds["BN statistics"] == (
        sent,
        sent + 4 * 8 * STATISTICS,
    )  # what is frozen is received once
    assert sum(pair[0] for pair in ledger.kinds.values()) == 4 * 8 * (6 * TRAINABLE + frozen * STATISTICS)


def test_a_model_that_draws_its_own_random_numbers_trains_alike_with_the_ledger():
    class Shaken(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small_cnn()

        def forward(self, images):
            return self.inner(images + 0.1 * torch.randn_like(images))

    states = []
    for ledger in ([], [CommunicationLedger()]):
        seen = States()
        torch.manual_seed(0)
        fit(FederatedModule(Shaken(), SGD, local_steps=2), blobs(), 3, [*ledger, seen], limit_val_batches=1)
        states.append(seen.states)
    assert all(distance(one, other) == 0 for one, other in zip(*states, strict=True))


def test_a_centralised_run_costs_nothing():
    ledger, rows, _ = run(centralised=True)
    assert ledger.clients == ledger.kinds == {}
    assert all(value == 0 for name, value in rows[-1].items() if name.startswith("comm/"))


def test_a_ledger_without_a_round_can_be_shown():
    ledger = CommunicationLedger()
    assert ledger.figures([]) == {}
    assert [list(table.rows) for table in ledger.tables().values()] == [[], []]
    assert ledger.result()["exchanges"] == 0
    assert "0 s" in ledger.result_lines()["simulated time"]


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def with_ledger(**link):
    ledger = {"class_path": "CommunicationLedger", "init_args": {"link": link}}
    return {"trainer.callbacks": [{"class_path": "FedTAN"}, ledger]}


@pytest.mark.pictures
@pytest.mark.slow
def test_a_run_ends_with_its_books_as_picture_tables_and_result(in_folder, capsys):
    write_config({**with_ledger(upload_mbps=8, download_mbps=8), "model.local_steps": 1})
    attempt = command().attempt
    with Image.open(attempt.path / "communication.png") as picture:
        assert picture.size[0] == 7 * 150
    with (attempt.path / "communication.csv").open(newline="") as file:
        header, *clients = csv.reader(file)
    assert header == ["client", "rounds", "upload_bytes", "download_bytes", "exchanges", "seconds"]
    assert [row[:2] for row in clients] == [["0", "4"], ["1", "4"], ["2", "4"]]
    with (attempt.path / "communication_by_kind.csv").open(newline="") as file:
        kinds = {row["kind"]: int(row["upload_bytes"]) for row in csv.DictReader(file)}
    assert kinds["FedTAN"] == 2 * kinds["BN statistics"] == 2 * kinds["BN gamma, beta"]
    result = json.loads(attempt.result.read_text())
    assert result["exchanges"] == 4 * 10
    assert result["upload_bytes_per_client_round"] == sum(kinds.values()) / 12
    assert "40, one after the other" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ({"upload_mbps": 0}, "NetworkLink.upload_mbps: 0"),
        ({"latency": 3}, "latency"),
        ({"latency_ms": "long"}, "latency_ms"),
    ],
)
def test_a_link_that_cannot_be_is_one_line(in_folder, capsys, link, words):
    write_config(with_ledger(**link))
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line


def test_a_ledger_that_joins_later_says_from_when_on_it_has_booked(tmp_path):
    federated_run(SaveRounds(tmp_path), rounds=2, local_steps=1)
    ledger, _rows, _ = run(rounds=4, data=blobs(), ckpt_path=tmp_path / "2.ckpt")
    assert ledger.exchanges == 2
    assert ledger.result_lines()["exchanges"].endswith("(from round 3 on)")
    assert "from round 3 on 1 Mbit/s up" in ledger.result_lines()["simulated time"]


def test_a_run_resumed_over_another_link_names_both(tmp_path):
    run(rounds=4, data=blobs(), extra=[SaveRounds(tmp_path)])
    slow = NetworkLink(latency_ms=5000)
    ledger, _, _ = run(link=slow, rounds=4, data=blobs(), ckpt_path=tmp_path / "2.ckpt")
    text = ledger.result_lines()["simulated time"]
    assert f"from round 1 on {LINK}; from round 3 on {slow}" in text


def test_a_second_fit_begins_new_books():
    ledger = CommunicationLedger(LINK)
    for _ in range(2):
        fit(FederatedModule(small_cnn(), SGD, local_steps=1), blobs(), 2, [ledger])
        assert ledger.exchanges == 2
