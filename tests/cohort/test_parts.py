"""Treatments of a part of the model: which tensors a name means, and that every part of a round follows."""

import json
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning import ConfigurationError, FederatedCallback, SequentialExecutor, VectorizedExecutor
from fl_lightning.aggregation import Median
from fl_lightning.attacks import SignFlip
from fl_lightning.callbacks import Byzantine, FedPer, FixBN, MaintainedMomentum
from fl_lightning.cohort.parts import match_parts, treatments
from fl_lightning.methods.local_state import LocalState
from fl_lightning.models import ResNet20
from fl_lightning.pictures.learning_curve import policy_changes
from fl_lightning.round.client_messages import sent_vectors
from fl_lightning.round.policy import declared_parts, policy_table, resolve_policy, stages_in_words
from tests.support.command_line import run as command
from tests.support.command_line import write_config
from tests.support.helpers import (
    SGD,
    Received,
    SaveRounds,
    blobs,
    client_batch,
    distance,
    federated_run,
    plain_step,
    small_cnn,
    train,
)

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
SECOND_BN = [f"4.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]
FLOATS = {"0": 76, "1": 8, "3": 222, "4": 12, "8": 75}
"""Trainable floats of ``small_cnn`` by module: 4x2x9 + 4, 2x4, 6x4x9 + 6, 2x6, 24x3 + 3."""
STATISTICS = {"1": 8, "4": 12}


class Declares(FederatedCallback):
    """A policy that is the same in every round, or that begins in a round."""

    def __init__(self, policy, first=1):
        self.declared, self.first = policy, first

    def policy(self, round_number, total_rounds):
        return self.declared if round_number >= self.first else {}


class Keeps(LocalState):
    def __init__(self, *kinds):
        super().__init__()
        self.kinds = kinds


def tensors(model, part):
    return list(match_parts(model, [part]))


def test_a_part_is_named_by_whole_segments_of_modules_parameters_and_buffers():
    model = ResNet20()
    assert tensors(small_cnn(), "4") == SECOND_BN
    assert tensors(small_cnn(), "8.bias") == ["8.bias"]
    assert tensors(small_cnn(), "1.running_mean") == ["1.running_mean"]
    names = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    first = next(name.partition(".")[0] for name in names if name.count(".") > 1)
    assert tensors(model, first) == [name for name in names if name.startswith(f"{first}.")]
    with pytest.raises(ConfigurationError):
        match_parts(model, [first[:-1]])  # no whole segment


def test_a_star_stands_for_one_segment():
    assert tensors(small_cnn(), "*.bias") == [f"{layer}.bias" for layer in (0, 1, 3, 4, 8)]
    assert tensors(small_cnn(), "*.running_mean") == ["1.running_mean", "4.running_mean"]
    nested = nn.Sequential(small_cnn(), nn.Linear(3, 3))
    assert tensors(nested, "*.8") == ["0.8.weight", "0.8.bias"]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (small_cnn(), ["8.weight", "8.bias"]),
        (nn.Linear(2, 1), ["weight", "bias"]),
        (nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1).requires_grad_(False)), ["0.weight", "0.bias"]),
    ],
)
def test_the_last_layer_is_the_last_module_with_trainable_parameters(model, names):
    assert tensors(model, "last layer") == names


def test_the_most_specific_part_comes_first():
    assert match_parts(small_cnn(), ["8", "8.weight", "*.bias"])["8.weight"] == ("8.weight", "8")
    assert match_parts(small_cnn(), ["*.bias", "8"])["8.bias"] == ("*.bias", "8")
    with_star, without = "0.*.bias", "*.8.bias"
    nested = nn.Sequential(small_cnn())
    assert match_parts(nested, [with_star, "0.8.bias"])["0.8.bias"] == ("0.8.bias", with_star)
    with pytest.raises(ConfigurationError, match=r"both name '0.8.bias', and neither is more specific"):
        match_parts(nested, [with_star, without])


def test_a_name_that_the_model_lacks_is_refused_with_its_names():
    line = (
        r"^Declares.policy\(\): 'runing_mean' is no kind of state \(weight, affine, .*\) and no name in the model "
        r"Sequential; names are 0, 1, 3, 4, 8$"
    )
    for declared in ({"runing_mean": "local"}, {"mean": "local", "runing_mean": "local"}):
        with pytest.raises(ConfigurationError, match=line):
            federated_run(Declares(declared))
    with pytest.raises(ConfigurationError, match="did you mean weight"):
        federated_run(Declares({"weigth": "frozen"}))
    with pytest.raises(ConfigurationError, match=r"^Keeps: 'fc' is no kind of state .* names are 0, 1,"):
        federated_run(Keeps("affine", "fc"))


