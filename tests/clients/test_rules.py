"""Hooks of a LightningModule are called at their places of a round, or refused by name; nothing is ignored."""

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fl_lightning import ConfigurationError, FederatedCallback, FederatedDataModule, FederatedModule, Run
from fl_lightning.client_data.batches import BatchStack
from fl_lightning.execution.graphs import GraphExecutor
from fl_lightning.execution.sequential import SequentialExecutor
from fl_lightning.execution.vectorized import VectorizedExecutor
from tests.support.lightning_sites import FEATURES, KeepsLosses, Lit, Site, federated, sites

REFUSED = (
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_before_backward",
    "on_after_backward",
    "on_before_zero_grad",
    "on_before_optimizer_step",
)


@pytest.mark.parametrize("hook", REFUSED)
def test_a_hook_that_is_never_called_is_refused_by_name(hook):
    module = type("Own", (Lit,), {hook: lambda self, *args: None})()
    with pytest.raises(
        ConfigurationError, match=rf"^model: Own.{hook} would never be called, as an executor computes"
    ):
        FederatedModule(module, local_steps=1)


class Manual(Lit):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def returning(value):
    return type("Returns", (Lit,), {"training_step": lambda self, batch, batch_idx: value})


def optimizing(make):
    return type("Optimizes", (Lit,), {"configure_optimizers": make})


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def plateau(module):
    optimizer = sgd(module)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_loss"}


def hooked(module):
    optimizer = sgd(module)
    optimizer.register_step_pre_hook(lambda *given: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Manual, "model: Manual sets automatic_optimization = False; return the loss from training_step"),
        (returning(None), "Returns.training_step returns None; return the loss"),
        (returning({"other": 1}), "Returns.training_step returns None; return the loss"),
        (returning("loss"), "Returns.training_step returns str; return the loss"),
        (returning(torch.ones(2)), "Returns.training_step returns a tensor [2]; return the loss"),
        (optimizing(lambda self: None), "Optimizes.configure_optimizers: Unknown configuration"),
        (
            optimizing(lambda self: [sgd(self), sgd(self)]),
            "Optimizes.configure_optimizers: 2 optimizers; a client has one",
        ),
        (optimizing(plateau), "Optimizes.configure_optimizers: ReduceLROnPlateau reads metrics"),
        (optimizing(lambda self: torch.optim.LBFGS(self.parameters())), "client_optimizer"),
        (
            optimizing(lambda self: torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)),
            "Optimizes.configure_optimizers: a parameter [3] of the optimizer would not be trained, as it belongs to no part",
        ),
        (
            optimizing(lambda self: torch.optim.SGD(self.requires_grad_(False).parameters(), lr=0.1)),
            "model: the optimizer of Optimizes has no trainable parameter",
        ),
        (
            optimizing(hooked),
            "Optimizes.configure_optimizers: hooks of the optimizer's step that come before it would be called after",
        ),
    ],
)
def test_what_a_round_does_not_support_is_refused(make, message):
    with pytest.raises(ConfigurationError) as error:
        federated(make(), rounds=1)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "setting", ["client_optimizer", "loss", "task", "metrics", "parameter_groups", "client_lr_schedule"]
)
def test_a_setting_that_the_module_decides_is_refused(setting):
    with pytest.raises(
        ConfigurationError, match=f"^{setting}: Lit has a training_step and a configure_optimizers"
    ):
        FederatedModule(Lit(), local_steps=1, **{setting: {"x": 1}})


@pytest.mark.parametrize(
    ("used", "message"),
    [
        (lambda self: self.lr_schedulers(), "self.trainer.lr_scheduler_configs: belong to the server"),
        (
            lambda self: self.trainer.train_dataloader,
            "self.trainer.train_dataloader: has no batches of a client",
        ),
        (
            lambda self: len(self.trainer.datamodule.train_dataloader()),
            "self.trainer.datamodule.train_dataloader: has no batches of a client",
        ),
    ],
)
def test_parts_of_the_server_are_refused_in_a_step(used, message):
    class Uses(Lit):
        def training_step(self, batch, batch_idx):
            used(self)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ConfigurationError, match=message):
        federated(Uses(), rounds=1)


class Recording(Lit):
    """Writes down each call of a hook."""

    def __init__(self):
        super().__init__()
        self.calls = []


