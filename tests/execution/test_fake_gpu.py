"""What can be said of a GPU without one: devices never mix, and local steps never wait for the device."""

from functools import partial
from itertools import product
from types import MappingProxyType

import pytest
import torch
from torch import nn

from fl_lightning import (
    ClientFailures,
    FederatedCallback,
    FederatedModule,
    GraphExecutor,
    SequentialExecutor,
    VectorizedExecutor,
)
from fl_lightning.aggregation import (
    NNM,
    Bucketing,
    CenteredClipping,
    GeometricMedian,
    Krum,
    MeanAroundMedian,
    Median,
    MultiKrum,
    TrimmedMean,
)
from fl_lightning.callbacks import FBN, SCAFFOLD, ClientGradientClipping, MaintainedMomentum
from fl_lightning.datamodules import Digits
from fl_lightning.optimizers.client_lr import InverseSteps
from fl_lightning.optimizers.server import FedAdam, FedYogi
from fl_lightning.round import Classification, Segmentation, ServerEvaluation
from fl_lightning.round import module as round_module
from tests.support.contract import EVERY_METHOD, ROW_OF_METHOD, SHIPPED, TABLE, method_of
from tests.support.fake_gpu import CUDA, fake_gpu, fit
from tests.support.helpers import SGD, SaveRounds, blobs, small_cnn
from tests.support.helpers import fit as fit_on_cpu

pytestmark = [
    pytest.mark.slow,
    # GraphExecutor compares addresses, which fake tensors do not have
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning"),
]

EXECUTORS = (SequentialExecutor, VectorizedExecutor, GraphExecutor)


@pytest.fixture(autouse=True)
def no_check_of_the_first_steps(monkeypatch):
    """Fake tensors have no values to compare."""
    for check in ("check_first_steps", "compare_with_copies"):
        monkeypatch.setattr(round_module, check, lambda module: None)


def model(dropout=True, norm=nn.BatchNorm2d):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), norm(4), nn.ReLU(), nn.Conv2d(4, 6, 3), norm(6), nn.ReLU(),
        nn.Dropout(0.5) if dropout else nn.Identity(), nn.Flatten(), nn.Linear(96, 10),
    )  # fmt: skip


class LocalSteps(FederatedCallback):
    """Where the CPU waits for the GPU between the first local step of a round and the last one; must be last in the list."""

    def __init__(self):
        self.waits = []

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        gpu = torch.utils._python_dispatch._get_current_dispatch_mode()
        if step > 0:
            self.waits += gpu.waits[self.before :]
        self.before = len(gpu.waits)


def suits(row):
    """The model and the kind of batches of a method."""
    if not getattr(SHIPPED.get(row.callback), "per_sample", False):
        return model, "epochs"
    return partial(model, norm=partial(nn.GroupNorm, 2)), "poisson"


def digits(num_clients=4, sampling="epochs"):
    data = Digits(
        num_clients, batch_size=10, sampling=sampling, crop_padding=1, horizontal_flip=True, max_examples=120
    )
    data.prepare_data()
    return data


def evaluations(row):
    """Settings that leave out evaluations which copy the model or run backward: fake tensors can do neither."""
    return {"limit_val_batches": 0} if row.callback in ("AdaBN", "ClassifierBias", "FedBABU") else {}


def train(
    callbacks=(),
    rounds=3,
    num_clients=4,
    dropout=True,
    trainer=MappingProxyType({}),
    make=model,
    sampling="epochs",
    **settings,
):
    """Where the CPU has waited within local steps; the last round is evaluated."""
    work = {} if "local_epochs" in settings else {"local_steps": 2}
    settings = {"client_optimizer": SGD, **work, **settings}
    steps, module = LocalSteps(), FederatedModule(make(dropout), **settings)
    waits = fit(
        module,
        digits(num_clients, sampling),
        rounds,
        [*callbacks, steps],
        check_val_every_n_epoch=rounds,
        **trainer,
    )
    assert waits  # losses are read once a round
    return steps.waits


