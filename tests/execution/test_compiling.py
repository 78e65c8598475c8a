"""Compiled passes: when a run takes them, and that their numbers depend on neither order, ranks nor resuming."""

import os
import shutil
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from fl_lightning import ConfigurationError, FederatedModule, SequentialExecutor
from fl_lightning.callbacks import FixBN
from fl_lightning.cohort.slots import StateSlots
from fl_lightning.execution import compiling
from fl_lightning.execution.compiling import decide
from fl_lightning.execution.strategy import CohortStrategy
from fl_lightning.models import LeNet, ResNet8
from tests.support.command_line import run as run_command
from tests.support.contract import OF_BATCHES, TABLE
from tests.support.contract import run as run_method
from tests.support.helpers import SGD, SaveRounds, blobs, distance, fit, small_cnn
from tests.support.outcomes import outcome, same

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that works, without its time."""
    monkeypatch.setattr(compiling, "_trouble", lambda: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


CHEAP = {"compile_threads": 1, "cpp.vec_isa_ok": True}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder for compiled code that all workers share, without processes that compile or trials of vector code."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "compiled"
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(CHEAP):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield


def decision(model, client_steps=10**9, before=None, setting="auto", shape=(4, 3, 32, 32)):
    module = FederatedModule(model, SGD, local_steps=1)
    module.client.slots = StateSlots(model)
    batch = torch.ones(shape), torch.arange(shape[0])
    return decide(setting, module.client, client_steps, lambda: batch, before)


class OwnLayer(nn.Flatten):
    pass


@pytest.mark.parametrize(
    ("model", "client_steps", "compiled", "reason"),
    [
        # 294,912 values: 4 images, 3 layers of 16 channels at 32x32, 2 of 32 at 16x16, 2 of 64 at 8x8
        (ResNet8, 508_627, True, "508,627 local steps with 294,912 values in BN layers"),
        (ResNet8, 508_626, False, "508,626 local steps with 294,912 values in BN layers"),
        (ResNet8, 999, False, "999 local steps in all"),
        (partial(ResNet8, norm="gn"), 10**9, False, "with 0 values in BN layers"),
        (LeNet, 10**9, False, "in max pooling"),
        (lambda: nn.Sequential(OwnLayer(), nn.Linear(3072, 10)), 10**9, False, "OwnLayer is a custom layer"),
    ],
)
def test_auto_asks_for_enough_steps_and_enough_batch_norm(compiler, model, client_steps, compiled, reason):
    found = decision(model(), client_steps)
    assert found.compiled == compiled
    assert reason in found.reason


def test_a_model_that_cannot_run_without_numbers_is_not_compiled(compiler):
    found = decision(
        nn.Sequential(nn.Flatten(), nn.Linear(3072, 10), nn.AdaptiveLogSoftmaxWithLoss(10, 10, [5]))
    )
    assert not found.compiled


def test_counting_changes_neither_the_model_nor_random_numbers(compiler):
    model = nn.Sequential(ResNet8(), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert decision(model).compiled
    assert same(before, model.state_dict())
    assert torch.equal(state, torch.get_rng_state())


def cumulative():
    model = small_cnn()
    model[1].momentum = model[4].momentum = None
    return model


def spectral():
    model = small_cnn()
    nn.utils.parametrizations.spectral_norm(model[8])
    return model


@pytest.mark.slow
@pytest.mark.parametrize("make", [cumulative, spectral])
def test_a_model_that_the_compiler_runs_in_parts_trains_as_without_it(compiler, make):
    settings = {"precision": "64-true"}
    states = []
    for compiled in (True, False):
        torch._dynamo.reset()
        module = FederatedModule(make(), SGD, local_steps=3, executor=SequentialExecutor(compiled))
        fit(module, blobs(num_clients=2), rounds=2, **settings)
        states.append(module.state_dict())
    assert distance(*states) < 1e-9


@pytest.mark.slow
@pytest.mark.first_steps
@needs_compiler
def test_wrong_numbers_of_the_compiler_are_refused(cache):
    """torch.compile gives other numbers for the old spectral norm."""
    torch._dynamo.reset()
    model = small_cnn()
    nn.utils.spectral_norm(model[8])
    module = FederatedModule(model, SGD, local_steps=3, executor=SequentialExecutor(compile=True))
    with pytest.raises(
        ConfigurationError, match=r"'8\.weight_.*' differs from plain PyTorch .*: set compile: false"
    ):
        fit(module, blobs(num_clients=2), rounds=2)


@pytest.mark.parametrize("before", [True, False])
def test_a_resumed_run_goes_on_as_before(compiler, before):
    assert decision(ResNet8(), 10**9 if not before else 1, before).compiled == before
    for setting in (True, False):
        assert decision(ResNet8(), 1, before, setting).compiled == setting


@torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
def test_without_a_compiler_auto_does_without_and_true_is_one_line():
    assert not decision(ResNet8()).compiled
    assert not decision(ResNet8(), before=True).compiled
    with pytest.raises(
        ConfigurationError, match=r"compile: True does not work here: .*no-such-compiler"
    ) as error:
        decision(ResNet8(), setting=True)
    assert "\n" not in str(error.value)


def test_compile_is_true_false_or_auto():
    with pytest.raises(ConfigurationError, match="'always' must be true, false or auto"):
        SequentialExecutor("always")


@pytest.mark.slow
def test_the_decision_is_kept_in_the_checkpoint(compiler, monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "_WORTH_IT", 1)
    monkeypatch.setattr(compiling, "_FEWEST_STEPS", 1)
    modules = [
        FederatedModule(small_cnn(), SGD, local_steps=1, executor=SequentialExecutor()) for _ in range(2)
    ]
    fit(modules[0], blobs(), 2, [SaveRounds(tmp_path)])
    monkeypatch.setattr(compiling, "_WORTH_IT", float("inf"))
    fit(modules[1], blobs(), 3, ckpt_path=tmp_path / "1.ckpt")
    assert [module.executor.compiled_for(module.model) for module in modules] == [True, True]


def test_where_one_rank_cannot_compile_none_does(compiler, monkeypatch):
    def trouble():
        return "no compiler there" if os.environ.get("LOCAL_RANK") == "1" else None

    monkeypatch.setattr(compiling, "_trouble", trouble)
    monkeypatch.setattr(compiling, "_WORTH_IT", 1)
    monkeypatch.setattr(compiling, "_FEWEST_STEPS", 1)
    module = FederatedModule(small_cnn(), SGD, local_steps=1, executor=SequentialExecutor())
    fit(module, blobs(), 1, devices=2, strategy=CohortStrategy())
    assert module.executor.compilation == (False, "no compiler there")


def test_only_a_verbose_run_says_why_it_is_not_compiled(capsys):
    run_command("--verbose")
    lines = capsys.readouterr().out.splitlines()
    assert "not compiled" in lines[lines.index("Executor") + 2]
    run_command()
    assert "Executor" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_that_changes_in_each_step_is_one_line(compiler, monkeypatch):
    class Counting(nn.Flatten):
        steps = 0

        def forward(self, x):
            self.steps += 1
            return super().forward(x) * self.steps

    monkeypatch.setattr(compiling, "_MOST_GRAPHS", 3)
    model = nn.Sequential(Counting(), nn.Linear(72, 3))
    module = FederatedModule(model, SGD, local_steps=9, executor=SequentialExecutor(compile=True))
    with pytest.raises(ConfigurationError, match=r"Sequential was compiled 3 times.* set compile: false"):
        fit(module, blobs(), 1)


KINDS = (
    "BNSCAFFOLD",
    "BatchRenormalization",
    "FBN",
    "FedBABU",
    "FedExFixBN",
    "FedProx",
    "FedTAN",
    "FixBN",
    "HybridBN",
)
"""Methods with layers of their own, that train fewer parameters or freeze, and one with plain passes."""


class Watched(SequentialExecutor):
    """Keeps what a compiled pass depends on: the classes and states of layers, and what is trained."""

    def __init__(self):
        super().__init__(compile=False)
        self.kinds = set()

    def _passes(self, module, cohort, row, batch):
        layers = [(type(layer), layer.training) for layer in module.model.modules()]
        self.kinds.add((*layers, len(cohort.row_state(row).trained)))
        return super()._passes(module, cohort, row, batch)


@pytest.mark.slow
def test_other_methods_have_the_passes_of_plain_or_frozen_ones():
    def kinds(row):
        return run_method(row, executor=Watched()).executor.kinds

    plain = [kinds(row) for row in TABLE if row.callback in ("FedProx", "FixBN")]
    assert [row.name for row in TABLE if row.callback not in KINDS and kinds(row) not in plain] == []


def check_compiled_passes(row):
    torch._dynamo.reset()
    plain, fast = (run_method(row, executor=SequentialExecutor(compile=setting)) for setting in (False, True))
    assert fast.executor.compiled_for(fast.model)
    assert distance(plain.state_dict(), fast.state_dict()) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in TABLE if row.callback in KINDS], ids=lambda row: row.name)
def test_each_kind_of_pass_is_traced_as_it_computes(row, compiler):
    check_compiled_passes(row)


def rows():
    """Rows of plain passes that freeze later and of layers of a method's own; the other rows are nightly."""
    in_ci = {"FixBN": {"freeze_round": 1, "freeze": "both"}, "BNSCAFFOLD": {}}
    for row in (TABLE[place] for place in OF_BATCHES):  # single samples are not compiled
        marks = () if in_ci.get(row.callback) == row.settings else pytest.mark.nightly
        yield pytest.param(row, id=row.name, marks=marks)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("row", [*rows()])
