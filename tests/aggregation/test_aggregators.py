"""Aggregators in a run: what reaches the rule, what the server makes of it, and the settings by name."""

import pytest
import torch
import yaml

from fl_lightning import ConfigurationError, FederatedCallback
from fl_lightning.aggregation import (
    NNM,
    Aggregator,
    Bucketing,
    CenteredClipping,
    GeometricMedian,
    Krum,
    MeanAroundMedian,
    Median,
    MultiKrum,
    TrimmedMean,
    WeightedMean,
)
from fl_lightning.callbacks import FBN
from fl_lightning.execution.sequential import SequentialExecutor
from fl_lightning.execution.vectorized import VectorizedExecutor
from fl_lightning.methods import LocalState
from tests.support.command_line import run, write_config
from tests.support.helpers import ClientStates, States, blobs, distance, small_cnn, train

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])


def mixed(rows, f):
    return NNM()([rows], f)[0]


# an aggregator, and its rule on one vector per client
PAIRS = {
    "Median": (Median(), Median()),
    "TrimmedMean": (TrimmedMean(1), TrimmedMean(1)),
    "Krum": (Krum(1), Krum(1)),
    "Krum blanchard": (Krum(1, score="blanchard"), Krum(1, score="blanchard")),
    "MultiKrum": (MultiKrum(1), MultiKrum(1)),
    "GeometricMedian": (GeometricMedian(), GeometricMedian()),
    "TrimmedMean NNM": (TrimmedMean(1, NNM()), lambda rows: TrimmedMean(1)(mixed(rows, 1))),
    "MeanAroundMedian": (MeanAroundMedian(1), MeanAroundMedian(1)),
    "CenteredClipping": (CenteredClipping(0.01, 2), CenteredClipping(0.01, 2)),
    "Median NNM": (Median(pre=NNM(2)), lambda rows: Median()(mixed(rows, 2))),
    "Krum NNM": (Krum(0, NNM(2)), lambda rows: Krum(0)(mixed(rows, 2))),
    "GeometricMedian NNM": (GeometricMedian(2, NNM()), lambda rows: GeometricMedian()(mixed(rows, 2))),
}
EVERY_PAIR = pytest.mark.parametrize(("aggregator", "rule"), PAIRS.values(), ids=PAIRS)
FIVE = {"num_clients": 5, "sizes": (16, 24, 40)}


class Sends(FederatedCallback):
    """Lets client 0 send one value everywhere, in its parameters and running means."""

    def __init__(self, value):
        self.value = value

    def on_before_aggregate(self, trainer, pl_module, cohort):
        if 0 in cohort.client_ids:
            row = cohort.client_ids.index(0)
            means = [block for name, block in cohort.buffers.blocks.items() if name.startswith("mean")]
            for block in (*cohort.params.blocks.values(), *means):
                block[row] = self.value


def vectors(clients, names):
    """One vector per client of its state under the names, and where each name's columns are."""
    rows = torch.stack([torch.cat([state[name].flatten() for name in names]) for state in clients.values()])
    sizes = [next(iter(clients.values()))[name].numel() for name in names]
    return rows, sizes


@EVERY_PAIR
@EXECUTORS
@pytest.mark.parametrize("per", [None, "model", "layer"])
def test_the_server_gets_the_rule_of_each_vector(aggregator, rule, executor, per, monkeypatch):
    monkeypatch.setattr(aggregator, "per", per)
    model, seen, states = small_cnn(), ClientStates(), States()
    train(model, blobs(**FIVE), 2, [seen, states], aggregator=aggregator, executor=executor(), local_steps=2)
    trained = [name for name, _ in model.named_parameters()]
    layers = {
        name.rpartition(".")[0]: [n for n in trained if n.rpartition(".")[0] == name.rpartition(".")[0]]
        for name in trained
    }
    means, variances = ([n for n, _ in model.named_buffers() if n.endswith(kind)] for kind in ("mean", "var"))
    parameters = [*layers.values()] if per == "layer" else [trained]
    statistics = [means, variances] if per == "model" else [[name] for name in (*means, *variances)]
    for round_number in (1, 2):
        clients, server = seen.end[round_number], states.states[round_number]
        for names in (*parameters, *statistics):
            rows, sizes = vectors(clients, names)
            expected = rule(rows).split(sizes)
            for name, value in zip(names, expected, strict=True):
                assert float((server[name].flatten() - value).abs().max()) < 1e-10
        assert all(bool((value >= 0).all()) for name, value in server.items() if name.endswith("running_var"))
        assert all(value == 2 * round_number for name, value in server.items() if name.endswith("tracked"))
    mean = train(small_cnn(), blobs(**FIVE), 2, local_steps=2)
    assert distance(mean, states.states[2]) > 1e-3


