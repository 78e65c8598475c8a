"""What is changed while a run is under way counts from the next round on: hooks, methods, settings of groups."""

from functools import partial

import pytest
import torch

from fl_lightning import ConfigurationError, FederatedCallback, FederatedModule
from tests.support.helpers import SGD, blobs, fit, small_cnn


class Counts(FederatedCallback):
    def __init__(self):
        self.rounds = []

    def note(self, trainer, pl_module, cohort):
        self.rounds.append(cohort.round)


def test_a_hook_that_a_class_gets_later_or_an_object_of_its_own_is_called():
    class Later(Counts):
        pass

    Later.on_round_start = Counts.note
    own = Counts()
    own.on_round_end = own.note
    later = Later()
    fit(FederatedModule(small_cnn(), SGD, local_steps=1), blobs(), 2, [later, own])
    assert later.rounds == own.rounds == [1, 2]


def test_a_method_that_joins_when_training_starts_takes_part():
    class Joins(Counts):
        on_round_start = Counts.note

    class Adds(FederatedCallback):
        def on_train_start(self, trainer, pl_module):
            trainer.callbacks.append(joins)

    joins = Joins()
    fit(FederatedModule(small_cnn(), SGD, local_steps=1), blobs(), 2, [Adds()])
    assert joins.rounds == [1, 2]


def test_settings_of_a_group_that_change_between_rounds_hold_from_the_next_one_on():
    rates = []

    class Changes(FederatedCallback):
        def on_round_start(self, trainer, pl_module, cohort):
            rates.append([group["lr"] for group in cohort.optimizer.param_groups])
            pl_module.client.parameter_groups = {"batch_norm": {"lr_scale": 0.0}}

    fit(FederatedModule(small_cnn(), SGD, local_steps=1), blobs(), 2, [Changes()])
    assert rates == [[0.1, 0.1], [0.1, 0.0]]


def test_a_run_that_ends_because_it_diverged_says_so_in_its_record():
    module = FederatedModule(small_cnn(), partial(torch.optim.SGD, lr=1e38), local_steps=20)
    with pytest.raises(ConfigurationError, match="is not finite"):
        fit(module, blobs(), 2)
    assert module.record.diverged
