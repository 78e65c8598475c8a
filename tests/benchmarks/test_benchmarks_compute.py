"""The bounds that benchmarks hold the framework against: compute alone on all cores, and its own time read strictly."""

import io
import json
import time

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from benchmarks.__main__ import main
from benchmarks.compute import Compute
from benchmarks.contenders import Framework, Timing
from benchmarks.inside import compute_watched
from benchmarks.passes import CompiledPasses, Convolutions, Passes
from benchmarks.process_tree import running
from benchmarks.recipe import BATCH_SIZE, make_model
from benchmarks.roster import enter
from benchmarks.stopwatch import Stopwatch
from benchmarks.workloads import SyntheticImages, Workload
from fl_lightning import SequentialExecutor
from fl_lightning.optimizers.client import ClientOptimizer

pytestmark = pytest.mark.slow

THREE_STEPS = Workload(num_clients=3, cohort_size=3, local_steps=1, rounds=1)
HEADING = "forward + backward on all cores / this"


def test_each_pass_gives_the_gradients_of_all_parameters_for_a_batch():
    passes, batches = Passes("tiny"), []
    handle = register_module_forward_pre_hook(
        lambda module, inputs: batches.append(inputs[0]) if module is passes.model else None
    )
    try:
        passes.run(3)
    finally:
        handle.remove()
    assert [batch.shape for batch in batches] == [(BATCH_SIZE, 3, 32, 32)] * 3
    assert batches[0].is_contiguous(memory_format=torch.channels_last)
    assert passes.model.training
    assert [found.shape for found in passes.gradients] == [value.shape for value in passes.model.parameters()]
    assert all(bool(found.abs().sum() > 0) for found in passes.gradients)


@pytest.mark.parametrize("model_name", ["tiny", pytest.param("resnet20", marks=pytest.mark.nightly)])
def test_convolutions_alone_give_the_gradients_of_the_whole_pass(model_name):
    passes, alone = Passes(model_name), Convolutions(model_name)
    passes.run(1)
    alone.run(2)
    whole = zip(passes.model.parameters(), passes.gradients, strict=True)
    expected = [gradient for value, gradient in whole if value.ndim == 4]  # in the order of the forward pass
    for found, gradient in zip(alone.gradients, expected, strict=True):
        torch.testing.assert_close(found, gradient)
    assert [part.reaches_images for part in alone.parts] == [True] + [False] * (len(expected) - 1)


@pytest.mark.nightly
def test_compiled_passes_are_those_that_are_not():
    compiled, plain = CompiledPasses("tiny"), Passes("tiny")
    for passes in (compiled, plain):
        passes.run(2)
    for found, expected in zip(compiled.gradients, plain.gradients, strict=True):
        torch.testing.assert_close(found, expected)


class Answering:
    """A process that gives its answers at once."""

    def __init__(self, *answers):
        self.stdin = io.StringIO()
        self.stdout = io.StringIO("".join(f"{answer}\n" for answer in answers))
        self.killed = False

    def kill(self):
        self.killed = True

    def communicate(self):
        pass


class FourSeconds(Stopwatch):
    """Four seconds of wall time and eight of processor time, whatever happens."""

    def start(self):
        pass

    def stop(self):
        self.wall, self.cpu = 4.0, 8.0


def test_steps_that_do_not_divide_by_the_processes_are_scaled_to_the_perfect_split(monkeypatch):
    processes = [Answering("ready", "done", "done") for _ in range(2)]
    starting = iter(processes)
    monkeypatch.setattr("benchmarks.compute._start", lambda kind, model_name: next(starting))
    monkeypatch.setattr("benchmarks.compute.Timing", lambda: Timing(FourSeconds()))
    compute = Compute(THREE_STEPS, "tiny", num_processes=2)
    odd, even = compute.run(1).total, compute.run(2).total
    # two passes each, one more than the three that are asked for; six in two rounds divide
    assert [process.stdin.getvalue() for process in processes] == ["2\n3\n", "2\n3\n"]
    assert (odd.wall, odd.cpu) == (3.0, 6.0)
    assert (even.wall, even.cpu) == (4.0, 8.0)
    del compute
    assert all(process.killed for process in processes)


