"""The benchmarks' contenders take the same steps, and their processes, memory, scale and figures are told as they are."""

import json
import subprocess
import sys

import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks import scale
from benchmarks.__main__ import main
from benchmarks.process_tree import cpu_seconds, pss_mb
from benchmarks.recipe import BATCH_SIZE, LEARNING_RATE, Tiny
from benchmarks.roster import MULTI_PROCESS, NAMES, PEERS, enter, present
from benchmarks.stopwatch import Spread, Stopwatch
from benchmarks.workloads import SyntheticImages, Workload
from fl_lightning.pictures.style import SKY

pytestmark = pytest.mark.slow

TINY = sum(value.numel() for value in Tiny().parameters())
SINGLE = [name for name in NAMES if name not in MULTI_PROCESS]
SMALL = Workload(num_clients=6, cohort_size=3, local_steps=4, rounds=2)


def small_data():
    data = SyntheticImages(6 * 90, SMALL.num_clients)
    data.setup("fit")
    return data


def installed(names, in_ci=()):
    """Rows of contenders, nightly but for some, without those that are not installed."""
    absent = pytest.mark.skip("not all of the extra bench is installed")
    for name in sorted(names, key=_runs, reverse=True):
        marks = [] if name in in_ci else [pytest.mark.nightly]
        yield pytest.param(name, marks=marks if _runs(name) else [*marks, absent])


def _runs(name):
    """Whether a contender is there: peers together, since they stay imported for the tests that follow."""
    return name not in PEERS or all(present(peer) for peer in PEERS)


@pytest.mark.filterwarnings("ignore")  # what other frameworks warn of is theirs
@pytest.mark.parametrize("name", [*installed(SINGLE, ("naive", "sequential", "vectorized"))])
def test_everybody_takes_the_workloads_steps_on_the_workloads_samples(name):
    steps, batches = [], []

    def count_step(optimizer, *args):
        # not the server's step, whose learning rate is 1; ours steps all clients of the cohort as one block, and tries
        # the optimizer beforehand on a few numbers
        if optimizer.param_groups[0]["lr"] == LEARNING_RATE:
            values = [value for group in optimizer.param_groups for value in group["params"]]
            clients, left = divmod(sum(value.numel() for value in values), TINY)
            assert clients == 0 or left == 0
            steps.append(clients)

    def count_batch(module, inputs):
        if isinstance(module, Tiny) and module.training:
            clients = SMALL.cohort_size if name == "vectorized" else 1
            batches.extend([inputs[0].shape[0]] * clients)

    contender = enter(name, SMALL, "tiny", small_data())
    handles = [register_optimizer_step_post_hook(count_step), register_module_forward_pre_hook(count_batch)]
    try:
        timing = contender.run(2)
        contender.run(1)
    finally:
        for handle in handles:
            handle.remove()
    assert sum(steps) == 3 * SMALL.client_steps
    assert batches == [BATCH_SIZE] * (3 * SMALL.client_steps)
    assert timing.total.wall > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*installed(["flower"])])
def test_flowers_clients_see_the_workloads_samples(name):
    peer = enter(name, SMALL, "tiny", small_data())
    timing = peer.run(1)
    assert peer.seen == SMALL.local_steps * BATCH_SIZE
    assert timing.total.wall > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*installed([name for name in PEERS if name not in MULTI_PROCESS])])
def test_peers_train(name):
    peer = enter(name, SMALL, "tiny", small_data())
    model = {
        "pfl": lambda: peer.model.pytorch_model.model,
        "fluke": lambda: peer.algorithm.server.model,
        "byzfl": lambda: peer.server.model,
    }[name]()
    before = [value.clone() for value in model.parameters()]
    peer.run(1)
    moved = max(float((now - was).abs().max()) for now, was in zip(model.parameters(), before, strict=True))
    assert 1e-4 < moved < 1


def test_processor_time_of_processes_counts_while_they_live_and_afterwards():
    watch = Stopwatch(cpu_clock=cpu_seconds)
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    watch.start()
    process = subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    living = watch.cpu + cpu_seconds()
    process.communicate(b"\n")
    watch.stop()
    assert 0.25 < living < 1
    assert living - 0.05 < watch.cpu < living + 0.3


def test_memory_of_a_process_holds_that_of_its_children():
    script = "x = bytearray(100_000_000)\nx[::1000] = b'1' * 100_000\nprint(flush=True)\ninput()"
    start = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {script!r}])"
    process = subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    taken = pss_mb(process.pid)
    process.communicate(b"\n")
    assert 100 < taken < 150
    assert pss_mb(process.pid) == 0