for _hook in (
    "prepare_data", "setup", "configure_model", "on_fit_start", "on_train_start", "on_train_epoch_start",
    "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end", "on_validation_start",
    "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end",
    "on_validation_end", "on_train_end", "on_fit_end", "teardown",
):  # fmt: skip

    def _recorded(self, *args, hook=_hook, **kwargs):
        self.calls.append(hook)
        return getattr(super(Recording, self), hook)(*args, **kwargs)

    setattr(Recording, _hook, _recorded)


def test_hooks_are_called_as_often_as_their_places_come():
    module = Recording()
    federated(module, rounds=2, check_first_steps=False, trainer={"num_sanity_val_steps": 0})
    calls = module.calls
    step = ["on_train_batch_start", "on_train_batch_end"]
    steps = (step + step) * 2  # of a client after the other, as lists are put together after the round
    batches = ["on_validation_batch_start", "on_validation_batch_end"] * 3
    validation = [
        "on_validation_start",
        "on_validation_epoch_start",
        *batches,
        "on_validation_epoch_end",
        "on_validation_end",
    ]
    round_of_two_steps = ["on_train_epoch_start", *steps, *validation, "on_train_epoch_end"]
    start = ["prepare_data", "setup", "configure_model", "on_fit_start", "on_train_start"]
    assert calls == [
        *start,
        *round_of_two_steps,
        *round_of_two_steps,
        "on_train_end",
        "on_fit_end",
        "teardown",
    ]


def test_batch_hooks_see_the_clients_state_and_log():
    class Weights(Lit):
        def on_train_batch_start(self, batch, batch_idx):
            self.before = self.net[0].weight.detach().clone()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.log("moved", float(not torch.equal(self.net[0].weight, self.before)))
            self.log("same_loss", outputs["loss"])
            self.net[1].running_mean.fill_(3.0)

    run = federated(Weights(), rounds=1)
    assert run.metrics["moved"] == 1.0
    assert run.metrics["same_loss"] == pytest.approx(run.metrics["train_loss"], abs=1e-12)
    assert torch.equal(run.model.net[1].running_mean, torch.full((5,), 3.0, dtype=torch.float64))


@pytest.mark.first_steps
def test_a_hook_may_change_what_a_client_trains():
    class Clips(Lit):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            with torch.no_grad():
                self.net[0].weight.clamp_(-0.01, 0.01)

    assert federated(Clips(), rounds=1).model.net[0].weight.detach().abs().max() < 0.0101


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda module: module.net[0].requires_grad_(False), "net.0"),
        (lambda module: module.net[1].eval(), "BatchNorm1d"),
    ],
)
def test_freezing_from_some_round_on_is_refused(change, named):
    class Freezes(Lit):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                change(self)

    with pytest.raises(ConfigurationError, match=rf"Freezes.on_train_epoch_start freezes or trains '{named}"):
        federated(Freezes(), rounds=2)
    federated(Freezes(), rounds=1)


def test_values_logged_before_the_first_round_are_in_its_row():
    class Early(Lit):
        def on_train_start(self):
            self.log("early", 3.0)

    class Rowwise(FederatedCallback):
        rows = ()

        def on_round_start(self, trainer, pl_module, cohort):
            self.rows = (*self.rows, dict(pl_module.metrics))

    seen = Rowwise()
    run = federated(Early(), seen, rounds=2)
    assert seen.rows[1]["early"] == 3.0
    assert "early" not in run.metrics


def test_minus_one_of_on_train_batch_start_is_refused():
    module = type("Skips", (Lit,), {"on_train_batch_start": lambda self, batch, batch_idx: -1})()
    with pytest.raises(
        ConfigurationError, match=r"cannot skip the rest of a round by -1; use model.local_steps"
    ):
        federated(module, rounds=1)


@pytest.mark.filterwarnings("ignore:You have overridden")  # Lightning warns, too, beside a data module
def test_batches_pass_the_modules_transfer_hooks():
    class Scales(Lit):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch[0] * 2, batch[1]

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] + 1, batch[1]

        def training_step(self, batch, batch_idx):
            self.log("inputs", batch[0].mean())
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.log("val_inputs", batch[0].mean())

    run = federated(Scales(), data=sites(1), rounds=1)
    site, server = Site(0), Site(99)
    site.setup("fit")
    server.setup("fit")
    assert run.metrics["inputs"] == pytest.approx(
        float(2 * site.samples.tensors[0].double().mean() + 1), abs=1e-6
    )
    assert run.metrics["val_inputs"] == pytest.approx(
        float(2 * server.held_out.tensors[0].double().mean() + 1), abs=1e-6
    )