def test_a_part_that_shares_a_tensor_with_another_layer_is_refused():
    """The output layer has the weight of the first layer, as in many language models."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    for part, inside, outside in (("2", "2", "0"), ("last layer", "2", "0"), ("0", "0", "2")):
        with pytest.raises(
            ConfigurationError, match=f"{part!r} contains '{inside}.weight', .* same tensor as '{outside}."
        ):
            match_parts(model, [part])
    assert match_parts(model, ["0", "2"]) == {"0.weight": ("0",), "0.bias": ("0",), "2.bias": ("2",)}
    with pytest.raises(ConfigurationError, match=r"same tensor as '0\.weight'"):
        train(model.double(), blobs(shape=(3,)), 1, [FedPer()])


def test_a_part_precedes_its_kind_and_a_nested_part_precedes_both():
    policy = resolve_policy([Declares({"weight": "frozen", "8": "local", "8.bias": "averaged"})], 1, 1)
    found = treatments(small_cnn(), policy)
    assert [found[n] for n in ("0.bias", "8.weight", "8.bias", "1.bias")] == [
        "frozen",
        "local",
        "averaged",
        "averaged",
    ]


def test_two_methods_cannot_keep_one_part():
    with pytest.raises(
        ConfigurationError, match="Keeps and Declares cannot be combined: one wants 8 local, the other frozen"
    ):
        federated_run(Keeps("8"), Declares({"8": "frozen"}))
    with pytest.raises(ConfigurationError, match=r"'8' and 'last layer' both name '8.(weight|bias)'"):
        federated_run(Keeps("8"), Declares({"last layer": "frozen"}))


@pytest.mark.parametrize(
    "declared", [{"4.running_mean": "frozen"}, {"4": "frozen", "4.running_var": "averaged"}]
)
def test_a_layers_mean_and_variance_freeze_together(declared):
    with pytest.raises(
        ConfigurationError, match=r"frozen together \(policy of 4.running_mean and 4.running_var\)"
    ):
        federated_run(Declares(declared))


def test_all_means_and_variances_freeze_together():
    with pytest.raises(
        ConfigurationError, match=r"frozen together \(policy of \d.running_mean and \d.running_var\)"
    ):
        federated_run(Declares({"mean": "frozen"}))


def test_the_policy_table_has_a_row_for_a_part():
    methods = [Declares({"3": "frozen"}, first=3), Keeps("last layer")]
    table = policy_table(small_cnn(), methods, 4)
    assert table["3"] == [(1, "as its kinds"), (3, "frozen")]
    assert stages_in_words(table["3"]) == "as its kinds; frozen from round 3"
    assert list(table) == ["weight", "affine", "mean", "var", "counter", "last layer", "3"]
    assert policy_changes({"8": [[1, "averaged"], [3, "frozen"]]}) == {3: "part 8 frozen from round 3"}


def test_a_part_that_appears_in_training_is_refused():
    class Late(FederatedCallback):
        now = False

        def policy(self, round_number, total_rounds):
            return {"8": "frozen"} if self.now else {}

        def on_round_end(self, trainer, pl_module, cohort):
            self.now = True

    with pytest.raises(
        ConfigurationError, match=r"policy\(\) declares '8' in round 2 and did not before training"
    ):
        federated_run(Late())


@EXECUTORS
@pytest.mark.parametrize("settings", [{}, {"participation": 2, "server_optimizer": MOMENTUM}])
def test_a_part_that_is_averaged_like_the_rest_is_fedavg_bit_for_bit(executor, settings):
    settings = {"data": blobs(4, (24, 40, 32)), "client_optimizer": MOMENTUM, **settings}
    states = [
        federated_run(*methods, executor=executor(), **settings).states
        for methods in ((), [Declares({"8": "averaged", "1": "averaged", "*.bias": "averaged"})])
    ]
    assert [distance(*pair) for pair in zip(*states, strict=True)] == [0] * 4


@EXECUTORS
def test_clients_keep_a_layer_with_its_statistics(executor):
    """Beside separate models whose other state is averaged with equal shares."""
    callback = Keeps("4")
    module = federated_run(callback, data=blobs(3), executor=executor()).module
    data, clients = blobs(3), [small_cnn().double().train() for _ in range(3)]
    for round_number in range(3):
        for client, local in enumerate(clients):
            stepper = SGD(local.parameters())
            for step in (2 * round_number, 2 * round_number + 1):
                plain_step(local, stepper, client_batch(data, client, step))
        for name in (name for name in clients[0].state_dict() if name not in SECOND_BN):
            held = [local.state_dict()[name] for local in clients]
            mean = sum(held) / 3
            for value in held:
                value.copy_(mean)
    for client, local in enumerate(clients):
        kept = callback.variants(None, module)[str(client)]
        assert sorted(kept) == sorted(SECOND_BN)
        assert distance({**module.state_dict(), **kept}, local.state_dict()) < 1e-10


@EXECUTORS
def test_a_frozen_layer_is_not_trained_and_normalises_with_its_running_statistics(executor):
    """Beside one model in plain PyTorch whose second BN layer is in eval mode from round 3 on."""
    state = federated_run(
        Declares({"4": "frozen"}, first=3), data=blobs(1), rounds=4, executor=executor()
    ).module
    model, data = small_cnn().double().train(), blobs(1)
    stepper = SGD(model.parameters())
    for step in range(8):
        if step == 4:
            model[4].eval().requires_grad_(False)
        plain_step(model, stepper, client_batch(data, 0, step))
    assert distance(state.state_dict(), model.state_dict()) < 1e-10
    assert all(layer.training for layer in (state.model[1], state.model[4]))


def test_bytes_of_parts_that_are_kept_and_frozen():
    """8 bytes a float; a frozen part is received once, by each of three clients in its first round of it."""
    everything = sum(FLOATS.values()) + sum(STATISTICS.values())
    for method, up, once in (
        (Keeps("8"), everything - 75, 0),
        (Keeps("4"), everything - 12 - 12, 0),
        (Keeps("4", "8.bias"), everything - 12 - 12 - 3, 0),
        (Declares({"8": "frozen"}), everything - 75, 75),
        (Declares({"4.weight": "frozen", "4.bias": "frozen"}), everything - 12, 12),
    ):
        seen = Received()
        federated_run(method, seen)
        assert seen.received == [(3 * 8 * up, 3 * 8 * (up + once)), *[(3 * 8 * up,) * 2] * 2]


def test_a_resumed_run_keeps_parts_bit_for_bit(tmp_path):
    def methods():
        return Keeps("4", "8.weight"), MaintainedMomentum("global")

    settings = {"rounds": 4, "participation": 2, "client_optimizer": MOMENTUM, "data": blobs(4)}
    whole = federated_run(*methods(), SaveRounds(tmp_path), **settings).states
    for number in (1, 2, 3):
        again = federated_run(*methods(), ckpt_path=tmp_path / f"{number}.ckpt", **settings).states
        assert distance(whole[-1], again[-1]) == 0


def test_nothing_of_a_kept_part_reaches_an_attacker_or_a_robust_rule():
    seen = []

    class Looks(FederatedCallback):
        def on_before_aggregate(self, trainer, pl_module, cohort):
            seen.append(
                {sent.what: sum(p.shape[1] for p in sent.pieces) for sent in sent_vectors(pl_module, cohort)}
            )
            self.own = cohort.buffers["4.running_var"].mean(0).clone()
            self.others = cohort.buffers["1.running_var"].median(0).values.clone()

    looks, per_model = Looks(), {"statistics_aggregator": Median(per="model")}
    module = federated_run(Keeps("4", "8"), looks, **per_model).module
    assert seen[0] == {"parameters": 76 + 8 + 222, "means": 4, "variances": 4}
    assert torch.equal(module.state_dict()["1.running_var"], looks.others)


def test_statistics_that_no_client_sends_cannot_be_attacked():
    attacked = partial(Byzantine, SignFlip(), clients=1, target="statistics")
    federated_run(attacked(), Keeps("1"), aggregator=Median())
    with pytest.raises(ConfigurationError, match="statistics are not sent in round 1"):
        federated_run(attacked(), Keeps("1", "4"), aggregator=Median())


def test_parts_and_kinds_freeze_in_one_run():
    run = federated_run(Declares({"8": "frozen"}), FixBN(freeze_round=1), rounds=3)
    start, first, last = run.states[0], run.states[1], run.states[3]
    assert distance({n: start[n] for n in ("8.weight", "8.bias")}, last) == 0
    assert distance({n: first[n] for n in ("1.running_mean", "4.running_var")}, last) == 0
    assert distance({"0.weight": first["0.weight"]}, last) > 1e-4


def test_a_layout_without_parts_has_the_blocks_that_it_had():
    assert declared_parts(small_cnn(), [FixBN(1), Keeps("affine")], 3) == ()
    names = []

    class Looks(FederatedCallback):
        def on_round_start(self, trainer, pl_module, cohort):
            names.append([*cohort.params.blocks, *cohort.buffers.blocks])

    for method in (Looks(), Keeps("8", "8.bias")):
        train(deepcopy(small_cnn()), blobs(), 1, [method, Looks()] if method.__class__ is Keeps else [method])
    assert names[0] == ["weights", "batch_norm", "mean", "var", "counter", "scratch"]
    assert names[1][:4] == ["weights", "batch_norm", "weights@8", "weights@8.bias@8"]


def test_the_table_of_a_run_tells_the_tensors_of_a_part(capsys):
    write_config({"trainer.callbacks": [{"class_path": "FedPer"}], "trainer.max_epochs": 1})
    run = command()
    assert "part last layer      local (classifier.weight and 1 more)" in capsys.readouterr().out
    assert json.loads(run.attempt.policy.read_text())["last layer"] == [[1, "local"]]
