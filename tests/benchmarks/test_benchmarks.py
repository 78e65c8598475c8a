"""The benchmarks: both sides compute the same thing, and the command says what it promises."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader
from torchvision import transforms

from benchmarks import aggregation
from benchmarks.__main__ import main
from benchmarks.compare import compare
from benchmarks.contenders import EXECUTORS, Framework, NaiveLoop, Timing, client_images, fit
from benchmarks.naive import fedavg_round
from benchmarks.overhead import SINGLE_PROCESS
from benchmarks.recipe import AUGMENTATION, BATCH_SIZE, CLIENT_OPTIMIZER, make_model
from benchmarks.stopwatch import Spread, Stopwatch
from benchmarks.workloads import WORKLOADS, SyntheticImages, Workload
from fl_lightning.aggregation import TrimmedMean

pytestmark = pytest.mark.slow

SMALL = Workload(num_clients=3, cohort_size=3, local_steps=2, rounds=2)
PLAIN_FLOAT64 = transforms.Compose(
    [*AUGMENTATION.transforms[2:], transforms.ConvertImageDtype(torch.float64)]
)
FEW = ["--images", "200", "--repeats", "2", "--rounds", "1", "--models", "tiny", "--threads", "1"]
OURS = ["--contenders", "naive", *EXECUTORS]


def small_data(augment=False):
    data = SyntheticImages(130, SMALL.num_clients, augment=augment)
    data.setup("fit")
    return data


def loader(data, client, transform, order):
    """The naive loop's images, in an order."""
    images = client_images(data, client, transform)
    images.samples = order.numpy()
    return DataLoader(images, BATCH_SIZE)


def samples(data, client, round_number):
    """The training images that a client reads in a round, in order."""
    first = (round_number - 1) * SMALL.local_steps
    draws = [data.step_draws(client, first + step)[:, 0] for step in range(SMALL.local_steps)]
    return torch.cat(draws)


IN_CI = ("sequential", "vectorized")


@pytest.mark.parametrize(
    "executor", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.nightly) for name in EXECUTORS]
)
def test_both_sides_compute_the_same_on_the_same_batches(executor):
    data, model = small_data(), make_model("tiny").double()
    framework = Framework(SMALL, make_model("tiny"), data, EXECUTORS[executor]())
    fit(framework.module, data, SMALL.rounds, [], precision="64-true")
    clients = range(SMALL.num_clients)
    for round_number in range(1, SMALL.rounds + 1):
        loaders = [loader(data, i, PLAIN_FLOAT64, samples(data, i, round_number)) for i in clients]
        sizes = [data.num_examples(i) for i in clients]
        fedavg_round(model, loaders, sizes, SMALL.local_steps, CLIENT_OPTIMIZER)
    ours, naive = framework.module.state_dict(), model.state_dict()
    assert ours.keys() == naive.keys()
    moved = 0.0
    for name, start in make_model("tiny").double().state_dict().items():
        if name.endswith("num_batches_tracked"):
            # three thirds of 2 in floating point may be cut down to 1: the loop averages counters as papers' code does
            assert ours[name] == SMALL.local_steps * SMALL.rounds
            assert ours[name] - SMALL.rounds <= naive[name] <= ours[name]
        else:
            torch.testing.assert_close(naive[name], ours[name], rtol=0, atol=1e-10)
            moved = max(moved, float((ours[name] - start).abs().max()))
    assert moved > 1e-3


def test_both_sides_augment_alike():
    data = small_data(augment=True)
    order = torch.zeros(2000, dtype=torch.int64)
    naive = torch.cat([images for images, _ in loader(data, 0, AUGMENTATION, order)])
    places = torch.cartesian_prod(torch.arange(1), torch.arange(5), torch.arange(5), torch.arange(2))
    possible = data.samples.batch(places)[0].flatten(1)
    nearest = torch.cdist(naive.flatten(1), possible, compute_mode="donot_use_mm_for_euclid_dist").min(1)
    assert nearest.values.max() == 0
    counts = nearest.indices.bincount(minlength=50)  # 40 of each expected
    assert counts.min() > 10
    assert counts.max() < 90


@pytest.mark.parametrize("name", ["tiny", "resnet20"])
def test_models_have_about_270_thousand_parameters(name):
    assert abs(sum(p.numel() for p in make_model(name).parameters()) - 270_000) < 2_000


