"""The benchmarks on a device: what runs there, what is refused without one, and what the figures for one are made of."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu
from benchmarks.__main__ import main
from benchmarks.compare import compare
from benchmarks.contenders import Framework, NaiveLoop, Timing, _RoundClock
from benchmarks.options import parse
from benchmarks.recipe import make_model
from benchmarks.roster import NAMES, ON_CUDA
from benchmarks.stopwatch import Spread, Stopwatch
from benchmarks.workloads import SyntheticImages, Workload
from fl_lightning import SequentialExecutor

pytestmark = pytest.mark.slow

SMALL = Workload(num_clients=3, cohort_size=3, local_steps=2, rounds=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda"], "argument --device: cuda is not available; torch "),
        (["gpu"], "argument --device: cuda is not available; torch "),
        (["memory", "--device", "cuda"], "argument --device: memory runs on the CPU only; cuda is for compare and gpu"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu' (choose from 'cpu', 'cuda')"),
        (["memory", "--contenders", "compute"], "argument --contenders: memory cannot run compute; use naive, sequential, "),
        (["scale", "--contenders", "compute"], "argument --contenders: scale cannot run compute; use naive, sequential, "),
        (["gpu", "--contenders", "pfl"], "argument --contenders: gpu cannot run pfl; use sequential, vectorized, graphs"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_in_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_the_cpu_is_the_device_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    given = ["--threads", "1"]
    devices = {command: parse([command, *given]).device for command in ("compare", "memory", "scale", "gpu")}
    assert devices == {"compare": "cpu", "memory": "cpu", "scale": "cpu", "gpu": "cuda"}
    assert "compute" in parse(["compare"]).contenders
    assert "compute" not in parse(["memory"]).contenders


def test_one_thread_is_all_that_runs_on_cuda(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert parse(["--device", "cuda"]).threads == [1]
    assert parse(["--device", "cpu"]).threads == [1, 2]


class Paced:
    """Takes seconds for each round and for each client step."""

    def __init__(self, workload, per_round=0.0, per_step=1.0):
        self.seconds = per_round + workload.client_steps * per_step

    def run(self, rounds):
        return Timing(Stopwatch(self.seconds * rounds, self.seconds * rounds))


def test_who_cannot_run_on_cuda_is_left_out_in_one_line(monkeypatch):
    entered, lines = [], []

    def enter(name, workload, model_name, data, device):
        entered.append((name, device))
        return Paced(workload)

    monkeypatch.setattr("benchmarks.compare.enter", enter)
    result = compare("W3", "tiny", [*NAMES, "graphs"], [1], 200, 1, 1, lines.append, "cuda")
    assert entered == [(name, "cuda") for name in ON_CUDA]
    left_out = (
        "ranks, compiled, ranks_bf16, compute, convolutions, compute_compiled, pfl, fluke, byzfl, flower"
    )
    assert f"  not on cuda, left out: {left_out}" in lines
    assert result["device"] == "cuda"
    assert result["missing"] == []
    assert result["compute_share"] == {}
    lines.clear()
    assert compare("W3", "tiny", ["naive"], [1], 200, 1, 1, lines.append)["device"] == "cpu"
    assert not [line for line in lines if "left out" in line]


def test_clocks_wait_for_the_device(monkeypatch):
    waits = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda: waits.append("cuda"))
    with Timing.on("cpu").total:
        assert waits == []
    with Timing.on("cuda").total:
        assert waits == ["cuda"]
    assert waits == ["cuda", "cuda"]


def small_data():
    data = SyntheticImages(130, SMALL.num_clients)
    data.setup("fit")
    return data


def test_the_naive_loop_moves_model_and_batches():
    naive = NaiveLoop(SMALL, make_model("tiny"), small_data(), "meta")
    naive.run(1)  # tensors of two devices would be an error
    assert {value.device.type for value in naive.model.state_dict().values()} == {"meta"}


@pytest.mark.parametrize(("device", "accelerator"), [("cpu", "cpu"), ("cuda", "gpu")])
def test_the_trainer_is_told_the_device(device, accelerator, monkeypatch):
    given = {}

    def trainer(**settings):
        given.update(settings)
        return SimpleNamespace(fit=lambda *args, **kwargs: None)

    monkeypatch.setattr("benchmarks.contenders.L.Trainer", trainer)
    data = small_data()
    Framework(SMALL, make_model("tiny"), data, SequentialExecutor(), device).run(1)
    assert (given["accelerator"], given["devices"]) == (accelerator, 1)
    # graphs are recorded in a round of their own
    assert given["max_epochs"] == (2 if device == "cuda" else 1)


@pytest.mark.parametrize("untimed", [0, 1])
def test_rounds_that_are_not_timed_are_left_out_of_all_clocks(untimed, monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    timing = Timing(Stopwatch(cpu_clock=lambda: 0.0), Stopwatch(cpu_clock=lambda: 0.0))
    clock = _RoundClock(timing, untimed)
    for _ in range(untimed + 2):
        clock.on_train_batch_start()
        clock.on_train_batch_end()
    clock.on_train_end()
    # each reading of the clock adds 1: two timed rounds are 4 readings, between those of the total
    assert (timing.in_rounds.wall, timing.total.wall) == (2, 5)


def test_figures_for_a_gpu_are_scaled_from_what_was_measured(monkeypatch):
    # the naive loop takes 1 s a client step, ours 2 s a round and 0.1 s a client step
    paces = {"naive": (0.0, 1.0), "sequential": (2.0, 0.1)}

    def enter(name, workload, model_name, data, device):
        assert device == "cuda"
        return Paced(workload, *paces[name])

    for module in ("compare", "gpu"):
        monkeypatch.setattr(f"benchmarks.{module}.enter", enter)
    found = gpu.gpu("tiny", ["sequential"], 200, 2, 3, lambda line: None)
    assert found["w1"]["speedup"]["sequential"]["wall"].median == pytest.approx(200 / 22)
    # 50,000 images 128 times, 20 x 500 of them a round
    assert found["full_run"]["sequential"].median == pytest.approx(640 * 52)
    assert found["single_steps"]["sequential"].median == pytest.approx((2.5 / 5) / (52 / 500))
    heading, _, row = gpu.table([found])
    assert "from 3 of 640 rounds" in heading
    assert row.startswith(f"| cuda | tiny | sequential | {Spread.of([200 / 22])} | ")


@pytest.mark.nightly
def test_the_command_gpu_can_be_tried_on_a_cpu(capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.FULL", replace(gpu.FULL, local_steps=5))
    few = ["--images", "200", "--repeats", "1", "--rounds", "1", "--models", "tiny"]
    main(["gpu", "--device", "cpu", *few, "--contenders", "sequential", "--json", "out.json"])
    assert "| cpu | tiny | sequential |" in capsys.readouterr().out
    with open("out.json") as file:
        (result,) = json.load(file)["results"]
    assert result["full_run"]["sequential"]["median"] > 0
    assert result["single_steps"]["sequential"]["median"] > 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_compare_runs_on_cuda(capsys):
    few = ["--images", "200", "--repeats", "1", "--rounds", "2", "--models", "tiny", "--device", "cuda"]
    main(["--workloads", "W3", *few, "--contenders", *ON_CUDA])
    assert capsys.readouterr().out.count("| W3 | tiny |") == len(ON_CUDA)
