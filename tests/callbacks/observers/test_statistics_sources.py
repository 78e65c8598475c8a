"""The evaluation-only family: equal parameters, and one run that shows the accuracy under every source of statistics."""

from copy import deepcopy
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.utils.data import DataLoader

from fl_lightning import (
    ConfigurationError,
    FederatedCallback,
    FederatedDataModule,
    FederatedModule,
    SequentialExecutor,
    VectorizedExecutor,
)
from fl_lightning.aggregation import GeometricMedian, Krum, TrimmedMean
from fl_lightning.attacks import SignFlip
from fl_lightning.callbacks import (
    FBN,
    Byzantine,
    FedBN,
    FedDNA,
    FedPer,
    FixBN,
    MomentMatching,
    SiloBN,
    StaticBN,
    StatisticsSources,
)
from fl_lightning.methods import balanced_statistics
from fl_lightning.round.record import RunRecord
from tests.support.helpers import (
    SGD,
    ArrayClient,
    SaveRounds,
    blobs,
    distance,
    federated_run,
    fit,
    small_cnn,
    train,
)
from tests.support.lightning_sites import Lit, Site, federated

FAMILY = {
    "moment_matching": lambda: MomentMatching(),
    "feddna_kl": lambda: FedDNA("kl"),
    "feddna_reverse_kl": lambda: FedDNA("reverse_kl"),
    "static_pooled": lambda: StaticBN("pooled"),
    "static_per_client": lambda: StaticBN("per_client"),
    "static_total_variance": lambda: StaticBN("per_client_total_variance"),
    "silobn": lambda: SiloBN(),
}
EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
EVALUATED = {"limit_val_batches": 1.0, "check_val_every_n_epoch": 2}
UNEVEN = {"participation": 2, "local_steps": None, "local_epochs": 1}


def federation():
    return blobs(4, (24, 40, 32))


run = partial(federated_run, data=federation, rounds=4, trainer=EVALUATED)


def joined(state):
    """Running means and variances of both BN layers, ``[2, channels]``."""
    return torch.stack([torch.cat([state[f"{i}.running_{n}"] for i in (1, 4)]) for n in ("mean", "var")])


@EXECUTORS
@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize("method", FAMILY)
def test_parameters_of_the_family_are_those_of_fedavg_bitwise(method, local_steps, executor):
    names = dict(small_cnn().named_parameters())
    settings = {"local_steps": local_steps, "participation": 3, "executor": executor()}
    fedavg = train(small_cnn(dropout=0.2), federation(), 3, **settings)
    other = train(small_cnn(dropout=0.2), federation(), 3, [FAMILY[method]()], EVALUATED, **settings)
    assert [name for name in names if not torch.equal(fedavg[name], other[name])] == []
    assert distance(fedavg, other) > 0


@pytest.mark.parametrize("outside", [FBN, FedBN, lambda: FixBN(freeze_round=1)])
def test_methods_outside_the_family_train_differently(outside):
    names = dict(small_cnn().named_parameters())
    fedavg = train(small_cnn(), federation(), 3, participation=2)
    other = train(small_cnn(), federation(), 3, [outside()], participation=2)
    assert max(float((fedavg[name] - other[name]).abs().max()) for name in names) > 1e-4


@pytest.mark.parametrize("settings", [{}, UNEVEN], ids=["all-clients", "uneven"])
@pytest.mark.parametrize("momentum", [0.1, 1.0])
def test_each_source_is_the_methods_own_run(settings, momentum):
    settings = {**settings, "bn_momentum": momentum}
    sources = run(StatisticsSources(), **settings).rows
    found = {}
    for name, method in FAMILY.items():
        own = run(method(), **settings).rows
        for r in (2, 4):
            if name == "silobn":
                assert abs(sources[r]["val/accuracy_silobn"] - own[r]["val/personal_accuracy"]) < 1e-6
            else:
                assert sources[r][f"val/accuracy_{name}"] == own[r]["val/accuracy"]
                assert abs(sources[r][f"val/loss_{name}"] - own[r]["val/loss"]) < 1e-6 * own[r]["val/loss"]
        found[name] = sources[4][f"val/loss_{name}"]
    fedavg = run(**settings).rows
    assert all(sources[r]["val/loss"] == fedavg[r]["val/loss"] for r in (2, 4))
    found |= {"averaged": fedavg[4]["val/loss"], "batch": sources[4]["val/loss_batch"]}
    found["test_set"] = sources[4]["val/loss_test_set"]
    # all sources differ, but for the two that are the same by their definition
    del found["feddna_kl"]
    values = sorted(found.values())
    assert all(later - earlier > 1e-6 * later for earlier, later in pairwise(values))


