"""Modules that override ``train()``: norm layers in eval mode, and layers that merge weights for an evaluation."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from fl_lightning import (
    ConfigurationError,
    FederatedCallback,
    FederatedDataModule,
    FederatedModule,
    Run,
    SequentialExecutor,
    VectorizedExecutor,
)
from fl_lightning.batch_norm.layers import batch_norm_layers
from fl_lightning.batch_norm.swapping import evaluating
from fl_lightning.callbacks import ClassifierBias, FedPer, FixBN, StatisticsSources
from fl_lightning.callbacks.fedex import held_out_losses
from tests.support.helpers import ArrayClient, blobs, client_batch, federated_run, small_cnn

pytestmark = [
    pytest.mark.first_steps,
    pytest.mark.filterwarnings("ignore:Found .* in eval mode at the start of training"),
]

STEPS, ROUNDS = 3, 3
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
EVALUATED = {"limit_val_batches": None, "num_sanity_val_steps": -1}
EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])


class NormEval(nn.Module):
    """As in detection code: BN layers of the body stay in eval mode."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 36, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    def train(self, mode=True):
        super().train(mode)
        self.body[1].eval()
        return self

    def forward(self, x):
        return self.head(self.body(x))


class Frozen(nn.Module):
    """A module around another one that overrides ``train`` too: the outer one decides."""

    def __init__(self):
        super().__init__()
        self.inner = NormEval()

    def train(self, mode=True):
        super().train(mode)
        for layer in batch_norm_layers(self).values():
            layer.eval()
        return self

    def forward(self, x):
        return self.inner(x)


class Within(nn.Sequential):
    """A model whose own class does not override ``train``."""

    def __init__(self):
        super().__init__(nn.Identity(), NormEval())


def by_an_attribute():
    """A model whose ``train`` is replaced on the object."""
    model = small_cnn()

    def train(mode=True):
        nn.Sequential.train(model, mode)
        model[1].eval()
        return model

    model.train = train
    return model


class Lora(nn.Linear):
    """A layer that merges its addition in eval mode, as loralib's."""

    def __init__(self, inputs, outputs, frozen=True, by_data=False):
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(not frozen)
        self.down = nn.Parameter(torch.randn(2, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, 2))
        self.merged, self.by_data = False, by_data

    def train(self, mode=True):
        nn.Linear.train(self, mode)
        if self.merged == mode:
            added = (self.up @ self.down) * (-1 if mode else 1)
            if self.by_data:
                self.weight.data = self.weight.data + added.data
            else:
                self.weight.data += added
            self.merged = not mode
        return self

    def forward(self, x):
        out = super().forward(x)
        return out if self.merged else out + x @ self.down.T @ self.up.T


def lora(**settings):
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 6), nn.ReLU(), Lora(6, 3, **settings))


def made(make):
    torch.manual_seed(0)
    return make().double()


def data():
    return blobs(num_clients=2, sizes=(40, 40), batch_size=8)


def by_hand(model, rounds=ROUNDS):
    """FedAvg in plain PyTorch, for two clients of equal size."""
    clients = data()
    for index in range(rounds):
        start, ends = {n: x.clone() for n, x in model.state_dict().items()}, []
        for client in (0, 1):
            model.load_state_dict(start)
            model.train()
            optimizer = SGD([x for x in model.parameters() if x.requires_grad])
            for step in range(STEPS):
                inputs, targets = client_batch(clients, client, index * STEPS + step)
                optimizer.zero_grad()
                cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            ends.append({n: x.clone() for n, x in model.state_dict().items()})
        model.load_state_dict({n: (ends[0][n] + ends[1][n]) / 2 for n in start})
    return model.state_dict()


def run(model, *callbacks, executor=SequentialExecutor, rounds=ROUNDS, trainer=EVALUATED):
    settings = {"client_optimizer": SGD, "local_steps": STEPS, "executor": executor()}
    return federated_run(*callbacks, data=data, rounds=rounds, model=model, trainer=trainer, **settings)


@EXECUTORS
@pytest.mark.parametrize("trainer", [{}, EVALUATED], ids=["without evaluations", "with evaluations"])
@pytest.mark.parametrize("make", [NormEval, Frozen, Within, by_an_attribute])
def test_norm_layers_that_a_model_wants_in_eval_mode_rest(make, executor, trainer):
    model = run(made(make), executor=executor, trainer=trainer).module.model
    for name, wanted in by_hand(made(make)).items():
        value = model.state_dict()[name]
        torch.testing.assert_close(value, wanted.to(value.dtype), rtol=1e-10, atol=1e-12, msg=name)
    resting = made(make)
    resting.train()
    assert [x.training for x in model.modules()] == [x.training for x in resting.modules()]


@EXECUTORS
@pytest.mark.parametrize("settings", [{}, {"by_data": True}, {"frozen": False}], ids=str)
def test_merged_weights_are_restored_after_each_evaluation(settings, executor):
    make = partial(lora, **settings)
    evaluated = run(made(make), executor=executor)
    for name, wanted in by_hand(made(make)).items():
        torch.testing.assert_close(evaluated.module.state_dict()[name], wanted, rtol=1e-10, atol=1e-12)
    never = run(made(make), executor=executor, trainer={})
    for name, wanted in never.module.state_dict().items():
        assert torch.equal(evaluated.module.state_dict()[name], wanted), name
    assert not evaluated.module.model[3].merged