def test_both_sides_sample_the_same_number_of_clients(monkeypatch):
    seen = []
    monkeypatch.setattr("benchmarks.contenders.fedavg_round", lambda *args: seen.append(len(args[1])))
    workload = Workload(num_clients=6, cohort_size=2, local_steps=1, rounds=1)
    data = SyntheticImages(120, 6)
    data.setup("fit")
    NaiveLoop(workload, make_model("tiny"), data).run(3)
    assert seen == [2, 2, 2]
    framework = Framework(workload, make_model("tiny"), data, EXECUTORS["sequential"]())
    timing = framework.run(1)
    assert len(framework.module.plan.cohort(1)) == 2
    assert 0 < timing.in_rounds.wall < timing.total.wall


class Slowing:
    """Each repetition is twice as slow as the one before, for everyone."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.threads = []

    def run(self, rounds):
        count = torch.get_num_threads()
        self.threads.append(count)
        seconds = self.seconds[count] * 2 ** (self.threads.count(count) - 1)
        return Timing(Stopwatch(seconds, seconds))


def compare_slowing(monkeypatch, threads, **seconds):
    entered = {name: Slowing(each) for name, each in seconds.items()}
    monkeypatch.setattr("benchmarks.compare.enter", lambda name, *args: entered[name])
    return compare("W3", "tiny", list(entered), threads, 200, 3, 1, lambda line: None), entered


def test_ratios_are_taken_within_a_repetition(monkeypatch):
    result, _ = compare_slowing(monkeypatch, [1], naive={1: 4.0}, sequential={1: 1.0})
    assert result["speedup"]["sequential"]["wall"] == Spread(4.0, 4.0, 4.0)
    assert result["ahead"] == {"sequential": {"naive": Spread(4.0, 4.0, 4.0)}}
    assert result["ms_per_client_step"]["naive"]["wall"] == Spread(3200.0, 1600.0, 6400.0)


def test_the_better_number_of_threads_counts(monkeypatch):
    sides = {"naive": {1: 4.0, 2: 3.0}, "sequential": {1: 1.0, 2: 9.0}, "ranks": {1: 0.5}}
    result, entered = compare_slowing(monkeypatch, [1, 2], **sides)
    assert result["threads"] == {"naive": 2, "sequential": 1, "ranks": 1}
    assert result["speedup"]["sequential"]["wall"] == Spread(3.0, 3.0, 3.0)
    # a round that is not timed and three that are; two threads are hopeless for sequential after the first of them
    runs = {name: [one.threads.count(count) for count in (1, 2)] for name, one in entered.items()}
    assert runs == {"naive": [4, 4], "sequential": [4, 2], "ranks": [4, 0]}
    assert torch.get_num_threads() == 1


@pytest.mark.nightly
def test_compare_prints_a_table_and_writes_its_numbers(capsys):
    main(["--workloads", "W3", *FEW, *OURS, "--json", "out.json"])
    shown = capsys.readouterr()
    assert "on all cores" not in shown.out
    assert [line.split("|")[3].strip() for line in shown.out.splitlines()[2:6]] == ["naive", *EXECUTORS]
    assert "2/2 vectorized" in shown.err
    with open("out.json") as file:
        written = json.load(file)
    assert written["machine"].keys() == {"cpu", "cores", "threads", "python", "torch"}
    assert written["machine"]["threads"] == 1
    assert written["peak_memory_mb"] > 50
    (result,) = written["results"]
    assert (result["workload"], result["model"], result["repeats"], result["rounds"]) == ("W3", "tiny", 2, 1)
    assert result["ms_per_client_step"].keys() == {"naive", *EXECUTORS}
    for clocks in (*result["ms_per_client_step"].values(), *result["speedup"].values()):
        for spread in (clocks["wall"], clocks["cpu"]):
            assert 0 < spread["min"] <= spread["median"] <= spread["max"]


@pytest.mark.nightly
def test_overhead_is_the_total_without_its_parts(capsys):
    main(["overhead", "--workloads", "W3", *FEW, "--repeats", "1", "--json", "out.json"])
    assert capsys.readouterr().out.count("| W3 | tiny |") == len(SINGLE_PROCESS)
    with open("out.json") as file:
        (result,) = json.load(file)["results"]
    assert tuple(result["executors"]) == SINGLE_PROCESS
    for clocks in result["executors"].values():
        for clock, spreads in clocks.items():
            value = {key: spread["median"] for key, spread in spreads.items()}
            parts = value["forward + backward"] + value["augmentation"] + value["optimizer"]
            assert value["own"] == pytest.approx(value["total"] - parts)
            assert value["own / naive"] == pytest.approx(value["own"] / result["naive"][clock]["median"])
            assert value["Trainer per round"] > 0
            assert value["inside / naive, strict"] > value["inside / naive"]
            assert value["first steps"] > 0
            assert 0 < value["first steps / run"] < 1


class TwiceOurs:
    """Stands for ByzFL's trimmed mean: the same number, from the rule computed twice."""

    def __init__(self, f):
        self.rule = TrimmedMean(f)

    def __call__(self, rows):
        self.rule(rows)
        return self.rule(rows)