@EXECUTORS
@pytest.mark.parametrize("method", ["moment_matching", "feddna_reverse_kl"])
def test_what_the_server_would_hold_is_what_it_holds_in_the_methods_own_run(method, executor):
    observer = StatisticsSources()
    run(observer, **UNEVEN)
    own = run(FAMILY[method](), **UNEVEN).module
    assert abs(observer.server[method] - joined(own.state_dict())).max() < 1e-10
    assert abs(observer.server["moment_matching"] - observer.server["feddna_reverse_kl"]).max() > 1e-3


@pytest.mark.parametrize(
    "rule", [TrimmedMean(1), Krum(1, per="model"), GeometricMedian()], ids=lambda rule: type(rule).__name__
)
def test_matched_moments_under_a_robust_rule_are_those_of_the_methods_own_run(rule):
    observer, settings = StatisticsSources(["moment_matching"]), {"statistics_aggregator": rule}
    run(observer, **settings)
    own = run(MomentMatching(), **settings).module
    assert abs(observer.server["moment_matching"] - joined(own.state_dict())).max() < 1e-10
    with pytest.raises(
        ConfigurationError,
        match=r"statistics_aggregator: .* for feddna_kl, feddna_reverse_kl \(leave them out of its sources",
    ):
        run(StatisticsSources(), **settings)


class NotFinite(FederatedCallback):
    """Client 1 sends NaN in round 2."""

    role = "attack"

    def on_before_aggregate(self, trainer, pl_module, cohort):
        if cohort.round == 2:
            for name, kind in cohort.buffer_kinds.items():
                if kind in ("mean", "var"):
                    cohort.buffers[name][cohort.client_ids.index(1)] = torch.nan


@pytest.mark.parametrize("method", ["moment_matching", "feddna_reverse_kl"])
def test_a_client_that_is_left_out_of_a_round_is_left_out_of_every_source(method):
    observer = StatisticsSources()
    rows = run(observer, NotFinite(), on_divergence="drop").rows
    assert rows[2]["clients/dropped"] == 1
    own = run(FAMILY[method](), NotFinite(), on_divergence="drop").module
    assert abs(observer.server[method] - joined(own.state_dict())).max() < 1e-10
    assert all(kept["statistics"].isfinite().all() for kept in observer.clients.values())


def test_what_the_clients_would_keep_is_what_they_keep_with_silobn():
    observer, silobn = StatisticsSources(), SiloBN()
    run(observer, **UNEVEN)
    run(silobn, **UNEVEN)
    assert observer.clients.keys() == silobn.memory.keys()
    for client, kept in observer.clients.items():
        rows = torch.stack([silobn.memory[client][kind] for kind in ("mean", "var")])
        assert abs(kept["statistics"] - rows).max() < 1e-10


def test_attackers_keep_their_own_statistics_as_with_silobn():
    settings = {**UNEVEN, "participation": 3, "aggregator": TrimmedMean(1)}
    observer, silobn = StatisticsSources(["silobn"]), SiloBN()
    run(observer, Byzantine(SignFlip(), clients=1), **settings)
    run(silobn, Byzantine(SignFlip(), clients=1), **settings)
    for client, kept in observer.clients.items():
        rows = torch.stack([silobn.memory[client][kind] for kind in ("mean", "var")])
        assert abs(kept["statistics"] - rows).max() < 1e-10