@pytest.mark.nightly
def test_memory_is_measured_beyond_imports(capsys):
    few = ["--workloads", "W3", "--models", "tiny", "--rounds", "1", "--images", "20000"]
    main(["memory", *few, "--contenders", "naive", "--json", "out.json"])
    assert "| W3 | tiny | naive |" in capsys.readouterr().out
    with open("out.json") as file:
        (result,) = json.load(file)["results"]
    mb = result["mb"]["naive"]
    # it holds the images; PyTorch's own first use comes on top
    assert result["data"] < mb["more"] < result["data"] + 300
    assert mb["peak"] - mb["imports"] == pytest.approx(mb["more"])
    assert mb["imports"] > 50


def test_nothing_of_the_framework_holds_the_benchmarks_own_images():
    data = small_data()
    assert data.samples.inputs.untyped_storage().data_ptr() != data.pixels.untyped_storage().data_ptr()


@pytest.mark.nightly
def test_who_is_not_installed_is_listed(capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.roster.version", lambda peer: None)
    few = ["--images", "200", "--repeats", "1", "--rounds", "1", "--models", "tiny", "--threads", "1"]
    main(["--workloads", "W3", *few, "--contenders", "naive", "sequential", *PEERS])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:8]]
    assert [row[3].strip() for row in rows] == ["naive", "sequential", *PEERS]
    assert {row[4].strip() for row in rows[2:]} == {"not installed"}
    with pytest.raises(SystemExit):
        main(["scale", "--contenders", "naive", "pfl"])
    assert (
        "argument --contenders: pfl is not installed; pip install 'fl_lightning[bench]'"
        in capsys.readouterr().err
    )


class Steady:
    """Takes a second for each client step, or what it is told."""

    def __init__(self, workload, seconds=1.0):
        self.seconds = seconds * workload.client_steps

    def run(self, rounds):
        total = Stopwatch(self.seconds * rounds, self.seconds * rounds)
        return type("Timing", (), {"total": total})


def test_scale_keeps_to_its_budget(monkeypatch):
    monkeypatch.setattr("benchmarks.scale.enter", lambda name, workload, *args: Steady(workload))
    found = scale.scale(["local_steps"], "tiny", ["naive"], 200, 2, 450.0, lambda line: None)
    # 10 clients, 2 repetitions: up to 20 steps take 400 s, by several rounds, 100 steps would take 2000
    values = {point["value"]: point["ms_per_client_step"] for point in found["points"]}
    assert list(values) == [1, 5, 20, 100]
    assert [value for value, spreads in values.items() if "naive" in spreads] == [1, 5, 20]
    assert values[1]["naive"] == Spread(1000.0, 1000.0, 1000.0)
    assert "over budget" in "\n".join(scale.table([found]))


def test_scale_changes_one_thing_at_a_time():
    for workloads in scale._FEDERATIONS.values():
        for value, workload in workloads.items():
            shape = {"num_clients": workload.num_clients, "cohort_size": workload.cohort_size}
            assert value in {*shape.values(), workload.local_steps}
    assert scale._FEDERATIONS["clients"][1000].cohort_size == 1000
    assert scale._FEDERATIONS["local_steps"][2500].num_clients == 10


@pytest.mark.nightly
def test_charts_are_drawn_from_written_results():
    few = ["--repeats", "1", "--models", "tiny", "--contenders", "sequential"]
    main(
        ["--workloads", "W3", "--images", "200", "--rounds", "1", "--threads", "1", *few, "--json", "a.json"]
    )
    main(["scale", "--factors", "local_steps", "--images", "200", "--budget", "5", *few, "--json", "b.json"])
    for name in ("a", "b"):
        main(["chart", "--results", f"{name}.json", "--picture", f"{name}.png"])
        picture = imread(f"{name}.png")[..., :3]
        assert picture.shape[1] == 1050
        assert (
            abs(picture - to_rgb(SKY)).max(-1) < 0.01
        ).sum() > 50  # what stands for the sequential executor


def test_sides_of_different_commands_are_not_drawn_together(capsys):
    for name in ("compare", "overhead"):
        with open(f"{name}.json", "w") as file:
            json.dump({"command": name, "results": []}, file)
    with pytest.raises(SystemExit):
        main(["chart", "--results", "compare.json", "overhead.json", "--picture", "a.png"])
    assert (
        "files of compare, overhead; give files of only one command, compare or scale"
        in capsys.readouterr().err
    )