@pytest.mark.parametrize("settings", [{}, {"by_data": True}], ids=str)
def test_an_evaluation_of_ours_restores_modes_and_weights(settings):
    model = made(partial(lora, **settings))
    nn.init.normal_(model[3].up)
    before, inputs = {n: x.clone() for n, x in model.state_dict().items()}, torch.ones(4, 72).double()
    wanted = model(inputs)
    with evaluating(model) as merged:
        assert list(merged) == ["3.weight"]
        assert model[3].merged
        torch.testing.assert_close(model(inputs), wanted)
    assert not model[3].merged
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    assert all(x.training for x in model.modules())


def test_validate_test_and_predict_leave_no_merged_weights():
    module = run(made(lora)).module
    before = {n: x.clone() for n, x in module.state_dict().items()}
    trainer, samples = module.trainer, DataLoader(data().server.dataset, batch_size=20)
    for command in (
        lambda: trainer.validate(module, datamodule=data(), verbose=False),
        lambda: trainer.test(module, datamodule=data(), verbose=False),
        lambda: trainer.predict(module, samples),
    ):
        command()
        assert not module.model[3].merged
        assert all(torch.equal(x, before[n]) for n, x in module.state_dict().items())


def test_a_checkpoint_of_an_evaluation_has_the_weights_of_training(tmp_path):
    saved = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=False)
    module = run(made(lora), saved, rounds=1).module
    (path,) = tmp_path.glob("*.ckpt")
    state = torch.load(path, weights_only=False)["state_dict"]
    assert all(torch.equal(state[name], x) for name, x in module.state_dict().items())


def test_a_personal_model_of_merged_layers_is_refused():
    line = (
        r"eval\(\) changes '3.weight' of the model Sequential, which would be evaluated without the other '3"
    )
    with pytest.raises(ConfigurationError, match=f"FedPer: {line}"):
        run(made(lora), FedPer())
    with pytest.raises(ConfigurationError, match=f"ClassifierBias: {line}"):
        run(made(lora), ClassifierBias(mean_of=2))


class Losses(FederatedCallback):
    def on_before_aggregate(self, trainer, pl_module, cohort):
        self.losses = held_out_losses(pl_module, cohort, [0, 1])


class Apart(Lora):
    train = nn.Linear.train


def test_a_clients_loss_is_that_of_its_own_merged_weights():
    losses = []
    for layer in (Lora, Apart):
        torch.manual_seed(0)
        seen, model = Losses(), nn.Sequential(nn.Flatten(), layer(72, 3))
        nn.init.normal_(model[1].up)
        run(model, seen)
        losses.append(seen.losses)
    torch.testing.assert_close(*losses, rtol=1e-10, atol=1e-12)


def test_statistics_sources_evaluate_merged_layers():
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 6), nn.BatchNorm1d(6), nn.ReLU(), Lora(6, 3)).double()
    assert run(model, StatisticsSources()).rows[ROUNDS]["val/accuracy"] > 0


def test_frozen_statistics_do_not_wake_a_layer_in_eval_mode():
    model = run(made(NormEval), FixBN(freeze_round=1)).module.model
    assert int(model.body[1].num_batches_tracked) == 0
    assert int(model.head[2].num_batches_tracked) == STEPS


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (NormEval, "averaged (1 layer), in eval mode (1)"),
        (Frozen, "averaged (0 layers), in eval mode (2)"),
        (lambda: small_cnn().eval(), "averaged (0 layers), in eval mode (2)"),
        (small_cnn, "averaged"),
    ],
)
def test_the_state_table_counts_norm_layers_by_mode(make, words, capsys):
    module = FederatedModule(make(), SGD, local_steps=1, executor=SequentialExecutor())
    sizes = ArrayClient(torch.randn(16, 2, 6, 6), torch.randint(3, (16,)), 8)
    trainer = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False}
    Run(module, FederatedDataModule([sizes], sizes), name="modes", max_epochs=1, **trainer).fit()
    lines = capsys.readouterr().out.splitlines()
    for label in ("BN running mean", "BN running variance"):
        assert [x for x in lines if x.startswith(label)] == [f"{label:<21}{words}"]
    (counter,) = [x for x in lines if x.startswith("BN batch counter")]
    assert counter.split(maxsplit=3)[3] == words.replace("averaged", "max")


class FrozenTeacher(nn.Module):
    """Overrides ``train()`` for a part other than its BN layers."""

    def __init__(self):
        super().__init__()
        self.net, self.teacher = small_cnn(), nn.Linear(2, 2).requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x):
        return self.net(x)


def test_layers_that_arrive_in_eval_mode_stay_there_beside_an_own_train():
    model = FrozenTeacher()
    for layer in batch_norm_layers(model).values():
        layer.eval()
    state = federated_run(model=model, rounds=2, data=blobs()).module.state_dict()
    counts = [value for name, value in state.items() if name.endswith("num_batches_tracked")]
    assert counts
    assert not any(map(bool, counts))