@pytest.mark.parametrize("rule", [None, TrimmedMean(1)], ids=["mean", "trimmed-mean"])
def test_a_client_that_has_not_taken_part_has_the_statistics_of_silobns_server(rule):
    settings = {"rounds": 2, "participation": 3, "statistics_aggregator": rule}
    observer = StatisticsSources(["silobn"])
    module = run(observer, **settings).module
    own = run(SiloBN(), **settings).module
    unseen = set(range(4)) - set(observer.clients)
    variants = observer.variants(module.trainer, module)
    assert unseen
    for client in unseen:
        kept = variants[f"silobn {client}"]
        assert all(abs(value - own.model.get_buffer(name)).max() < 1e-10 for name, value in kept.items())
        assert len(kept) == 4


def test_a_server_that_forgot_what_it_would_hold_is_not_the_methods_own_run():
    class Forgetful(StatisticsSources):
        def on_round_start(self, trainer, pl_module, cohort):
            super().on_round_start(trainer, pl_module, cohort)
            self.server.clear()

    observer = Forgetful(["moment_matching"])
    run(observer)
    own = run(MomentMatching()).module
    assert abs(observer.server["moment_matching"] - joined(own.state_dict())).max() > 1e-3


def evaluated(batch_size, permuted=False):
    """Statistics that a pass over the evaluation data measures, and the metrics of round 2."""
    kept = []

    class Server(ArrayClient):
        def val_dataloader(self):
            return DataLoader(self.dataset, self.batch_size)

    class Kept(StatisticsSources):
        def variants(self, trainer, pl_module):
            kept.append(super().variants(trainer, pl_module))
            return kept[-1]

    data = federation()
    inputs, targets = data.server.dataset.tensors
    data.server = Server(inputs, targets.flip(0) if permuted else targets, batch_size)
    module, rows, *_ = run(Kept(["batch", "test_set"]), data=data, rounds=2)
    return module, inputs, kept[-1]["test_set"], rows[2]


def test_statistics_of_the_test_set_are_those_of_all_its_values_and_know_no_labels():
    module, inputs, statistics, whole = evaluated(batch_size=1000)
    values = module.model[0](inputs).transpose(0, 1).flatten(1)
    for batch_size in (1000, 8):
        _, _, measured, row = evaluated(batch_size)
        assert abs(measured["1.running_mean"] - values.mean(1)).max() < 1e-12
        assert abs(measured["1.running_var"] - values.var(1, correction=0)).max() < 1e-12
        assert row["val/loss"] == pytest.approx(whole["val/loss"], rel=1e-10)
    # one batch of everything: BN in training mode normalises with the same
    assert whole["val/loss_test_set"] == pytest.approx(whole["val/loss_batch"], rel=1e-10)
    permuted, row = evaluated(1000, permuted=True)[2:]
    assert all(torch.equal(permuted[name], value) for name, value in statistics.items())
    assert row["val/loss"] != whole["val/loss"]


@pytest.mark.parametrize("method", [lambda: FixBN(freeze_round=2), FBN, FedBN])
def test_measured_statistics_go_with_every_method(method):
    alone = run(method()).module
    observed, rows, *_ = run(method(), StatisticsSources(["batch", "test_set", "static_pooled"]))
    assert distance(alone.state_dict(), observed.state_dict()) == 0
    found = {rows[4][f"val/loss{source}"] for source in ("", "_batch", "_test_set", "_static_pooled")}
    assert len(found) == 4


@EXECUTORS
def test_it_does_not_change_training_or_what_is_sent(executor):
    settings = {**UNEVEN, "local_steps": 2, "local_epochs": None, "executor": executor()}
    plain, rows, *_ = run(**settings)
    observed, seen, *_ = run(StatisticsSources(), **settings)
    assert distance(plain.state_dict(), observed.state_dict()) == 0
    for r, row in rows.items():
        assert {k: v for k, v in row.items() if "time" not in k} == {
            k: v for k, v in seen[r].items() if k in row and "time" not in k
        }


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    whole = run(StatisticsSources(), SaveRounds(tmp_path), **UNEVEN).rows
    for start in (1, 3):
        resumed = run(StatisticsSources(), ckpt_path=tmp_path / f"{start}.ckpt", **UNEVEN).rows
        last, again = ({k: v for k, v in rows[4].items() if "time" not in k} for rows in (whole, resumed))
        assert last == again


