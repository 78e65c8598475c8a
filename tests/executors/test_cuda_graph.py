"""captured steps, on a CPU: what a CUDA graph does (the same operations on the same memory, no Python) is done by a stand-in."""

from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial

import pytest
import torch
from helpers import SGD, States, blobs, fit, small_cnn
from outcomes import METHODS, outcome
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from datamodules import Digits
from fl_lightning import ConfigurationError, FederatedCallback, FederatedModule, VectorizedExecutor
from fl_lightning.executors import cuda_graph, module_state
from fl_lightning.executors.cuda_graph import StepGraphs
from fl_lightning.models.resnet import CIFARResNet

READS_A_NUMBER = ("_local_scalar_dense", "nonzero", "is_nonzero")


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


class Recording(TorchDispatchMode):
    """Every operation with its arguments and results, all of which stay where they are."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        assert not any(word in name for word in READS_A_NUMBER), f"{name} would wait for the device"
        found = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, found))
        return found

    def replay(self):
        with torch.no_grad():
            for function, args, kwargs, found in self.operations:
                own = {storage(leaf) for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
                again = function(*args, **kwargs)
                for old, new in zip(tree_leaves(found), tree_leaves(again), strict=True):
                    if torch.is_tensor(old) and storage(old) not in own:
                        old.copy_(new)


def record_on_cpu(compute):
    with Recording() as capture:
        found = compute()
    return capture.replay, found


class captured(VectorizedExecutor):
    """Replays captured steps on any device, and counts the captures."""

    def __init__(self, block_size=None):
        super().__init__(block_size, cuda_graph=True)
        self.captures = 0
        self.graphs = StepGraphs(self._record)

    def _record(self, compute):
        self.captures += 1
        return record_on_cpu(compute)

    def _compute(self, module, cohort, part, rows):
        return self.graphs.run(
            module, cohort, rows, part, lambda batch: self._block(module, cohort, batch, rows)
        )


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("method", METHODS)
def test_replayed_steps_are_those_of_python_bit_for_bit(method, size):
    def run(executor):
        return outcome(small_cnn("bn", dropout=0.5), blobs(), executor, METHODS[method]())

    graphs = captured(size)
    assert same(run(VectorizedExecutor(size)), run(graphs))


def test_a_step_is_recorded_once_for_each_block_and_batch_shape():
    executor = captured()
    outcome(small_cnn("bn"), blobs(), executor, rounds=4)
    assert executor.captures == 1
    executor = captured(2)
    outcome(small_cnn("bn"), blobs(), executor, rounds=4)
    assert executor.captures == 2  # of two clients, and of one


class Keeps(torch.nn.Module):
    """Keeps what it computed last, as models do that explain themselves."""

    def forward(self, x):
        self.last = x.relu()
        return self.last


def test_what_a_model_keeps_of_its_forward_pass_is_no_reason_to_record_again():
    executor = captured()
    outcome(torch.nn.Sequential(Keeps(), *small_cnn("bn")), blobs(), executor, rounds=4)
    assert executor.captures == 1


def test_clients_that_finish_early_are_recorded_apart():
    def run(executor):
        settings = {"participation": 3, "local_steps": None, "local_epochs": 1}
        return outcome(small_cnn("bn"), blobs(4, (16, 32, 24, 16)), executor, **settings)

    assert same(run(VectorizedExecutor()), run(captured()))


class Doubled(torch.nn.CrossEntropyLoss):
    def forward(self, outputs, targets):
        return 2 * super().forward(outputs, targets)


class Momentum(FederatedCallback):
    """Another momentum of BN from the second round on, and another loss from the third one on."""

    def on_round_start(self, trainer, pl_module, cohort):
        pl_module.model[1].momentum = 0.1 if cohort.round == 1 else 0.5
        if cohort.round == 3:
            pl_module.loss = Doubled()


def states(executor):
    seen = States()
    module = FederatedModule(
        small_cnn("bn"), SGD, local_steps=2, executor=executor, loss=torch.nn.CrossEntropyLoss()
    )
    fit(module, blobs(), 4, [Momentum(), seen])
    return seen.states


def test_numbers_and_parts_that_callbacks_change_reach_the_recorded_steps(monkeypatch):
    reference = states(VectorizedExecutor())
    assert all(map(same, reference, states(captured())))
    monkeypatch.setattr(module_state, "attributes_of", lambda module: [])
    assert not all(map(same, reference, states(captured())))
    monkeypatch.undo()
    monkeypatch.setattr(module_state, "objects_of", lambda module: [module])
    assert not all(map(same, reference, states(captured())))


def test_recording_leaves_running_statistics_and_gradients_as_they_were():
    written = [torch.zeros(3)]

    def compute(batch):
        written[0] += batch
        return written[0].sum()[None]

    graph = cuda_graph.StepGraph(compute, torch.ones(3), written, record_on_cpu)
    assert written[0].tolist() == [0, 0, 0]
    assert graph.run(torch.full((3,), 2.0)).tolist() == [6]
    assert graph.run(torch.full((3,), 3.0)).tolist() == [15]


def test_a_graph_is_used_on_a_cuda_device_alone():
    executor = VectorizedExecutor(cuda_graph=True)
    executor.graphs = StepGraphs(lambda compute: pytest.fail("captured on a CPU"))
    outcome(small_cnn("bn"), blobs(), executor)


class OutOfMemory(captured):
    """A capture of more than two clients ends without memory, after it has computed a few times."""

    def _record(self, compute):
        for _ in range(3):
            losses = compute()
        if len(losses) > 2:
            raise torch.OutOfMemoryError("no memory for the capture")
        return super()._record(compute)


def test_a_recording_that_ends_without_memory_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    executor = OutOfMemory()
    found = outcome(small_cnn("bn"), blobs(4, (24, 24, 24, 24)), executor)
    assert executor.captures == 2
    assert same(outcome(small_cnn("bn"), blobs(4, (24, 24, 24, 24)), VectorizedExecutor(2)), found)


def test_only_so_many_recordings_are_kept(monkeypatch):
    monkeypatch.setattr(cuda_graph, "_MOST", 2)
    executor, kept = captured(1), []

    class Looks(FederatedCallback):
        def on_local_step_end(self, trainer, pl_module, cohort, step):
            kept.append(len(executor.graphs._graphs))

    reference = outcome(small_cnn("bn"), blobs(), VectorizedExecutor(1))
    found = outcome(small_cnn("bn"), blobs(), executor, [Looks()])
    assert same(reference, found)
    assert set(kept) == {2}


def test_a_copy_of_an_executor_records_for_itself():
    executor = VectorizedExecutor(cuda_graph=True)
    executor.graphs._graphs = [(0, (each for each in ()))]  # as a CUDA graph, nothing that can be copied
    kept = deepcopy(executor).graphs
    assert kept._graphs == []
    assert kept.capture is executor.graphs.capture


class Stream:
    def wait_stream(self, other):
        pass


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (RuntimeError("operation not permitted when stream is capturing\nmore"), ConfigurationError,
         r"cuda_graph: true, but .* \(operation not permitted when stream is capturing\); .*set cuda_graph: false"),
        (torch.OutOfMemoryError("out of memory"), torch.OutOfMemoryError, "out of memory"),
    ],
)  # fmt: skip
def test_what_a_graph_cannot_hold_is_one_line_and_want_of_memory_stays_what_it_is(
    raised, expected, message, monkeypatch
):
    runs = []

    @contextmanager
    def capture(graph):
        runs.append("capture")
        try:
            raise raised
        finally:
            raise RuntimeError("the capture cannot be ended")  # as CUDA says after any error inside of it
        yield

    for name, stand_in in {
        "current_stream": Stream, "Stream": Stream, "stream": nullcontext, "CUDAGraph": object, "graph": capture,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    with pytest.raises(expected, match=message) as found:
        cuda_graph.capture_cuda_graph(lambda: runs.append("run"))
    assert "\n" not in str(found.value)
    assert runs == ["run"] * 3 + ["capture"]
    bug = RuntimeError("a bug of one's own")

    def fails():
        raise bug

    with pytest.raises(RuntimeError) as found:
        cuda_graph.capture_cuda_graph(fails)
    assert found.value is bug


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


class CountsOneStep(FederatedCallback):
    """How many operations Python starts in the third local step of a round."""

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        if step == 1:
            self.counting = Counting()
            self.counting.__enter__()
        elif step == 2:
            self.counting.__exit__(None, None, None)


class Nothing(VectorizedExecutor):
    """A captured step as Python sees it: one replay, and nothing else that grows with the model."""

    def _compute(self, module, cohort, part, rows):
        def capture(compute):
            return (lambda: None), torch.zeros(len(rows))

        self.graphs.capture = capture
        return self.graphs.run(module, cohort, rows, part, lambda batch: pytest.fail("computed"))


def operations(executor, depth):
    data = Digits(num_clients=3, batch_size=10, crop_padding=1, horizontal_flip=True)
    data.prepare_data()
    counts = CountsOneStep()
    model = CIFARResNet(depth, in_channels=1, width=4)
    module = FederatedModule(model, partial(SGD, momentum=0.9), local_steps=4, executor=executor)
    fit(module, data, 1, [counts], precision="32-true")
    return counts.counting.count


def test_what_python_starts_in_a_recorded_step_does_not_grow_with_the_model():
    few, many = operations(Nothing(), 8), operations(Nothing(), 20)
    assert few == many < 60
    assert operations(VectorizedExecutor(), 20) > 1000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_gives_what_the_same_device_gives_without():
    def run(executor):
        seen = States()
        module = FederatedModule(small_cnn("bn", dropout=0.5), SGD, local_steps=3, executor=executor)
        fit(module, blobs(), 3, [seen], accelerator="gpu", devices=1)
        return seen.states

    plain, captured = run(VectorizedExecutor()), run(VectorizedExecutor(cuda_graph=True))
    for first, second in zip(plain, captured, strict=True):
        for name, value in first.items():
            torch.testing.assert_close(second[name], value, rtol=1e-10, atol=1e-12)
