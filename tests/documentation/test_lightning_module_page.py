"""The page on LightningModules: its scripts, its YAML, its code and what it says about hooks."""

import difflib
import re
import sys
from collections import Counter
from copy import deepcopy

import pytest
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from fl_lightning import FederatedDataModule, FederatedModule, Run
from fl_lightning.clients.lightning_module import _NEVER_CALLED
from fl_lightning.testing import fit
from tests.support.lightning_sites import Lit, sites
from tests.support.pages import PAGES, ROOT, blocks, take_examples

EXAMPLE = ROOT / "examples" / "lightning_module"
PAGE = "docs/lightning-module.md"
TEXT = PAGES["docs/module-hooks.md"].read_text()


def run_script(code, monkeypatch):
    """Run a script for two rounds or epochs, and return its variables."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # the script sets this variable
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    written = {"__name__": "__main__"}
    exec(re.sub(r"max_epochs=\d+", "max_epochs=2", code), written)  # noqa: S102  # our own script
    return written


@pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed")  # by the script in Lightning alone
def test_both_scripts_of_the_example_train_the_same_module(monkeypatch, capsys):
    take_examples(monkeypatch)
    lightnings, ours = (
        run_script((EXAMPLE / f"{name}.py").read_text(), monkeypatch) for name in ("centralised", "federated")
    )
    assert capsys.readouterr().out.count("label_smoothing") == 2
    assert [x["best"].best_model_score > 0.1 for x in (lightnings, ours)] == [True, True]
    own = {"train_loss", "train_acc", "val_loss", "val_acc", "val_f1"}
    assert own <= ours["run"].module.metrics.keys()
    assert 0 < ours["run"].module.metrics["val_acc"] <= 1
    assert ours["data"].client_names == ["north", "east", "south"]
    saved = [torch.load(x["best"].best_model_path, weights_only=True) for x in (lightnings, ours)]
    assert saved[0]["hyper_parameters"] == saved[1]["hyper_parameters"]
    assert saved[0]["state_dict"].keys() == saved[1]["state_dict"].keys()


def test_the_page_shows_the_lines_that_differ_and_the_file_of_the_run():
    scripts = [(EXAMPLE / f"{name}.py").read_text().splitlines() for name in ("centralised", "federated")]
    differences = [*difflib.unified_diff(*scripts, n=99, lineterm="")][3:]
    assert blocks(PAGE, "diff") == ["\n".join(differences) + "\n"]
    assert sum(line[0] == "+" and len(line) > 1 for line in differences) <= 7
    assert blocks(PAGE, "yaml") == [(EXAMPLE / "sites.yaml").read_text()]


@pytest.mark.parametrize("name", ["README.md", PAGE])
def test_three_lines_federate_a_module(name, monkeypatch):
    take_examples(monkeypatch)
    (code,) = (block for block in blocks(name, "python") if "Run(" in block)
    written = run_script(code, monkeypatch)
    assert 0 < written["module"].metrics["val_acc"] <= 1
    assert written["data"].client_names == ["a", "b"]


def test_the_weighted_loss_of_the_page_depends_on_no_batch_size(monkeypatch):
    take_examples(monkeypatch)
    written = {}
    exec(blocks(PAGE, "python")[2], written)  # noqa: S102  # our own page
    digits, weights = sys.modules["examples.lightning_module.lit_digits"].DigitsData, written["WEIGHTS"]

    class InBatches(digits):
        size = 1

        def val_dataloader(self):
            return DataLoader(self.val, self.size)

    class Usual(written["Weighted"]):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", cross_entropy(self(batch[0]), batch[1], weight=weights))

    def loss(module, size):
        server = InBatches()
        server.size = size
        run = FederatedModule(deepcopy(module), local_steps=1)
        fit(
            run,
            FederatedDataModule([digits(range(5))], server=server),
            1,
            limit_val_batches=1.0,
            precision="32-true",
        )
        return run.metrics["val_loss"]

    module = written["Weighted"]()
    usual = Usual()
    usual.load_state_dict(module.state_dict())
    losses = [loss(module, size) for size in (1, 7, 500)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    assert loss(usual, 500) == pytest.approx(losses[0], rel=1e-6)
    assert abs(loss(usual, 1) - losses[0]) > 1e-3


def rows_of(head):
    """The rows of a table of the page, by the text of the first column."""
    table = TEXT[TEXT.index(head) :].split("\n\n")[0].splitlines()[2:]
    return dict(map(str.strip, row.strip("| ").split(" | ", 1)) for row in table)


def hooks_in(text):
    """The hooks that a text names, with those of other stages that it only mentions."""
    named = re.findall(r"`(\w+)`", text)
    for stage in ("test", "predict"):
        if f"`{stage}`" in text.partition("the same hooks of")[2]:
            named += [name.replace("validation", stage) for name in named if "validation" in name]
    return [name for name in named if name not in ("test", "predict")]


def test_the_page_says_of_every_hook_of_lightning_what_becomes_of_it():
    hooks = {
        name for kind in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(kind) if name[0] != "_"
    }
    named = {*hooks_in(TEXT), *(x for cell in rows_of("| when | hooks |").values() for x in hooks_in(cell))}
    assert hooks - named == {"configure_sharded_model"}  # deprecated in Lightning
    refused = TEXT[TEXT.index("These hooks are refused") :].split(". [ClientGradientClipping]")[0]
    assert sorted(hooks_in(refused)) == sorted(_NEVER_CALLED)


@pytest.mark.filterwarnings("ignore:You have overridden .* in `LightningModule`")  # the transfer hooks
def test_hooks_are_called_as_often_as_the_page_says(capsys):
    calls = Counter()
    table = rows_of("| when | hooks |")

    def counted(hook):
        def call(self, *args, **kwargs):
            calls[hook] += 1
            return getattr(Lit, hook)(self, *args, **kwargs)

        return call

    hooks = {hook for cell in table.values() for hook in hooks_in(cell)}
    module = type("Counted", (Lit,), {hook: counted(hook) for hook in hooks})()
    Run(FederatedModule(module, local_steps=2), sites(), max_epochs=2, accelerator="cpu").fit()
    expected = {
        "once in `fit`, and once in the test at its end": 2,
        "once in `fit`": 1,
        "once in `fit`, and once a round of each client": 1 + 2 * 2,
        "once a round": 2,
        "once a local step of each client": 2 * 2 * 2,
    }
    for when, times in expected.items():
        assert {hook: calls[hook] for hook in hooks_in(table[when])} == dict.fromkeys(
            hooks_in(table[when]), times
        )
    evaluations = {"once an evaluation": 1, "once a batch of an evaluation": 3}
    for when, batches in evaluations.items():
        for hook in hooks_in(table[when]):
            # validations of the initial model and after two rounds, a test, and no predict
            times = 3 if "validation" in hook else 1 if "test" in hook else 0
            assert calls[hook] == batches * times, hook
    # two rounds of two steps of two clients, three validations and a test
    moved = hooks_in(table["once a batch of training or evaluation"])
    assert {calls[hook] for hook in moved} == {2 * 2 * 2 + 3 * 3 + 3}