def test_compiled_passes_of_every_method_are_those_that_are_not(row, cache):
    check_compiled_passes(row)


@needs_compiler
@pytest.mark.slow
def test_a_models_own_random_numbers_and_dropout_are_those_that_are_not_compiled(cache):
    class Noisy(nn.Sequential):
        def forward(self, x):
            return super().forward(x + 0.1 * torch.randn_like(x))

    torch.manual_seed(0)
    model = Noisy(nn.Flatten(), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    data = partial(blobs, shape=(2, 2, 2))
    plain, fast = (outcome(model, data(), SequentialExecutor(setting)) for setting in (False, True))
    assert distance(plain, fast) < 1e-10


def uneven():
    """Clients whose last batch of a pass is smaller."""
    data = blobs(sizes=(20, 12, 20), shape=(2, 2, 2))
    for client in data.clients:
        client.train_dataloader = partial(DataLoader, client.dataset, 8, shuffle=True)
    return data


def trained_unevenly(folder, ckpt_path=None, rounds=4, eps=1e-5, **trainer):
    """A run with batches of 8 and 4 whose statistics freeze after round 2, which generates its code anew."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(8, eps), nn.Linear(8, 3))
    executor = SequentialExecutor(compile=True)
    module = FederatedModule(model, SGD, local_epochs=1, executor=executor)
    anew = (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    )
    with anew[0], anew[1]:
        fit(module, uneven(), rounds, [FixBN(freeze_round=2), SaveRounds(folder)], ckpt_path, **trainer)
    return module.state_dict()


@needs_compiler
@pytest.mark.slow
def test_a_resumed_run_compiles_the_same_code_whatever_shapes_it_meets_first(cache, tmp_path):
    reference = trained_unevenly(tmp_path)
    assert same(reference, trained_unevenly(tmp_path, ckpt_path=tmp_path / "1.ckpt"))


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*sync_dist")  # Lightning's advice where every rank logs the same
def test_ranks_that_compile_at_the_same_time_have_the_numbers_of_one_process(cache, tmp_path):
    settings = {"rounds": 2, "eps": 2e-5}  # a constant of its own: no other test has compiled this code
    found = trained_unevenly(tmp_path, **settings, devices=2, strategy=CohortStrategy())
    assert same(trained_unevenly(tmp_path, **settings), found)