def cells():
    """Each method in its last settings with one executor, in turn; other settings and executors are nightly."""
    in_ci = [(row, EXECUTORS[place % 3]) for place, row in enumerate(ROW_OF_METHOD)]
    for row, executor in product(TABLE, EXECUTORS):
        if row.callback == "LabelInference":  # counts labels, which fake tensors do not have
            continue
        marks = () if (row, executor) in in_ci else pytest.mark.nightly
        yield pytest.param(row, executor, id=f"{executor.__name__}-{row.name}", marks=marks)


@pytest.mark.parametrize(("row", "executor"), [*cells()])
def test_every_method_keeps_to_the_device_and_its_local_steps_never_wait(row, executor):
    # one after the other each operation is repeated for each client: few of them, and dropout with the settings below
    clients = 4 if executor is VectorizedExecutor or "participation" in row.module else 2
    dropout = executor is VectorizedExecutor
    make, sampling = suits(row)
    settings = {
        "make": make,
        "sampling": sampling,
        "executor": executor(),
        "trainer": evaluations(row),
        **row.module,
    }
    assert train([method_of(row)], 3, clients, dropout, **settings) == []


@EVERY_METHOD
def test_a_run_that_a_cpu_began_goes_on_on_a_gpu(row, tmp_path):
    if row.callback == "LabelInference":
        pytest.skip("it counts labels, which fake tensors do not have")
    steps = {} if "local_epochs" in row.module else {"local_steps": 2}
    settings = {"client_optimizer": SGD, **steps, **row.module}
    make, sampling = suits(row)
    begun = FederatedModule(make(), **settings, executor=SequentialExecutor())
    fit_on_cpu(
        begun, digits(sampling=sampling), 2, [method_of(row), SaveRounds(tmp_path)], precision="32-true"
    )
    go_on = FederatedModule(make(), **settings, executor=VectorizedExecutor())
    fit(
        go_on,
        digits(sampling=sampling),
        3,
        [method_of(row)],
        ckpt_path=tmp_path / "2.ckpt",
        **evaluations(row),
    )
    assert go_on.record.metrics["round"] == 3


SETTINGS = {
    "chosen": {"executor": None},
    "one after the other": {"executor": SequentialExecutor()},
    "blocks": {"executor": VectorizedExecutor(2)},
    "centralised": {"centralised": True},
    "local epochs": {"local_steps": None, "local_epochs": 1},
    "partial participation": {"participation": 2, "weighting": "samples"},
    "adam": {"client_optimizer": partial(torch.optim.Adam, lr=0.01)},
    "groups and schedule": {
        "parameter_groups": {"batch_norm": {"lr_scale": 0.1}, "bias": {"weight_decay": 0.0}},
        "client_lr_schedule": InverseSteps(2),
    },
    "fedadam": {"server_optimizer": partial(FedAdam, lr=0.1)},
    "fedyogi": {"server_optimizer": partial(FedYogi, lr=0.1)},
    "torch's adam": {"server_optimizer": partial(torch.optim.Adam, lr=0.1)},
    "divergence": {"on_divergence": "record"},
    "failures": {"failures": ClientFailures(dropout=0.3, stragglers=0.5), "min_clients": 2},
    "tf32": {"tf32": True},
    **{
        name: {"aggregator": aggregator}
        for name, aggregator in {
            "median": Median(),
            "trimmed mean": TrimmedMean(1),
            "krum": Krum(1),
            "multi-krum": MultiKrum(1),
            "geometric median": GeometricMedian(),
            "mixing": Median(pre=NNM(1)),
            "mean around the median": MeanAroundMedian(1),
            "centred clipping": CenteredClipping(1.0),
            "weighted buckets": GeometricMedian(pre=Bucketing(1, f=1), weighting="weighted"),
            "weighted median": Median(weighting="weighted"),
        }.items()
    },
}


@pytest.mark.parametrize("what", SETTINGS)
def test_every_setting_keeps_to_the_device(what):
    assert train(**SETTINGS[what]) == []