@pytest.mark.nightly
def test_aggregation_compares_both_sides_and_measures_memory(capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.aggregation._byzfl_version", lambda: "0")
    monkeypatch.setitem(sys.modules, "byzfl.aggregators", SimpleNamespace(TrMean=TwiceOurs))
    small = ["--columns", "20000", "--memory-columns", "100000", "--repeats", "3"]
    main(["aggregation", "--rules", "trimmed_mean", *small, "--json", "out.json"])
    shown = capsys.readouterr().out
    assert [line.split("|")[2].strip() for line in shown.splitlines()[2:4]] == ["10 x 20,000", "100 x 20,000"]
    assert "byzfl 0, ms" in shown
    with open("out.json") as file:
        (result,) = json.load(file)["results"]
    for row in result["times"]:
        assert row["f"] == 3 * row["clients"] // 10
        assert row["milliseconds"]["ours"]["min"] > 0
        assert row["speedup"]["max"] > 1
    # less than a copy of the rows, which are 40 MB
    assert result["memory"]["nothing"] > 100
    assert result["memory"]["trimmed_mean"] < result["memory"]["nothing"] + 35
    assert torch.get_num_threads() == 1


def test_aggregation_refuses_to_time_rules_that_differ(monkeypatch):
    monkeypatch.setattr("benchmarks.aggregation._byzfl_version", lambda: "0")
    monkeypatch.setitem(sys.modules, "byzfl.aggregators", SimpleNamespace(TrMean=lambda f: TwiceOurs(f - 1)))
    monkeypatch.setattr("benchmarks.aggregation._peak_of_process", lambda *args: 0.0)
    with pytest.raises(AssertionError, match="not close"):
        aggregation.compare(["trimmed_mean"], 50, 50, 1, lambda line: None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workloads", "W9"], "argument --workloads: invalid choice: 'W9' (choose from 'W1', 'W2', 'W3')"),
        (["--repeats", "0"], "argument --repeats: 0 must be at least 1"),
        (["--rounds", "two"], "argument --rounds: invalid int value: 'two'"),
        (["--images", "100"], "argument --images: 100 are too few for a batch of 20 for every client; use at least 200"),
        (["--images", "1000", "scale"], "argument --images: 1000 are too few for a batch of 20 for every client; use at least 20000"),
        (["--threads", "0"], "argument --threads: 0 is not from 1 to the "),
        (["--contenders", "fedscale"], "argument --contenders: invalid choice: 'fedscale' (choose from 'naive', 'sequential', "),
        (["scale", "--budget", "0"], "argument --budget: 0.0 must be above 0 seconds"),
        (["chart"], "chart needs --results FILE and --picture FILE, such as benchmarks/whole_rounds.png"),
        (["chart", "--results", "none.json", "--picture", "a.png"], "argument --results: none.json is no file of --json"),
        (["--json", "missing/out.json"], "argument --json: there is no folder"),
        (["profile"], "argument command: invalid choice: 'profile' (choose from 'compare', 'overhead', 'aggregation', "),
        (["aggregation", "--rules", "mean"], "argument --rules: invalid choice: 'mean' (choose from 'median', 'trimmed_mean'"),
        (["aggregation", "--memory-columns", "0"], "argument --memory-columns: 0 must be at least 1"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_workloads_are_those_of_the_survey():
    shapes = {name: (w.num_clients, w.cohort_size, w.local_steps) for name, w in WORKLOADS.items()}
    assert shapes == {"W1": (10, 10, 20), "W2": (100, 10, 20), "W3": (5, 5, 1)}