@EVERY_PAIR
def test_blocks_are_one_vector_of_a_client(aggregator, rule):
    rows = torch.randn(7, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[:, 20:] *= 5
    blocks = [rows[:, :20], rows[:, 20:]]
    found = torch.cat(aggregator.blocks(blocks, torch.full((7,), 1 / 7)))
    torch.testing.assert_close(found, rule(rows), rtol=0, atol=1e-10)
    assert torch.equal(aggregator(rows, torch.eye(7)[0]), aggregator(rows, torch.full((7,), 1 / 7)))
    if aggregator.pre or not isinstance(aggregator, MeanAroundMedian | Median | TrimmedMean):
        apart = torch.cat([rule(block) for block in blocks])
        assert float((apart - rule(rows)).abs().max()) > 1e-3


def test_blocks_of_two_precisions_keep_theirs():
    blocks = [torch.randn(7, 3), torch.randn(7, 4, dtype=torch.float64)]
    for aggregator, _ in PAIRS.values():
        found = aggregator.blocks(blocks, torch.full((7,), 1 / 7))
        assert [value.dtype for value in found] == [torch.float32, torch.float64]


class First(Aggregator):
    """A user's rule: the row of the first client."""

    def __call__(self, rows, weights):
        return rows[0]


class Alone(LocalState):
    kinds = ("weight", "affine", "mean", "var", "counter")


@pytest.mark.parametrize("aggregator", [First(), Median(), TrimmedMean(1, per="layer")])
def test_clients_that_keep_everything_train_alone_under_any_rule(aggregator):
    mean, alone = Alone(), Alone()
    train(small_cnn(), blobs(**FIVE), 2, [mean])
    train(small_cnn(), blobs(**FIVE), 2, [alone], aggregator=aggregator)
    for client in range(5):
        for name, row in mean.memory[client].items():
            assert torch.equal(alone.memory[client][name], row)
    assert not torch.equal(mean.memory[0]["weights"], mean.memory[1]["weights"])


@pytest.mark.parametrize("value", [1e6, torch.nan, torch.inf])
def test_one_client_cannot_ruin_a_run(value):
    honest = train(small_cnn(), blobs(**FIVE), 2, aggregator=Median())
    for aggregator in (Median(), TrimmedMean(1, NNM()), MultiKrum(1), GeometricMedian()):
        state = train(
            small_cnn(), blobs(**FIVE), 2, [Sends(value)], aggregator=aggregator, on_divergence="record"
        )
        assert distance(state, honest) < 5
    ruined = train(
        small_cnn(), blobs(**FIVE), 2, [Sends(value)], aggregator=WeightedMean(), on_divergence="record"
    )
    assert not distance(ruined, honest) < 1e4


def test_shared_statistics_are_aggregated_by_the_rule_layer_by_layer():
    model = train(small_cnn(), blobs(**FIVE), 3, [FBN()], aggregator=TrimmedMean(1, NNM()))
    assert all(bool((value > 0).all()) for name, value in model.items() if name.endswith("running_var"))
    assert distance(model, train(small_cnn(), blobs(**FIVE), 3, [FBN()])) > 1e-3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrimmedMean(-1), "TrimmedMean.f: -1 must be a whole number of at least 0"),
        (lambda: Krum(1.5), "Krum.f: 1.5 must be a whole number of at least 0"),
        (lambda: NNM(True), "NNM.f: True must be a whole number of at least 0"),
        (lambda: Median(pre=NNM()), "NNM.f: null, and Median.f is null as well; give one of them, such as NNM(f=1)"),
        (lambda: Krum(1, per="block"), "Krum.per: 'block' must be one of model, layer"),
        (lambda: Median(weighting="samples"), "Median.weighting: 'samples' must be one of uniform, weighted"),
        (lambda: Median(max_weight=0.5), "Median.max_weight: 0.5 must be at least 1, the mean weight"),
        (lambda: CenteredClipping(0.0), "CenteredClipping.tau: 0.0 must be above 0"),
        (lambda: CenteredClipping(1.0, 0), "CenteredClipping.iterations: 0 must be at least 1"),
        (lambda: Bucketing(0), "Bucketing.size: 0 must be at least 1"),
        (lambda: MultiKrum(1, score="paper"), "MultiKrum.score: 'paper' must be one of byzfl, blanchard"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused_when_they_are_made(make, message):
    with pytest.raises(ConfigurationError) as refused:
        make()
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("aggregator", "message"),
    [
        (TrimmedMean(3), "TrimmedMean.f: 3 must be less than half of a round's 5 clients; use at most 2, or at least 7 clients"),
        (Median(pre=NNM(3)), "NNM.f: 3 must be less than half of a round's 5 clients; use at most 2"),
        (Krum(3, NNM(1)), "Krum.f: 3 must be less than half of a round's 5 clients; use at most 2"),
    ],
)  # fmt: skip
def test_too_few_clients_are_refused_before_the_first_round(aggregator, message):
    seen = ClientStates()
    with pytest.raises(ConfigurationError) as refused:
        train(small_cnn(), blobs(**FIVE), 1, [seen], aggregator=aggregator)
    assert str(refused.value).startswith(message)
    assert not seen.start
    with pytest.raises(ConfigurationError, match="half of a round's 3 clients"):
        train(small_cnn(), blobs(**FIVE), 1, aggregator=TrimmedMean(2), participation=3)
    with pytest.raises(ConfigurationError, match=r"MultiKrum\.score: blanchard needs at least f"):
        train(small_cnn(), blobs(**FIVE), 1, aggregator=MultiKrum(1, score="blanchard"), participation=3)