@pytest.mark.parametrize("method", [SCAFFOLD, MaintainedMomentum, FBN])
def test_a_client_that_is_left_out_is_on_the_device_as_others_are(method):
    class Diverges(FederatedCallback):
        def on_local_step_end(self, trainer, pl_module, cohort, step):
            next(iter(cohort.params.values()))[:1] = torch.nan

    settings = {"on_divergence": "drop", "weighting": "samples", "executor": VectorizedExecutor()}
    momentum = partial(torch.optim.Adam, lr=0.01)
    assert train([Diverges(), method()], 3, client_optimizer=momentum, **settings) == []


def test_images_that_the_gpu_has_no_room_for_stay_on_the_cpu(monkeypatch):
    monkeypatch.setattr("tests.support.fake_gpu.FREE", 1000)
    data = digits()
    fit(FederatedModule(model(), SGD, local_steps=2), data, 2)
    assert data.samples.labels.device.type == "cpu"


@pytest.mark.parametrize("executor", EXECUTORS)
def test_clients_that_finish_before_those_beside_them_are_nothing_to_wait_for(executor):
    steps, active = LocalSteps(), []

    class Looks(FederatedCallback):
        def on_local_step_end(self, trainer, pl_module, cohort, step):
            active.append(cohort.active_rows())

    module = FederatedModule(small_cnn().double(), SGD, local_epochs=1, executor=executor())
    fit(
        module,
        blobs(4, (40, 16, 40, 24)),
        2,
        [Looks(), ClientGradientClipping(max_norm=1.0), SCAFFOLD(), steps],
    )
    assert [0, 2] in active
    assert steps.waits == []


@pytest.mark.parametrize(
    ("task", "scores", "targets"),
    [(Classification(), (6, 5), (6,)), (Segmentation(), (2, 5, 4, 3), (2, 8, 6))],
    ids=["classes", "pixels"],
)
def test_an_evaluation_waits_for_the_gpu_at_its_end_only(task, scores, targets):
    evaluation = ServerEvaluation()
    with fake_gpu() as gpu:
        labels = torch.zeros(targets, dtype=torch.int64, device=CUDA)
        for _ in range(2):
            evaluation.update(torch.zeros(scores, device=CUDA), labels, torch.zeros((), device=CUDA), task)
        assert gpu.waits == []
        assert task.quality in evaluation.finish()
    assert gpu.waits


def test_a_choice_is_to_replay_graphs():
    module = FederatedModule(model(), SGD, local_steps=1)
    fit(module, digits(), 1)
    assert isinstance(module.executor, GraphExecutor)
    assert module.executor_choice.reason == "each client's passes are a CUDA graph on cuda:0"


def test_mixed_precision_keeps_to_the_device(monkeypatch):
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: True)
    module = FederatedModule(model(), SGD, local_steps=2)
    fit(module, digits(), 2, precision="bf16-mixed")
    assert {value.dtype for value in module.model.parameters()} == {torch.float32}


class Mixes(FederatedCallback):
    def on_round_end(self, trainer, pl_module, cohort):
        for block in cohort.params.blocks.values():
            block += torch.zeros(block.shape)


class Reads(FederatedCallback):
    def on_local_step_end(self, trainer, pl_module, cohort, step):
        self.norm = float(cohort.params.blocks["weights"].norm())


class Copies(FederatedCallback):
    def on_local_step_end(self, trainer, pl_module, cohort, step):
        cohort.params.blocks["weights"].mul_(torch.ones(len(cohort), 1).to(pl_module.device))


def test_a_method_that_mixes_devices_or_waits_is_found():
    with pytest.raises(
        RuntimeError, match=r"all tensors to be on the same device|found two different devices"
    ):
        train([Mixes()])
    assert len(train([Reads()])) == len(train([Copies()])) == 3  # the second local steps of three rounds


def test_training_on_the_cpu_beside_a_gpu_gives_no_warning(monkeypatch):
    monkeypatch.setattr("lightning.pytorch.trainer.setup.CUDAAccelerator.is_available", lambda: True)
    fit_on_cpu(FederatedModule(small_cnn(), SGD, local_steps=1), blobs(), 1)
