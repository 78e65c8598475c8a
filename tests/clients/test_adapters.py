"""LoRA adapters of peft in a ViT: what is trained, sent, kept by clients and saved."""

import warnings
from copy import deepcopy

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from fl_lightning import ConfigurationError, FederatedDataModule, FederatedModule, Run, callbacks
from fl_lightning.execution.sequential import SequentialExecutor
from fl_lightning.execution.vectorized import VectorizedExecutor
from fl_lightning.experiments.run_directory.checkpoints import RoundCheckpoint
from fl_lightning.models.weights import load_weights
from tests.support.helpers import SaveRounds, States, distance
from tests.support.lightning_sites import TRAINER, Site, federated
from tests.support.outcomes import assert_same
from tests.support.pages import PAGES, blocks

peft = pytest.importorskip("peft")
timm = pytest.importorskip("timm")

pytestmark = [
    pytest.mark.first_steps,
    # vmap computes attention of float64 on a CPU client by client
    pytest.mark.filterwarnings("ignore:.*There is a performance drop because:UserWarning"),
]

CLASSES = 3
EXECUTORS = [SequentialExecutor(), VectorizedExecutor()]
NORMS = ["net.base_model.model.blocks.*.norm1", "net.base_model.model.blocks.*.norm2"]


class ImageSite(Site):
    """A site with random images."""

    def setup(self, stage):
        drawn = torch.Generator().manual_seed(self.seed)
        images = torch.randn(self.train + 7, 3, 8, 8, generator=drawn).to(self.dtype)
        targets = torch.randint(CLASSES, (self.train + 7,), generator=drawn)
        self.samples = TensorDataset(images[: self.train], targets[: self.train])
        self.held_out = TensorDataset(images[self.train :], targets[self.train :])