class Augments(Lit):
    """Draws random numbers on the way to the device, once for each batch of a client."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if not self.trainer.training:
            return batch
        assert batch[0].shape == (8, FEATURES)
        return batch[0] + torch.randn_like(batch[0]) + np.random.rand(), batch[1]


@pytest.mark.filterwarnings("ignore:You have overridden")
@pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
def test_random_numbers_of_a_transfer_hook_depend_on_client_and_step_only(executor):
    losses = []
    for drawn in (1, 2):
        torch.manual_seed(0)
        module = Augments(optimizer="plain")
        torch.manual_seed(drawn)
        np.random.seed(drawn)
        losses.append(federated(module, executor=executor()).metrics["train_loss"])
    assert losses[0] == losses[1]


@pytest.mark.filterwarnings("ignore:You have overridden")
def test_a_transfer_hook_gets_the_batch_of_one_client():
    class Stacks(FederatedDataModule):
        def cohort_batch(self, client_ids, steps):
            return BatchStack(stack=super().cohort_batch(client_ids, steps).stack())

    data = Stacks([Site(0), Site(1)], server=Site(99))
    run = federated(Augments(optimizer="plain"), data=data, rounds=1, executor=VectorizedExecutor())
    assert "train_loss" in run.metrics


def test_the_trainer_counts_local_steps():
    class Counts(Lit):
        def __init__(self):
            super().__init__()
            self.counts = []

        def training_step(self, batch, batch_idx):
            trainer = self.trainer
            assert trainer.num_training_batches == 3
            assert trainer.estimated_stepping_batches == 6
            assert trainer.is_last_batch == (batch_idx == 2)
            self.counts.append((self.current_epoch, batch_idx, self.global_step))
            return super().training_step(batch, batch_idx)

    module = Counts()
    federated(module, data=sites(1), rounds=2, local_steps=3, check_first_steps=False)
    assert module.counts == [(r, k, 3 * r + k) for r in range(2) for k in range(3)]


def test_counts_are_known_from_setup_on():
    class Counts(Lit):
        def __init__(self):
            super().__init__()
            self.counts = []

        def setup(self, stage):
            self.counts.append(self.trainer.estimated_stepping_batches)

        configure_model = on_fit_start = lambda self: Counts.setup(self, "fit")

    module = Counts()
    federated(module, rounds=3)
    assert module.counts == [6, 6, 6]
    federated(module, rounds=2, local_steps=None, budget_epochs=5, local_epochs=1)
    assert module.counts[3:] == [10, 10, 10]


@pytest.mark.first_steps
def test_between_rounds_the_trainer_counts_all_local_steps_before():
    class Counts(Lit):
        def __init__(self):
            super().__init__()
            self.counts = []

        def on_train_epoch_start(self):
            self.counts.append(self.global_step)

        on_validation_epoch_end = on_train_epoch_end = on_train_end = on_train_epoch_start

    module = Counts()
    federated(module, rounds=2, local_steps=3, trainer={"num_sanity_val_steps": 0})
    assert module.counts == [0, 3, 3, 3, 6, 6, 6]


def test_a_module_may_end_the_run():
    class Ends(Lit):
        def on_train_epoch_end(self):
            self.trainer.should_stop = self.current_epoch == 1

    assert federated(Ends(), rounds=9).fitted.current_epoch == 2


def test_callbacks_of_the_module_are_used():
    stopping = L.pytorch.callbacks.EarlyStopping("val_loss", patience=1, min_delta=100.0)
    module = type("Brings", (Lit,), {"configure_callbacks": lambda self: [stopping]})()
    assert federated(module, rounds=9).fitted.current_epoch == 2


def test_after_a_run_the_module_is_lightnings_again():
    module = Lit()
    federated(module, rounds=1)
    assert "log" not in vars(module)
    assert module._trainer is None


@pytest.mark.first_steps
def test_tensors_of_steps_may_be_kept_one_client_after_the_other():
    run = federated(KeepsLosses(), rounds=2)
    assert run.metrics["mean_of_losses"] == pytest.approx(run.metrics["train_loss"], abs=1e-12)
    words = (
        "a step of KeepsLosses appends to 'losses', which all clients share under VectorizedExecutor; use S"
    )
    with pytest.raises(ConfigurationError, match=words):
        federated(KeepsLosses(), rounds=2, executor=VectorizedExecutor())


@pytest.mark.first_steps
def test_a_chosen_executor_that_cannot_compute_several_clients_is_replaced(monkeypatch, capsys):
    from fl_lightning.execution.choice import ExecutorChoice

    choose = lambda module, clients: ExecutorChoice(VectorizedExecutor(where_possible=True), "as on a GPU")
    monkeypatch.setattr("fl_lightning.round.module.choose_executor", choose)
    run = federated(KeepsLosses(), rounds=2)
    assert type(run.executor).__name__ == "SequentialExecutor"
    assert (
        "clients one after the other: model: round 1: a step of KeepsLosses appends to 'losses'"
        in capsys.readouterr().out
    )
    assert type(federated(Lit(), rounds=1).executor).__name__ == "VectorizedExecutor"


def test_a_graph_of_a_step_with_hooks_is_refused():
    class Hooked(Lit):
        def on_train_batch_start(self, batch, batch_idx):
            pass

    words = "model.executor: GraphExecutor cannot compute on_train_batch_start of Hooked"
    with pytest.raises(ConfigurationError, match=words):
        federated(Hooked(), rounds=1, executor=GraphExecutor())


def test_a_compiled_module_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"model: torch.compile hides the hooks of Lit; give the module itself"
    ):
        FederatedModule(torch.compile(Lit()), local_steps=1)


def test_data_modules_know_the_trainer(tmp_path):
    class Asks(Site):
        def setup(self, stage):
            assert self.trainer.max_epochs == 1
            super().setup(stage)

        def train_dataloader(self):
            assert self.trainer.max_epochs == 1
            return super().train_dataloader()

    # ranks share the data, which are set up before Lightning's fit
    data, ranks = FederatedDataModule([Asks(0)], server=Asks(9)), {"devices": 2, "strategy": "cohort"}
    Run(FederatedModule(Lit(), local_steps=1), data, run_root=tmp_path, max_epochs=1, **ranks).fit()
    federated(Lit(), data=FederatedDataModule([Asks(0)], server=Asks(9)), rounds=1)


@pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
def test_a_loss_may_have_one_element(executor):
    class Shaped(Lit):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx)[None]

    torch.manual_seed(0)
    plain = federated(Lit(), rounds=1, executor=executor())
    torch.manual_seed(0)
    shaped = federated(Shaped(), rounds=1, executor=executor())
    assert shaped.metrics["train/loss"] == plain.metrics["train/loss"]


class Several(Site):
    """A site with two loaders."""

    def __init__(self, split):
        super().__init__(0)
        own = getattr(self, f"{split}_dataloader")
        setattr(self, f"{split}_dataloader", lambda: {"a": own(), "b": own()})


@pytest.mark.parametrize("split", ["train", "val"])
def test_several_loaders_of_a_client_are_refused(split):
    data = FederatedDataModule([Several(split)])
    with pytest.raises(
        ConfigurationError,
        match=rf"clients\[0\].{split}_dataloader\(\) returns a dict of loaders; return one",
    ):
        federated(Lit(), data=data, rounds=1)


class SetsUpByStage(Site):
    """A site that loads the test data for tests only."""

    def setup(self, stage):
        super().setup(stage)
        self.tested = self.held_out if stage == "test" else None

    def test_dataloader(self):
        return DataLoader(self.tested)


@pytest.mark.parametrize("server", [True, False])
def test_test_data_may_be_set_up_for_tests_only(server, tmp_path):
    data = FederatedDataModule([SetsUpByStage(0)], server=SetsUpByStage(1) if server else None)
    run = Run(FederatedModule(Lit(), local_steps=1), data, run_root=tmp_path, max_epochs=1, accelerator="cpu")
    assert "test_loss" in run.fit()


@pytest.mark.first_steps
def test_an_attribute_may_be_made_at_the_start_of_a_round():
    class Annealed(Lit):
        def on_train_epoch_start(self):
            self.weight, self.losses = 1 / (1 + self.current_epoch), []

        def training_step(self, batch, batch_idx):
            self.losses.append(self.weight)
            return self.weight * super().training_step(batch, batch_idx)

        def on_train_epoch_end(self):
            self.log("count", float(len(self.losses)))
            self.log("weight", self.losses[-1])

    run = federated(Annealed(), rounds=2)
    assert (run.metrics["count"], run.metrics["weight"]) == (4.0, 0.5)


def test_a_test_without_a_test_step_is_refused(tmp_path):
    class NoTest(Lit):
        test_step = L.LightningModule.test_step

    data = sites(dtype=torch.float32)
    run = Run(
        FederatedModule(NoTest(), local_steps=1), data, run_root=tmp_path, max_epochs=1, accelerator="cpu"
    )
    assert "val_loss" in run.fit()
    with pytest.raises(ConfigurationError, match=r"^model: NoTest has no test_step to evaluate; write"):
        run.module.trainer.test(run.module, datamodule=data)