def test_a_checkpoint_is_evaluated_under_every_source_without_a_fit(tmp_path):
    module, rows, *_ = run(StatisticsSources(), SaveRounds(tmp_path))
    fresh = FederatedModule(small_cnn(), client_optimizer=SGD, local_steps=2)
    trainer = module.trainer.__class__(
        callbacks=[StatisticsSources()], accelerator="cpu", precision="64-true", logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    found = trainer.validate(fresh, federation(), ckpt_path=tmp_path / "4.ckpt", verbose=False)[0]
    names = [name for name in rows[4] if name.startswith("val/")]
    assert len(names) == 20
    assert all(abs(found[name] - rows[4][name]) < 1e-6 * max(rows[4][name], 1) for name in names)


def test_only_the_chosen_sources_are_evaluated_and_of_silobn_as_many_clients_as_asked():
    rows = run(StatisticsSources(["batch", "silobn"], evaluate_clients=1)).rows
    assert {n for n in rows[4] if "accuracy" in n} == {
        "val/accuracy",
        "val/accuracy_batch",
        "val/accuracy_silobn",
    }
    own = run(SiloBN(evaluate_clients=1)).rows
    assert abs(rows[4]["val/accuracy_silobn"] - own[4]["val/personal_accuracy"]) < 1e-6


def test_before_the_first_round_all_sources_but_the_batch_are_the_initial_statistics(monkeypatch):
    rows = []

    module = FederatedModule(small_cnn(), client_optimizer=SGD, local_steps=1)
    monkeypatch.setattr(RunRecord, "write", lambda self, line, loggers: rows.append(line))
    fit(module, federation(), 1, [StatisticsSources()], num_sanity_val_steps=-1, limit_val_batches=1.0)
    losses = {name: value for name, value in rows[0].items() if "loss" in name}
    assert len(losses) == 10
    assert losses.pop("val/loss_batch") != losses["val/loss"]
    assert len({round(value, 10) for value in losses.values()}) == 1


def test_mistakes_are_named():
    with pytest.raises(
        ConfigurationError, match=r"StatisticsSources\.sources: 'swag' must be one of moment_matching"
    ):
        StatisticsSources(["swag"])
    model = small_cnn()
    model[1].momentum = None
    with pytest.raises(ConfigurationError, match=r"BN layer '1' of .* has momentum=None"):
        train(model, federation(), 1, [StatisticsSources()])
    with pytest.raises(ConfigurationError, match="FixBN and StatisticsSources cannot be combined"):
        train(small_cnn(), federation(), 2, [FixBN(), StatisticsSources()])
    with pytest.raises(ConfigurationError, match="BN layer '4' is local"):
        train(small_cnn(), federation(), 1, [FedPer(["8", "4"]), StatisticsSources()])
    own = {"data": FederatedDataModule([Site(0)], server=Site(1)), "rounds": 1}
    with pytest.raises(
        ConfigurationError, match=r"StatisticsSources\.sources: balanced_labels needs one class for"
    ):
        federated(Lit(), StatisticsSources(["balanced_labels"]), **own)


def test_balanced_sources_are_class_balanced_statistics_of_the_evaluation_data():
    observer = StatisticsSources(["balanced", "balanced_labels"])
    finished = run(observer, rounds=2)
    server = small_cnn().double().eval()
    server.load_state_dict({name: x.double() for name, x in finished.states[-1].items()})
    batches = list(federation().val_dataloader())
    for source, labels in (("balanced", None), ("balanced_labels", [y for _, y in batches])):
        balanced_statistics(model := deepcopy(server), [x for x, _ in batches], labels=labels)
        right = torch.cat([model(x).argmax(1) == y for x, y in batches])
        found = float(finished.trainer.callback_metrics[f"val/accuracy_{source}"])
        assert found == pytest.approx(float(right.double().mean()), abs=1e-6)
    accuracy = [
        float(finished.trainer.callback_metrics[f"val/accuracy{x}"]) for x in ("", "_balanced_labels")
    ]
    assert accuracy[0] != accuracy[1]
