"""Loaders that end early, late, or differently in each epoch never change a result silently."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from fl_lightning import ConfigurationError, FederatedCallback, FederatedDataModule, FederatedModule
from fl_lightning.callbacks import ClientEvaluation
from fl_lightning.execution.sequential import SequentialExecutor
from tests.support.helpers import SGD, ArrayClient, federated_run, fit, small_cnn
from tests.support.lightning_sites import Lit, federated

IMAGES = torch.zeros(8, 2, 6, 6, dtype=torch.float64)
LABELS = torch.arange(8) % 3


class Ending(Dataset):
    """Thirty samples, of which one raises StopIteration, as ``next`` of an iterator that ends does."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return IMAGES[index % 8], LABELS[index % 8] if index != 5 else next(iter(()))


def site(**loaders):
    """Return a data module whose class defines the given loaders."""
    functions = {f"{name}_dataloader": lambda self, loader=loader: loader for name, loader in loaders.items()}
    return type("Site", (L.LightningDataModule,), functions)()


def good():
    return ArrayClient(IMAGES, LABELS, 4)


def start(clients, server=None, **settings):
    module = FederatedModule(small_cnn(), SGD, **{"local_steps": 2, **settings})
    fit(module, FederatedDataModule(clients, server=server), 2)


def collate(batch):
    return next(iter(()))


class Renamed(DataLoader):
    """A loader of a user's own class."""


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Ending(), 4),
        DataLoader(TensorDataset(IMAGES, LABELS), 4, collate_fn=collate),
        Renamed(Ending(), 4),
        DataLoader(Ending(), 4, num_workers=1),
    ],
    ids=["data set", "collate_fn", "own class", "worker"],
)
def test_stop_iteration_in_data_of_a_client_is_an_error_with_client_and_step(loader):
    with pytest.raises((RuntimeError, ConfigurationError), match="StopIteration") as error:
        start([good(), site(train=loader)])
    assert error.value.__notes__[0] == "drawing the batch of client 1"
    assert error.value.__notes__[1].startswith("round 1, local step ")


class StopsInStep(nn.Module):
    """A network whose forward pass raises StopIteration after some passes."""

    def __init__(self, passes):
        super().__init__()
        self.network, self.left = small_cnn(), iter(range(passes))

    def forward(self, inputs):
        next(self.left)
        return self.network(inputs)


def test_stop_iteration_in_a_forward_pass_is_an_error_with_client_and_step():
    module = FederatedModule(
        StopsInStep(3), SGD, local_steps=2, check_first_steps=False, executor=SequentialExecutor()
    )
    with pytest.raises(RuntimeError, match=r"raised in test_ends_of_loaders.py, line \d+, where") as error:
        fit(module, FederatedDataModule([good(), good()]), 2)
    assert error.value.__notes__[:2] == ["computing client 1", "round 1, local step 2"]


@pytest.mark.parametrize("hook", ["on_round_start", "on_local_step_end", "on_round_end"])
def test_stop_iteration_in_a_method_is_an_error_with_hook_and_round(hook):
    def stop(self, *_):
        next(iter(()))

    method = type("Stops", (FederatedCallback,), {hook: stop})()
    with pytest.raises(RuntimeError, match="StopIteration was raised in test_ends") as error:
        federated_run(method, check_first_steps=False)
    assert error.value.__notes__ == [f"Stops.{hook}, round 1"]