def test_compute_has_a_process_on_every_core_that_may_be_used(monkeypatch):
    monkeypatch.setattr("benchmarks.compute._start", lambda kind, model_name: Answering("ready"))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 5, 6})
    compute = enter("compute", THREE_STEPS, "tiny", None)
    assert isinstance(compute, Compute)
    assert len(compute.processes) == 3


def test_one_contender_computes_in_bfloat16_and_the_others_do_not():
    data = SyntheticImages(200, 3)
    data.setup("fit")
    contenders = {name: enter(name, THREE_STEPS, "tiny", data) for name in ("ranks", "ranks_bf16")}
    found = {}
    for name, contender in contenders.items():
        contender.module.executor = SequentialExecutor()  # in this process, where the hook is
        contender.module.model.register_forward_hook(
            lambda module, inputs, output, name=name: found.update({name: output.dtype})
        )
        contender.run(1)
    assert found == {"ranks": torch.float32, "ranks_bf16": torch.bfloat16}


def test_a_process_that_fails_is_told(monkeypatch):
    monkeypatch.setattr("benchmarks.compute._start", lambda kind, model_name: Answering("ready"))
    with pytest.raises(RuntimeError, match="compute: a process has failed, see above"):
        Compute(THREE_STEPS, "tiny", num_processes=1).run(1)


@pytest.mark.nightly
def test_compare_tells_how_near_the_executors_are_to_compute_alone(capsys):
    before = running()
    few = ["--images", "200", "--repeats", "1", "--rounds", "10", "--models", "tiny", "--threads", "1"]
    main(["--workloads", "W3", *few, "--contenders", "sequential", "compute", "--json", "out.json"])
    assert running() == before
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split("|")[-2].strip() == HEADING
    rows = {cells[3].strip(): cells for cells in (line.split("|") for line in shown[2:5])}
    assert list(rows) == ["naive", "sequential", "compute"]
    assert rows["compute"][4].strip() == "1 a process"
    assert rows["naive"][-2].strip() == rows["compute"][-2].strip() == "-"
    with open("out.json") as file:
        (result,) = json.load(file)["results"]
    wall = {name: clocks["wall"]["median"] for name, clocks in result["ms_per_client_step"].items()}
    assert result["compute_share"].keys() == {"sequential"}
    assert result["compute_share"]["sequential"]["median"] == pytest.approx(
        wall["compute"] / wall["sequential"]
    )
    assert 0 < wall["compute"] < wall["naive"]
    # its processes' time counts: more than what this one takes to wait for them
    assert result["ms_per_client_step"]["compute"]["cpu"]["median"] > 0.2 * wall["compute"]
    assert list(result["ahead"]["sequential"]) == ["naive"]
    main(["chart", "--results", "out.json", "--picture", "out.png"])


def slow_restart(monkeypatch, seconds):
    restart = ClientOptimizer.restart

    def slowly(self, *args):
        time.sleep(seconds)
        restart(self, *args)

    monkeypatch.setattr(ClientOptimizer, "restart", slowly)


def slow_server(monkeypatch, seconds):
    step = torch.optim.SGD.step

    def slowly(self, closure=None):
        if self.param_groups[0]["lr"] == 1.0:
            time.sleep(seconds)
        return step(self, closure)

    slowly.hooked = True
    monkeypatch.setattr(torch.optim.SGD, "step", slowly)


def slow_clients(monkeypatch, seconds):
    step = ClientOptimizer.step

    def slowly(self):
        time.sleep(seconds)
        step(self)

    monkeypatch.setattr(ClientOptimizer, "step", slowly)


@pytest.mark.parametrize(
    ("slow", "once_a_round"), [(slow_restart, True), (slow_server, True), (slow_clients, False)]
)
def test_what_happens_once_a_round_is_the_frameworks_own_only_read_strictly(slow, once_a_round, monkeypatch):
    data = SyntheticImages(200, 3)
    data.setup("fit")
    framework = Framework(THREE_STEPS, make_model("tiny"), data, SequentialExecutor())
    framework.run(2)

    def watched():
        with compute_watched() as inside:
            framework.run(2)
        return inside.steps.wall, inside.once_a_round.wall

    usual = watched()
    slow(monkeypatch, 0.4)
    steps, rest = (now - before for now, before in zip(watched(), usual, strict=True))
    grown, same = (rest, steps) if once_a_round else (steps, rest)
    assert grown > 0.3
    assert abs(same) < 0.2