class Adapted(L.LightningModule):
    """A ViT of timm with random weights and LoRA adapters. The checkpoints have no frozen weights if ``partial``."""

    targets, head, norm = ("qkv", "attn.proj"), "head", "norm"

    def __init__(self, seed=0, partial=False, norms=False, rank=2):
        super().__init__()
        self.save_hyperparameters(ignore="seed")
        self.strict_loading = not partial
        torch.manual_seed(seed)
        lora = peft.LoraConfig(r=rank, target_modules=[*self.targets], modules_to_save=[self.head])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # of peft
            self.net = peft.get_peft_model(self.network(), lora)
        if norms:
            for name, parameter in self.net.named_parameters():
                if self.norm in name:
                    parameter.requires_grad_(True)

    def network(self):
        return timm.models.vision_transformer.VisionTransformer(
            img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=CLASSES
        )

    def scores(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self.scores(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        scores = self.scores(batch[0])
        self.log("val_loss", cross_entropy(scores, batch[1]))
        self.log("val_acc", (scores.argmax(1) == batch[1]).double().mean())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", cross_entropy(self.scores(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.3, momentum=0.9)

    def state_dict(self):
        state = super().state_dict()
        left_out = frozen_names(self) if self.hparams.partial else []
        return {name: x for name, x in state.items() if name not in left_out}


class AdaptedTransformers(Adapted):
    """A ViT of transformers."""

    targets, head, norm = ("q_proj", "v_proj"), "classifier", "layernorm"

    def network(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=8,
            patch_size=4,
            num_labels=CLASSES,
            initializer_range=0.3,
        )
        return transformers.ViTForImageClassification(config)

    def scores(self, images):
        return self.net(images).logits


class WithBatchNorm(Adapted):
    """A ViT after a BN layer, whose statistics are buffers that clients send."""

    def network(self):
        vit = super().network()
        vit.patch_embed.norm = nn.Sequential(Turned(), nn.BatchNorm1d(16), Turned())
        return vit


class Turned(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


MODULES = [Adapted, AdaptedTransformers, WithBatchNorm]


def images(count=2, **settings):
    return FederatedDataModule([ImageSite(seed, **settings) for seed in range(count)], server=ImageSite(99))


def trained_names(module):
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def frozen_names(module):
    return [name for name, parameter in module.named_parameters() if not parameter.requires_grad]


def copies(module):
    return {
        name: x.detach().clone().double() if x.is_floating_point() else x.clone()
        for name, x in nn.Module.state_dict(module).items()
    }


def by_hand(module, rounds, clients=2, local=()):
    """Train copies of a module, and average their trained parameters and float buffers.

    A client keeps the tensors that are named in ``local``. Return the server's state.
    """
    server, kept = deepcopy(module).double(), {}
    names = [*trained_names(server), *(n for n, x in server.named_buffers() if x.is_floating_point())]
    for _ in range(rounds):
        sent = []
        for number in range(clients):
            client, site = deepcopy(server), ImageSite(number, dtype=torch.float64)
            client.load_state_dict(kept.get(number, {}), strict=False)
            site.setup("fit")
            optimizer = torch.optim.SGD(
                [p for p in client.parameters() if p.requires_grad], lr=0.3, momentum=0.9
            )
            for inputs, targets in site.train_dataloader():
                optimizer.zero_grad()
                cross_entropy(client.scores(inputs), targets).backward()
                optimizer.step()
            sent.append(copies(client))
            kept[number] = {name: sent[-1][name] for name in local}
        mean = {name: sum(state[name] for state in sent) / clients for name in names}
        server.load_state_dict(mean, strict=False)
    return copies(server)


@pytest.mark.parametrize("executor", EXECUTORS, ids=["sequential", "vectorized"])
@pytest.mark.parametrize("kind", MODULES)
def test_fedavg_is_the_mean_of_the_clients_adapters(kind, executor):
    module = kind()
    expected, names = by_hand(module, rounds=3), trained_names(module)
    start = copies(module)
    run = federated(module, data=images(), rounds=3, executor=executor)
    found = {name: x for name, x in copies(run.model).items() if x.is_floating_point()}
    assert distance(found, expected) < 1e-12
    assert all("lora" in name or "modules_to_save" in name for name in names)
    assert min(float((found[name] - start[name]).abs().max()) for name in names if "bias" not in name) > 1e-3
    assert len(frozen_names(module)) > len(names)
    assert all(torch.equal(found[name], start[name]) for name in frozen_names(module))


def with_adapter(config):
    class Other(Adapted):
        def __init__(self):
            L.LightningModule.__init__(self)
            self.save_hyperparameters({"partial": False})
            torch.manual_seed(0)
            self.net = peft.get_peft_model(self.network(), config)

    return Other()


OTHERS = {
    "dropout": lambda: peft.LoraConfig(
        r=2, target_modules=["qkv"], lora_dropout=0.3, modules_to_save=["head"]
    ),
    "DoRA": lambda: peft.LoraConfig(r=2, target_modules=["qkv"], use_dora=True, modules_to_save=["head"]),
    "IA3": lambda: peft.IA3Config(target_modules=["qkv", "fc2"], feedforward_modules=["fc2"]),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_executors_agree_on_other_adapters(make):
    runs = [federated(with_adapter(make()), data=images(), rounds=2, executor=each) for each in EXECUTORS]
    assert distance(*[copies(run.model) for run in runs]) < 1e-12
    assert distance(copies(runs[0].model), copies(with_adapter(make()))) > 1e-4
    trained = sum(p.numel() for p in runs[0].model.parameters() if p.requires_grad)
    assert runs[0].metrics["comm/upload_bytes"] == 2 * 8 * trained


def test_adapters_with_random_numbers_of_their_own_need_the_sequential_executor():
    module = with_adapter(peft.LoHaConfig(r=2, target_modules=["qkv"]))
    with pytest.raises(ConfigurationError, match="draws random numbers, which VectorizedExecutor"):
        federated(deepcopy(module), data=images(), rounds=1, executor=VectorizedExecutor())
    federated(module, data=images(), rounds=1)


@pytest.mark.parametrize("kind", MODULES)
def test_only_trained_parameters_and_float_buffers_are_counted(kind):
    module = kind()
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    buffers = sum(x.numel() for x in module.buffers() if x.is_floating_point())
    run = federated(module, data=images(3), rounds=2)
    expected = 3 * 8 * (trained + buffers)
    assert run.metrics["comm/upload_bytes"] == run.metrics["comm/download_bytes"] == expected


def test_what_clients_hold_is_what_is_trained():
    """The rows of the clients are the adapters and the head, not the frozen weights."""
    module = Adapted()
    run = federated(module, data=images(), rounds=1)
    rows = run._cohort.params.blocks
    assert sum(block.shape[1] for block in rows.values()) == sum(
        p.numel() for p in module.parameters() if p.requires_grad
    )


@pytest.mark.parametrize("executor", EXECUTORS, ids=["sequential", "vectorized"])
def test_norms_stay_at_the_clients(executor):
    module = Adapted(norms=True)
    last = "net.base_model.model.norm"
    local = [name for name in trained_names(module) if "norm" in name]
    assert len(local) == 2 * (2 * 2 + 1)
    expected = by_hand(module, rounds=3, local=local)
    plain = deepcopy(module)
    method = callbacks.FedPer(head=[*NORMS, last])
    run = federated(module, method, data=images(), rounds=3, executor=executor)
    assert distance(copies(run.model), expected) < 1e-12
    sent = sum(p.numel() for name, p in module.named_parameters() if p.requires_grad and name not in local)
    assert run.metrics["comm/upload_bytes"] == 2 * 8 * sent
    assert {name: row.numel() for name, row in method.memory[0].items()} == {
        f"weights@{part}": size for part, size in zip([*NORMS, last], [64, 64, 32], strict=True)
    }
    averaged = federated(plain, data=images(), rounds=3)
    assert distance(copies(averaged.model), expected) > 1e-4
    assert averaged.metrics["comm/upload_bytes"] == 2 * 8 * (sent + 160)


def test_fedbn_keeps_batch_norm_but_no_layer_norm():
    module = WithBatchNorm(norms=True)
    method = callbacks.FedBN()
    federated(module, method, data=images(), rounds=1)
    assert {name: row.numel() for name, row in method.memory[0].items()} == {
        "batch_norm": 32, "mean": 16, "var": 16, "counter": 1,
    }  # fmt: skip
    with pytest.raises(ConfigurationError, match="FedBN: the model Adapted has no state of the kinds"):
        federated(Adapted(norms=True), callbacks.FedBN(), data=images(), rounds=1)


METHODS = {"fedavg": list, "norms": lambda: [callbacks.FedPer(head=NORMS)]}


@pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial"])
@pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS)
def test_a_resumed_run_equals_the_uninterrupted_one(methods, partial, tmp_path):
    def trained(*more, **settings):
        module = Adapted(norms=True, partial=partial)
        return federated(module, *methods(), *more, data=images(), rounds=3, **settings)

    whole = trained(SaveRounds(tmp_path))
    for number in (1, 2):
        resumed = trained(ckpt_path=tmp_path / f"{number}.ckpt")
        assert distance(copies(whole.model), copies(resumed.model)) == 0
        for name, value in whole.metrics.items():
            assert name.startswith("time/") or value == resumed.metrics[name], name


@pytest.mark.parametrize("kind", MODULES)
def test_a_partial_checkpoint_has_only_what_is_trained(kind, tmp_path):
    module = kind(partial=True)
    federated(module, SaveRounds(tmp_path), data=images(), rounds=1)
    checkpoint = torch.load(tmp_path / "1.ckpt", weights_only=True)
    assert [*checkpoint["state_dict"]] == [
        name for name in nn.Module.state_dict(module) if name not in frozen_names(module)
    ]
    assert [*checkpoint["fl_lightning"]["unsaved"]] == frozen_names(module)
    with pytest.warns(UserWarning, match="keys that are in the model state dict but not in the checkpoint"):
        loaded = kind.load_from_checkpoint(tmp_path / "1.ckpt")
    assert distance(copies(loaded.double()), copies(module)) < 1e-6
    start = kind(partial=True).double()
    load_weights(start, str(tmp_path / "1.ckpt"))  # as the setting initial_weights
    assert distance(copies(start), copies(module)) == 0


class LeavesOutAtSaving(Adapted):
    """A module that leaves out frozen weights by a hook, in a new dict."""

    def __init__(self):
        super().__init__()
        self.strict_loading = False

    def on_save_checkpoint(self, checkpoint):
        frozen = frozen_names(self)
        checkpoint["state_dict"] = {n: x for n, x in checkpoint["state_dict"].items() if n not in frozen}


def test_a_hook_may_leave_out_frozen_weights(tmp_path):
    whole = federated(LeavesOutAtSaving(), SaveRounds(tmp_path), data=images(), rounds=2)
    checkpoint = torch.load(tmp_path / "1.ckpt", weights_only=True)
    assert [*checkpoint["state_dict"]] == trained_names(whole.model)
    resumed = federated(LeavesOutAtSaving(), data=images(), rounds=2, ckpt_path=tmp_path / "1.ckpt")
    assert distance(copies(whole.model), copies(resumed.model)) == 0


def test_a_whole_checkpoint_has_no_digests(tmp_path):
    module = Adapted()
    federated(module, SaveRounds(tmp_path), data=images(), rounds=1)
    checkpoint = torch.load(tmp_path / "1.ckpt", weights_only=True)
    assert [*checkpoint["state_dict"]] == [*nn.Module.state_dict(module)]
    assert checkpoint["fl_lightning"]["unsaved"] == {}


def a_run(folder, rounds, seed=0, module=None):
    return Run(
        FederatedModule(module or Adapted(seed, partial=True), local_steps=2),
        images(),
        checkpoint=RoundCheckpoint(monitor="val_loss"),
        run_root=folder,
        max_epochs=rounds,
        accelerator="cpu",
        enable_progress_bar=False,
    )


def test_a_run_with_partial_checkpoints_goes_on_exactly(tmp_path):
    first, whole = a_run(tmp_path / "first", 1), a_run(tmp_path / "whole", 2)
    first.fit()
    path = first.path / "checkpoints" / "last.ckpt"
    resumed = a_run(tmp_path / "resumed", 2)
    results = [resumed.fit(resume=path), whole.fit()]
    assert distance(copies(resumed.module.model), copies(whole.module.model)) == 0
    assert results[0]["test_loss"] == results[1]["test_loss"]
    with pytest.raises(ConfigurationError, match="of Adapted is not in the checkpoint"):
        a_run(tmp_path / "other", 2, seed=1).fit(resume=path)


def test_evaluations_from_a_partial_checkpoint_are_exact(tmp_path):
    run = federated(Adapted(partial=True), SaveRounds(tmp_path), data=images(), rounds=2)
    for command, name in (("validate", "val_loss"), ("test", "test_loss")):
        found = {}
        for precision in ("64-true", "32-true"):
            trainer = L.Trainer(precision=precision, **TRAINER)
            again = FederatedModule(Adapted(partial=True), local_steps=2)
            found[precision] = getattr(trainer, command)(
                again, datamodule=images(), ckpt_path=tmp_path / "2.ckpt", verbose=False
            )[0][name]
            if precision == "64-true":
                assert distance(copies(again.model), copies(run.model)) == 0
                (expected,) = getattr(trainer, command)(run, datamodule=images(), verbose=False)
                assert found[precision] == expected[name]
        # the frozen weights are the same, although a run in float64 left them out
        assert found["32-true"] == pytest.approx(found["64-true"], abs=1e-6)


class FrozenNorm(WithBatchNorm):
    """A module whose checkpoints have no statistics of BN, either."""

    def state_dict(self):
        return {name: x for name, x in super().state_dict().items() if "running" not in name}


@pytest.mark.parametrize("lost", ["running_mean", "lora_A"])
def test_a_run_whose_checkpoints_would_lose_what_is_trained_is_refused_before_round_1(lost, tmp_path):
    class Loses(WithBatchNorm):
        def state_dict(self):
            return {name: x for name, x in super().state_dict().items() if lost not in name}

    run = a_run(tmp_path, 2, module=Loses(partial=True))
    with pytest.raises(ConfigurationError, match=rf"state_dict\(\) of Loses loses: '.*{lost}"):
        run.fit()
    assert not run.module.record.samples


class Unfrozen(Adapted):
    def __init__(self):
        super().__init__(partial=True)
        self.added = nn.Parameter(torch.ones(1), requires_grad=False)


@pytest.mark.parametrize(
    ("saved", "loaded", "name"),
    [
        (Adapted(partial=True), Adapted(seed=1, partial=True), "net.base_model.model.cls_token"),
        (Unfrozen(), Adapted(partial=True), "added"),
        (Adapted(partial=True), Unfrozen(), "added"),
        (Adapted(), Unfrozen(), "added"),
        (
            FrozenNorm(partial=True),
            FrozenNorm(partial=True),
            "net.base_model.model.patch_embed.norm.1.running_mean",
        ),
    ],
    ids=[
        "another seed",
        "a tensor less",
        "a tensor more",
        "a tensor more than a whole checkpoint",
        "buffers",
    ],
)
def test_a_checkpoint_that_lacks_a_tensor_of_the_run_is_an_error_and_no_other_model(
    saved, loaded, name, tmp_path
):
    federated(saved, SaveRounds(tmp_path), data=images(), rounds=1)
    line = f"ckpt_path: '{name}' of {type(loaded).__name__} is not in the checkpoint, and differs from"
    module = FederatedModule(loaded, local_steps=2)
    trainer = L.Trainer(max_epochs=2, precision="64-true", **TRAINER)
    for command in (trainer.validate, trainer.test, trainer.fit):
        with pytest.raises(ConfigurationError, match=line) as refused:
            command(module, datamodule=images(), ckpt_path=tmp_path / "1.ckpt")
        assert "\n" not in str(refused.value)


class Merging(nn.Linear):
    """A layer that merges its addition in eval mode, as loralib's."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.added, self.merged = nn.Parameter(torch.zeros(outputs, inputs)), False

    def train(self, mode=True):
        if self.merged == mode:
            self.weight.data += -self.added if mode else self.added
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        return super().forward(x) if self.merged else super().forward(x) + x @ self.added.T


class Merged(Adapted):
    def network(self):
        return nn.Sequential(nn.Flatten(), Merging(3 * 8 * 8, CLASSES))

    def __init__(self):
        L.LightningModule.__init__(self)
        self.save_hyperparameters({"partial": True})
        self.strict_loading = False
        torch.manual_seed(0)
        self.net = self.network()


class SaveEvaluations(Checkpoint):
    """Saves a checkpoint while the model is in eval mode."""

    def __init__(self, folder):
        self.folder = folder

    def on_validation_epoch_end(self, trainer, pl_module):
        if trainer.global_step == 1:
            assert [*pl_module.merged] == ["net.1.weight"]
            trainer.save_checkpoint(self.folder / "1.ckpt")


def test_weights_that_are_merged_for_an_evaluation_do_not_count_as_other_weights(tmp_path):
    whole = federated(Merged(), SaveEvaluations(tmp_path), data=images(), rounds=2)
    checkpoint = torch.load(tmp_path / "1.ckpt", weights_only=True)
    assert [*checkpoint["state_dict"]] == ["net.1.added"]
    assert float(checkpoint["state_dict"]["net.1.added"].abs().max()) > 0
    again = FederatedModule(Merged(), local_steps=2)
    trainer = L.Trainer(precision="64-true", **TRAINER)
    trainer.test(again, datamodule=images(), ckpt_path=tmp_path / "1.ckpt", verbose=False)
    assert torch.equal(again.model.net[1].weight, whole.model.net[1].weight)


class OtherOnRanks(Adapted):
    """A module whose frozen weights differ between the ranks, as without a seed."""

    def setup(self, stage):
        if self.trainer.global_rank:
            self.net.base_model.model.patch_embed.proj.weight.data += 1


def test_all_ranks_have_the_frozen_weights_of_the_first(tmp_path):
    outcomes = []
    for ranks in (1, 2):
        seen = States()
        settings = {"data": images(), "rounds": 2, "trainer": {"devices": ranks, "strategy": "cohort"}}
        federated(OtherOnRanks(partial=True), seen, **settings)
        outcomes.append(seen.states)
    assert_same(*outcomes)


@pytest.mark.slow
def test_the_code_of_the_page_runs_and_gives_its_numbers(capsys):
    page, written, runs = PAGES["docs/adapters.md"].read_text(), {"__name__": "__main__"}, []
    adapters, norms, partial = blocks("docs/adapters.md", "python")
    for block in (adapters, norms):
        exec(block, written)  # noqa: S102  # our own page
        runs.append(written["run"])
    with pytest.warns(UserWarning, match="keys that are in the model state dict but not in the checkpoint"):
        exec(partial, written)  # noqa: S102  # our own page
    runs.append(written["run"])
    models = [run.module.model for run in runs]
    trained = [sum(p.numel() for p in model.parameters() if p.requires_grad) for model in models]
    sent = [int(run.module.metrics["comm/upload_bytes"]) for run in runs]
    sizes = [(run.path / "checkpoints" / "last.ckpt").stat().st_size / 1e6 for run in runs]
    whole = sum(p.numel() for p in models[0].vit.unload().parameters())
    assert sent == [4 * 3 * trained[0]] * 3
    assert f"| all parameters | {whole:,} | {4 * 3 * whole:,} | {4 * whole / 1e6:.1f} MB |" in page
    assert f"| {trained[0]:,} | {sent[0]:,} | {sizes[0]:.1f} MB |" in page
    assert f"| {trained[2]:,} | {sent[2]:,} | {sizes[2]:.2f} MB |" in page
    assert f"The {trained[1] - trained[0]:,} parameters of the norms" in page
    assert f"{4 * 3 * trained[1]:,} bytes" in page
    assert f"sends {sent[1]:,} bytes" in page
    assert {"val_acc", "personal_val_acc"} <= runs[1].module.metrics.keys()
    assert distance(written["trained"].state_dict(), models[2].state_dict()) == 0
    assert distance(copies(written["trained"]), copies(models[2])) == 0