def test_stop_iteration_in_the_server_optimizer_is_an_error():
    class Stops(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            if closure is not None:  # a communication round, not a check
                next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration was raised in test_ends"):
        federated_run(server_optimizer=lambda parameters: Stops(parameters, lr=1.0))


HOOKS = [
    "training_step",
    "validation_step",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_epoch_end",
]


@pytest.mark.parametrize("hook", HOOKS)
def test_stop_iteration_in_a_lightning_module_is_an_error_with_the_hook(hook):
    module = type("Stops", (Lit,), {hook: lambda self, *_: next(iter(()))})()
    with pytest.raises(RuntimeError, match="StopIteration was raised in test_ends") as error:
        federated(module, local_steps=1, check_first_steps=False, trainer={"precision": "32-true"})
    assert any(hook in note or "local step 1" in note for note in error.value.__notes__)


class Short(IterableDataset):
    """A stream that gives another number of samples than its length."""

    def __init__(self, samples, length):
        self.samples, self.length = samples, length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter([(IMAGES[i % 8], LABELS[i % 8]) for i in range(self.samples)])


class Changing(Sampler):
    """A batch sampler that gives another number of batches in its second epoch."""

    def __init__(self, later):
        self.later, self.epoch = later, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.later if self.epoch else 2

    def __iter__(self):
        return iter([[0, 1, 2, 3], [4, 5, 6, 7], [0, 2, 4, 6]][: len(self)])


class Lengthy(list):
    """A list of batches that says another length."""

    def __init__(self, batches, length):
        super().__init__(batches)
        self.length = length

    def __len__(self):
        return self.length


SAMPLES = TensorDataset(IMAGES, LABELS)
BATCH = IMAGES[:4], LABELS[:4]
WRONG = {
    "fewer samples of a stream": (
        DataLoader(Short(4, 8), 4),
        "gives 1 batches in epoch 1, but its length is 2",
    ),
    "more samples of a stream": (DataLoader(Short(9, 8), 4), "gives 2 batches and more in epoch 1"),
    "workers that all read all": (DataLoader(Short(8, 8), 4, num_workers=2), "gives 2 batches and more"),
    "fewer batches of a sampler": (
        DataLoader(SAMPLES, batch_sampler=Changing(1)),
        "1 batches in epoch 2, but its length is 2",
    ),
    "more batches of a sampler": (
        DataLoader(SAMPLES, batch_sampler=Changing(3)),
        "2 batches and more in epoch 2",
    ),
    "fewer batches, by a worker": (
        DataLoader(SAMPLES, batch_sampler=Changing(1), num_workers=1),
        "1 batches in epoch 2",
    ),
    "more batches, by a worker": (
        DataLoader(SAMPLES, batch_sampler=Changing(3), num_workers=1),
        "2 batches and more in epoch 2",
    ),
    "fewer in a list": (Lengthy([BATCH], 2), "gives 1 batches in epoch 1"),
    "more in a list": (Lengthy([BATCH] * 3, 2), "gives 2 batches and more in epoch 1"),
}


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")  # torch says it beside our error
@pytest.mark.parametrize("kind", WRONG)
def test_a_client_loader_whose_length_is_not_the_number_of_its_batches_is_refused(kind):
    loader, message = WRONG[kind]
    with pytest.raises(ConfigurationError, match=rf"clients\[1\]\.train_dataloader\(\) .*{message}"):
        start([good(), site(train=loader)])


def test_an_endless_loader_is_refused_instead_of_read_forever():
    class Endless(Sampler):
        def __len__(self):
            return 8

        def __iter__(self):
            while True:
                yield 0

    for loader in (
        DataLoader(SAMPLES, batch_size=None, sampler=Endless()),
        DataLoader(SAMPLES, 4, sampler=Endless()),
    ):
        with pytest.raises(ConfigurationError, match="batches and more in epoch 1"):
            FederatedDataModule([site(train=loader)]).num_examples(0)


EVALUATIONS = {
    "server's data set": (Ending(), 4, ()),
    "server's collate_fn": (SAMPLES, 4, (collate,)),
    "server's stream": (Short(4, 8), 4, ()),
}


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__`")
@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")
@pytest.mark.parametrize("when", ["fit", "validate", "test"])
@pytest.mark.parametrize("kind", EVALUATIONS)
def test_an_evaluation_that_ends_early_is_an_error(kind, when):
    samples, size, functions = EVALUATIONS[kind]
    loader = DataLoader(samples, size, collate_fn=functions[0] if functions else None)
    module = FederatedModule(small_cnn(), SGD, local_steps=1)
    data = FederatedDataModule([good()], site(**{"test" if when == "test" else "val": loader}))

    def run():
        trainer = fit(module, data, 1, limit_val_batches=1.0 if when == "fit" else 0)
        trainer.limit_val_batches = 1.0
        (trainer.test if when == "test" else trainer.validate)(module, data, verbose=False)

    with pytest.raises(
        ConfigurationError, match=r"evaluation data gives [01] batches, but its length is [28]"
    ):
        run()


def test_predictions_that_end_early_are_an_error():
    data = FederatedDataModule([good()], site(test=DataLoader(Ending(), 4)))
    module = FederatedModule(small_cnn(), SGD, local_steps=1)
    trainer = fit(module, data, 1)
    with pytest.raises(ConfigurationError, match="evaluation data gives 1 batches, but its length is 8"):
        trainer.predict(module, data)


def test_a_clients_own_evaluation_that_ends_early_is_an_error():
    client = site(train=DataLoader(SAMPLES, 4), val=DataLoader(Ending(), 4))
    with pytest.raises(ConfigurationError, match="evaluation data gives 1 batches"):
        federated_run(
            ClientEvaluation(),
            data=FederatedDataModule([client], server=good()),
            trainer={"limit_val_batches": 1.0},
        )


def test_limits_of_the_trainer_are_no_early_end():
    server = site(val=DataLoader(SAMPLES, 2), test=DataLoader(SAMPLES, 2))
    module, data = FederatedModule(small_cnn(), SGD, local_steps=1), FederatedDataModule([good()], server)
    trainer = fit(module, data, 2, limit_val_batches=1, limit_test_batches=2, limit_predict_batches=3)
    trainer.test(module, data, verbose=False)
    assert len(trainer.predict(module, data)) == 3


class EndsLater(TensorDataset):
    """Samples, of which one raises StopIteration once the data were read twice."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index) if self.reads <= 16 else next(iter(()))


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_later_evaluation_that_ends_early_is_an_error(split):
    module = FederatedModule(small_cnn(), SGD, local_steps=1)
    loader = DataLoader(EndsLater(IMAGES, LABELS), 4)
    data = FederatedDataModule([good()], site(**{split: loader}))
    trainer = fit(module, data, 1)
    evaluate = trainer.test if split == "test" else trainer.validate
    trainer.limit_val_batches = 1.0
    for _ in range(2):
        evaluate(module, data, verbose=False)
    with pytest.raises(ConfigurationError, match="evaluation data gives 0 batches, but its length is 2"):
        evaluate(module, data, verbose=False)


def test_the_evaluation_of_a_later_round_that_ends_early_is_an_error():
    module = FederatedModule(small_cnn(), SGD, local_steps=1)
    data = FederatedDataModule([good()], site(val=DataLoader(EndsLater(IMAGES, LABELS), 4)))
    with pytest.raises(ConfigurationError, match=r"evaluation data gives [01] batches"):
        fit(module, data, 4, limit_val_batches=1.0)
