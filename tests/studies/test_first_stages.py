"""First stages that cells share: whose rounds are whose, by what the methods themselves say."""

import json
import sys
from pathlib import Path

import pytest
import torch

from fl_lightning.callbacks import FixBN, SlidingWindowFixBN
from fl_lightning.experiments.studies import first_stages
from fl_lightning.experiments.studies.engines.base import Engine
from fl_lightning.experiments.studies.first_stages import smallest_freeze_round
from fl_lightning.experiments.studies.running import Runner, share_first_stages
from tests.support.untrained_cells import LR, cell, finish

OWN = """
from dataclasses import dataclass

from fl_lightning.callbacks import FixBN
from fl_lightning import FederatedCallback, Freezing, Report


@dataclass
class Part:
    of: float = 1.0


class Mine(Freezing):
    kinds = ("affine",)

    def __init__(self, after: int = 0, when: Part | None = None):
        self.after, self.when = after, when

    def last_batch_round(self, total_rounds):
        return self.after or total_rounds // 3

    def same_until(self, total_rounds):
        return self.last_batch_round(total_rounds)


class Shown(FixBN, Report):
    paper = "of one's own"


class Declared(Shown):
    def same_until(self, total_rounds):
        return super().same_until(total_rounds)


class Hooked(FixBN):
    def on_round_start(self, trainer, pl_module, cohort):
        pass


class Mixed:
    def on_train_epoch_start(self, trainer, pl_module):
        pass


class MixedIn(Mixed, FixBN):
    pass


class Local(FixBN):
    def policy(self, round_number, total_rounds):
        return {"mean": "local", "var": "local"}


class Broken(FixBN):
    def last_batch_round(self, total_rounds):
        return 1 // 0


class Late(FederatedCallback):
    def same_until(self, total_rounds):
        return 7
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_freezing.py").write_text(OWN)
    yield
    sys.modules.pop("mine_freezing", None)


def method(name, **settings):
    return f"--trainer.callbacks={json.dumps([{'class_path': name, 'init_args': settings}])}"


def own(name, **settings):
    return method(f"mine_freezing.{name}", **settings)


def fixbn(moment, **settings):
    return f"--trainer.callbacks={json.dumps([{'class_path': 'FixBN', 'init_args': {**moment, **settings}}])}"


@pytest.mark.slow
def test_one_first_stage_feeds_every_later_freeze_round():
    bn, gn = cell(method="BN"), cell("--model.model.norm=gn", method="GN")
    half, late = cell(fixbn({"freeze_round": 0.5})), cell(fixbn({"freeze_round": 30}, freeze="affine"))
    start, other = cell(fixbn({"freeze_round": 0})), cell(fixbn({"freeze_round": 30}), seed=1)
    slow = cell(fixbn({"freeze_round": 30}), f"{LR}=0.2")
    short = cell(fixbn({"freeze_round": 20}), "--trainer.max_epochs=30")  # its schedule is another one
    share_first_stages([half, late, start, other, slow, short, bn, gn])
    assert [(one.parent, one.shared_rounds) for one in (half, late)] == [(bn, 20), (bn, 30)]
    assert [one.parent for one in (bn, gn, start, other, slow, short)] == [None] * 6
    assert bn.keep_rounds == {20, 30}
    share_first_stages([half, late])
    assert (half.parent, late.keep_rounds) == (late, {20})
    assert smallest_freeze_round(cell(fixbn({})).config) == 20


class AtOnce(Engine):
    """Finishes each batch of jobs before the next look, and keeps who was in the batch."""

    def __init__(self, cells):
        super().__init__("")
        self.cells, self.batches, self.left = {one.job: one for one in cells}, [], {}

    def submit(self, jobs):
        if jobs:
            self.batches.append([self.cells[job.name] for job in jobs])
        for job in jobs:
            finish(self.cells[job.name])
            self.left[job.name] = 0

    def ended(self):
        left, self.left = self.left, {}
        return left

    def stop(self):
        pass


def test_a_cell_waits_for_its_parent_and_no_more_cells_run_than_jobs(monkeypatch):
    monkeypatch.setattr("fl_lightning.experiments.studies.running._PAUSE", 0.0)
    children, gn = [cell(fixbn({"freeze_round": r})) for r in (10, 20, 30)], cell("--model.model.norm=gn")
    cells = [*children, bn := cell(), gn]
    engine = AtOnce(cells)
    runner = Runner(Path("study"), engine, jobs=2)
    runner.run(cells)
    assert runner.failed == {}
    assert engine.batches == [[bn, gn], children[:2], children[2:]]


def test_a_class_of_ones_own_that_is_called_FixBN_shares_nothing(monkeypatch):
    own = cell()
    own.config["trainer"]["callbacks"] = [{"class_path": "methods.FixBN", "init_args": {"beta": 1}}]
    share_first_stages([cell(), own, cell(fixbn({}))])
    assert own.parent is None


def test_runs_whose_length_a_budget_decides_share_nothing():
    budget = ("--model.budget_epochs=2", "--trainer.max_epochs=-1")
    one, two = cell(*budget), cell(*budget, fixbn({}))
    share_first_stages([one, two])
    assert two.parent is None


def test_a_cell_starts_where_its_parent_has_kept_the_round():
    parent, child = cell(), cell(fixbn({}))
    share_first_stages([parent, child])
    folder = finish(parent)
    assert child.branch() is None  # of a run that kept nothing
    (folder / "checkpoints").mkdir()
    whole = {"state_dict": {}, "global_step": 20, "pytorch-lightning_version": "2", "fl_lightning": {}}
    torch.save(whole, folder / "checkpoints" / "round_20.ckpt")
    assert child.branch() == folder / "checkpoints" / "round_20.ckpt"
    assert child.checkpoint() is parent.branch() is None
    (folder / "result.json").unlink()  # a parent that is not done
    assert child.branch() is None


def test_the_method_itself_says_until_when_it_changes_nothing(monkeypatch):
    """Studies take another T* of FixBN at once."""
    monkeypatch.setattr(FixBN, "last_batch_round", lambda self, total_rounds: total_rounds // 4)
    parent, child = cell(), cell(fixbn({}))
    share_first_stages([parent, child])
    assert (child.parent, child.shared_rounds, parent.keep_rounds) == (parent, 10, {10})


def test_a_freezing_method_of_ones_own_shares_the_first_stage_of_the_run_without_it():
    early, late = cell(own("Mine")), cell(own("Mine", after=30))
    share_first_stages([early, late])
    assert (early.parent, early.shared_rounds) == (late, 13)
    bn = cell()  # its source has no part of the method's, which changes nothing in the first stage
    share_first_stages([early, late, bn])
    assert [(one.parent, one.shared_rounds) for one in (early, late)] == [(bn, 13), (bn, 30)]
    assert bn.parent is None
    part = {"class_path": "mine_freezing.Part", "init_args": {"of": 1.0}}
    assert smallest_freeze_round(cell(own("Mine", when=part)).config) == float("inf")  # it is not made


@pytest.mark.parametrize(
    ("name", "until"),
    [("FixBN", 20), ("Declared", 20), ("Late", 7), *((x, float("inf")) for x in ("Shown", "Hooked", "MixedIn", "Local", "Broken"))],
)  # fmt: skip
def test_what_else_a_class_changes_may_change_every_round(name, until):
    """A class inherits no declaration: it is a part of the configuration as any other callback."""
    one = cell(fixbn({}) if name == "FixBN" else own(name))
    assert smallest_freeze_round(one.config) == until
    plain = cell()
    plain.now = one.now
    share_first_stages([plain, one])
    assert (one.parent is plain) == (until < 40)


def test_a_method_that_finds_when_it_freezes_does_not_know_before():
    assert SlidingWindowFixBN(2, 0.1).same_until(10) is None
    assert FixBN(freeze_round=3).same_until(10) == 3


def test_one_callback_without_a_list_is_not_left_out():
    one, two = cell(), cell(fixbn({}))
    for each, norm in ((one, "FedProx"), (two, "FedBN")):
        each.config["trainer"]["callbacks"] = {"class_path": f"callbacks.{norm}", "init_args": {}}
    assert first_stages.family_of(one.config) != first_stages.family_of(two.config)