def test_a_centralised_run_aggregates_nothing():
    states = [
        train(small_cnn(), blobs(**FIVE), 2, aggregator=aggregator, centralised=True)
        for aggregator in (WeightedMean(), TrimmedMean(2, NNM()), MultiKrum(1))
    ]
    assert distance(states[0], states[1]) == distance(states[0], states[2]) == 0


@pytest.mark.slow
def test_rules_are_named_in_yaml_by_their_class_alone():
    for name in ("Median", "GeometricMedian"):
        write_config({"model.aggregator": name})
        assert type(run("--trainer.fast_dev_run", "true").model.aggregator).__name__ == name
    buckets = {"class_path": "Bucketing", "init_args": {"size": 1, "f": 1}}
    settings = {"pre": buckets, "weighting": "weighted", "per": "layer"}
    write_config({"model.aggregator": {"class_path": "Median", "init_args": settings}})
    rule = run("--trainer.fast_dev_run", "true").model.aggregator
    assert (rule.pre.size, rule.per, rule.weighting) == (1, "layer", "weighted")
    write_config({"model.aggregator": {"class_path": "TrimmedMean", "init_args": {"f": 1, "pre": "NNM"}}})
    cli = run("--trainer.max_epochs", 2)
    assert isinstance(cli.model.aggregator.pre, NNM)
    resolved = yaml.safe_load((cli.attempt.path / "config.yaml").read_text())
    assert resolved["model"]["aggregator"]["class_path"] == "fl_lightning.aggregation.TrimmedMean"


@pytest.mark.parametrize(
    ("aggregator", "words"),
    [
        ({"class_path": "TrimmedMeen", "init_args": {"f": 1}}, ["'TrimmedMeen'", "TrimmedMean"]),
        ({"class_path": "Median", "init_args": {"pre": {"class_path": "NMM"}}}, ["'NMM'", "NNM"]),
        ({"class_path": "TrimmedMean", "init_args": {"f": 2}}, ["TrimmedMean.f: 2", "3 clients", "at most 1"]),
        ({"class_path": "TrimmedMean"}, ["f"]),
        ({"class_path": "Median", "init_args": {"pre": "NNM"}}, ["NNM.f: null", "NNM(f=1)"]),
        ({"class_path": "Krum", "init_args": {"f": 1, "score": "paper"}}, ["paper", "byzfl", "blanchard"]),
    ],
)  # fmt: skip
def test_wrong_names_and_numbers_in_yaml_are_one_line(aggregator, words, capsys):
    write_config({"model.aggregator": aggregator})
    with pytest.raises(SystemExit) as stopped:
        run()
    assert stopped.value.code == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(error) == 1
    for word in words:
        assert word in error[0]
