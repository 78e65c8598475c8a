"""Byzantine clients: who attacks what from when, by any executor, in both readings of the paper, and with parts of the clients."""

from functools import partial

import pytest
import torch

from fl_lightning import ConfigurationError, FederatedCallback
from fl_lightning.aggregation import NNM, Median, TrimmedMean
from fl_lightning.attacks import (
    ALittleIsEnough,
    FallOfEmpires,
    Gaussian,
    Mimic,
    ModelReplacement,
    NonFinite,
    SignFlip,
    sign_flip,
)
from fl_lightning.callbacks import FBN, Byzantine, FedBN, MaintainedMomentum
from fl_lightning.callbacks.byzantine import attackers
from fl_lightning.datamodules import Digits, GammaSimilarity, HonestOnly
from fl_lightning.execution.vectorized import VectorizedExecutor
from fl_lightning.verification import certify
from tests.support.helpers import blobs, distance, small_cnn, train

FIVE = {"num_clients": 5, "sizes": (16,)}


class Sent(FederatedCallback):
    """What the rows hold after all methods (as a method) or after the attacks (as an observer)."""

    def __init__(self, role="observer"):
        self.role, self.rounds = role, {}

    def on_before_aggregate(self, trainer, pl_module, cohort):
        held = {**cohort.params, **cohort.buffers}
        self.rounds[cohort.round] = {name: value.clone() for name, value in held.items()}
        self.clients, self.server = (
            list(cohort.client_ids),
            {name: value.clone() for name, value in cohort.server.items()},
        )


def seen(target, attack=None, rounds=1, **settings):
    """The rows before and after an attack by clients 3 and 4."""
    before, after = Sent("method"), Sent()
    callbacks = [before, after, Byzantine(attack or SignFlip(), 2, target, **settings)]
    train(small_cnn(), blobs(**FIVE), rounds, callbacks, local_steps=2, on_divergence="record")
    return before, after


@pytest.mark.parametrize(
    ("target", "touched"),
    [
        ("means", ["running_mean"]),
        ("variances", ["running_var"]),
        ("statistics", ["running_mean", "running_var"]),
        ("parameters", ["weight", "bias"]),
        ("everything", ["running_mean", "running_var", "weight", "bias"]),
    ],
)
def test_attackers_send_the_opposite_of_the_honest_mean_of_what_is_their_target(target, touched):
    before, after = seen(target)
    for name, rows in after.rounds[1].items():
        own = before.rounds[1][name]
        if name.rpartition(".")[2] in touched:
            base = before.server.get(name, 0)
            expected = base - (own[:3] - base).mean(0)
            torch.testing.assert_close(rows[3:], expected.expand_as(rows[3:]), rtol=1e-12, atol=1e-12)
        else:
            assert torch.equal(rows[3:], own[3:])
        assert torch.equal(rows[:3], own[:3])


def test_they_begin_in_their_round():
    before, after = seen("everything", start_round=2, rounds=2)
    for number, equal in ((1, True), (2, False)):
        pairs = zip(before.rounds[number].values(), after.rounds[number].values(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs) is equal


def test_who_attacks():
    assert attackers(3, 10) == [7, 8, 9]
    assert attackers(0.3, 10) == [7, 8, 9]
    assert attackers(0.7 - 0.4, 10) == [7, 8, 9]
    assert attackers([5, 1], 10) == [1, 5]
    assert attackers(0, 10) == []
    for wrong in (10, [10], [-1], -1, list(range(10))):
        with pytest.raises(ConfigurationError, match="use ids from 0 to 9, and leave one honest"):
            attackers(wrong, 10)
    assert attackers(0.0, 10) == []
    with pytest.raises(
        ConfigurationError, match=r"Byzantine.clients: 1.5 must be at least 0 and below 1 as a share"
    ):
        attackers(1.5, 10)
    with pytest.raises(
        ConfigurationError, match=r"0.05 of 10 clients is less than one; use 0.1 or more, or 0"
    ):
        attackers(0.05, 10)
    with pytest.raises(
        ConfigurationError, match=r"Byzantine.target: 'gradients' must be one of means, variances"
    ):
        Byzantine(SignFlip(), 1, "gradients")


ATTACKS = [
    SignFlip(),
    FallOfEmpires(search="byzfl"),
    ALittleIsEnough(search="byzfl"),
    Gaussian(),
    Mimic(1),
    NonFinite(),
]
NAMES = [type(attack).__name__ for attack in ATTACKS]


@pytest.mark.parametrize("attack", ATTACKS, ids=NAMES)
@pytest.mark.parametrize("method", [None, FBN])
def test_every_executor_computes_the_same_attack(attack, method):
    states = [
        train(
            small_cnn(), blobs(**FIVE), 3, [*([method()] if method else []), Byzantine(attack, 2)], local_steps=2,
            aggregator=TrimmedMean(2, NNM()), on_divergence="record", executor=executor,
        )
        for executor in (None, VectorizedExecutor())
    ]  # fmt: skip
    assert all(bool(value.isfinite().all()) for value in states[0].values())
    assert distance(*states) < 1e-10


@pytest.mark.parametrize("attack", [SignFlip(), NonFinite()], ids=["sign flip", "NaN"])
@pytest.mark.slow
def test_verify_tries_attacks_under_a_median_and_lets_attackers_send_anything(attack):
    certificate = certify(partial(Byzantine, attack, 1), references=False)
    assert certificate.failed == []
    assert {"trains", "resume", "executors", "ranks"} <= {
        f.line for f in certificate.rules if f.status == "PASSED"
    }


def test_too_few_honest_clients_in_a_round_attack_nobody():
    before, after = Sent("method"), Sent()
    callbacks = [before, after, Byzantine(ALittleIsEnough(), [0, 1, 2, 3])]
    train(small_cnn(), blobs(**FIVE), 6, callbacks, participation=2)
    for number in range(1, 7):
        pairs = zip(before.rounds[number].values(), after.rounds[number].values(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)  # 1 honest client has no deviation


def test_the_number_of_attackers_among_the_sampled_is_logged():
    counts = []

    class Count(FederatedCallback):
        def on_train_epoch_end(self, trainer, pl_module):
            counts.append(float(trainer.callback_metrics["byzantine/clients"]))

    who = Sent()
    expected = []

    class Who(FederatedCallback):
        def on_round_end(self, trainer, pl_module, cohort):
            expected.append(len({0, 1, 2} & set(cohort.client_ids)))

    train(
        small_cnn(), blobs(**FIVE), 6, [Byzantine(Mimic(), [0, 1, 2]), Count(), Who(), who], participation=2
    )
    assert counts == expected
    assert len(set(counts)) > 1


def test_damped_client_momentum_is_kept_as_it_was_computed():
    """Robust DSGD: the rule gets what attackers send, and their own momentum stays theirs."""

    def trained(attackers):
        momentum = MaintainedMomentum("local")
        sgd = {"lr": 0.1, "momentum": 0.9, "dampening": 0.9}
        train(
            small_cnn(), blobs(**FIVE), 3, [momentum, Byzantine(SignFlip(), attackers, "parameters")],
            client_optimizer=lambda parameters: torch.optim.SGD(parameters, **sgd), aggregator=TrimmedMean(1),
        )  # fmt: skip
        return momentum

    honest, attacked = trained([]), trained([4])
    assert sorted(honest.memory) == sorted(attacked.memory)
    for value in attacked.memory[4].values():
        assert bool(torch.as_tensor(value).isfinite().all())


def test_the_server_steps_on_the_rule_of_damped_momenta_and_of_what_attackers_make_of_them():
    """Robust DSGD: q <- 0.9 q + 0.1 g at each client, theta <- theta - lr F(q), attackers sending minus the honest mean of q."""
    rule, lr, found = TrimmedMean(1), 0.1, []

    class Reference(FederatedCallback):
        def on_before_aggregate(self, trainer, pl_module, cohort):
            (momenta,) = cohort.optimizer_state("momentum_buffer").blocks.values()
            (self.before,) = (block[0].clone() for block in cohort.server_rows.blocks.values())
            self.momenta = torch.cat([momenta[:4], sign_flip(momenta[:4])[None]])

        def on_round_end(self, trainer, pl_module, cohort):
            after = torch.cat([p.detach().flatten() for p in cohort.server_parameters.values()])
            found.append(float((after - (self.before - lr * rule(self.momenta))).abs().max()))

    train(
        small_cnn("none"), blobs(**FIVE), 4, [MaintainedMomentum("local"), Reference(), Byzantine(SignFlip(), 1, "parameters")],
        client_optimizer=partial(torch.optim.SGD, lr=lr, momentum=0.9, dampening=0.9), aggregator=rule,
    )  # fmt: skip
    assert max(found) < 1e-14


def test_an_attacker_knows_the_honest_clients_and_no_other_attacker():
    before, after = Sent("method"), Sent()
    train(
        small_cnn(),
        blobs(**FIVE),
        1,
        [before, after, Byzantine(Gaussian(1e6, 0), [3]), Byzantine(SignFlip(), [4], "means")],
    )
    for name in (name for name in after.rounds[1] if name.endswith("running_mean")):
        torch.testing.assert_close(after.rounds[1][name][4], -before.rounds[1][name][:3].mean(0))


@pytest.mark.parametrize(
    ("attack", "rule"),
    [
        (lambda: ALittleIsEnough(origin="blades"), None),
        (lambda: ALittleIsEnough(origin="paper"), None),
        (lambda: ALittleIsEnough(search="byzfl"), TrimmedMean(3)),
        (Mimic, Median()),
    ],
    ids=["number of attackers", "vectors of the attackers", "search", "mimic"],
)
def test_an_attack_in_two_callbacks_is_the_attack_in_one(attack, rule):
    def trained(*groups):
        sent = Sent()
        callbacks = [sent, *(Byzantine(attack(), clients) for clients in groups)]
        train(small_cnn(), blobs(8, (16, 16, 16, 40, 16, 16, 16, 16)), 1, callbacks, aggregator=rule)
        return sent.rounds[1]

    together, apart = trained([3, 5, 7]), trained([7], [3, 5])
    assert distance(together, apart) == 0
    assert distance(together, trained([7])) > 1e-6


class OwnAttack(Byzantine):
    """Replaces the messages by a hook of its own."""

    def on_before_aggregate(self, trainer, pl_module, cohort):
        for row in self.rows(cohort):
            cohort.params.row(row)["8.bias"].zero_()


def test_an_attack_with_a_hook_of_its_own_leaves_other_attacks_as_they_are():
    def trained(*attacks):
        return train(small_cnn(), blobs(**FIVE), 1, list(attacks))

    own, flip = (lambda: OwnAttack(SignFlip(), [4])), (lambda: Byzantine(SignFlip(), [3], "parameters"))
    assert distance(trained(own(), flip()), trained(own())) > 1e-3
    assert distance(trained(own(), flip()), trained(flip(), own())) == 0


def test_a_second_attack_of_the_same_clients_changes_the_messages_of_the_first():
    before, after = Sent("method"), Sent()
    attacks = [
        Byzantine(FallOfEmpires(tau=1.0), [3, 4]),
        Byzantine(ModelReplacement(10.0), [4]),
        before,
        after,
    ]
    train(small_cnn(), blobs(**FIVE), 1, attacks, on_divergence="record")
    for name in (name for name in after.rounds[1] if name.endswith("running_mean")):
        torch.testing.assert_close(after.rounds[1][name][3], -before.rounds[1][name][:3].mean(0))
        torch.testing.assert_close(after.rounds[1][name][4], 10 * after.rounds[1][name][3])


@pytest.mark.parametrize("method", [FBN, None])
def test_statistics_that_no_rule_can_save_are_the_error_of_their_round(method):
    callbacks = [*([method()] if method else []), Byzantine(NonFinite(), 3, "means")]
    with pytest.raises(ConfigurationError, match=r"round 1: the aggregate of Median is not finite"):
        train(small_cnn(), blobs(**FIVE), 2, callbacks, statistics_aggregator=Median())


def test_attackers_that_stay_valid_are_not_noticed():
    def left_out(**settings):
        counts = []

        class Count(FederatedCallback):
            def on_train_epoch_end(self, trainer, pl_module):
                counts.append(float(trainer.callback_metrics["statistics/invalid"]))

        callbacks = [Byzantine(SignFlip(), 2, "variances", **settings), Count()]
        train(
            small_cnn(),
            blobs(**FIVE),
            2,
            callbacks,
            statistics_aggregator=Median(),
            statistics_domain="variance",
        )
        return counts

    assert left_out() == [4, 4]  # two attackers, two layers
    assert left_out(stay_valid=True) == [0, 0]


def test_what_only_clients_keep_is_not_attacked():
    kept = [FedBN(), FedBN()]
    for callback, who in zip(kept, ([], [4]), strict=True):
        train(small_cnn(), blobs(**FIVE), 1, [callback, Byzantine(SignFlip(), who)])
    for name, value in kept[0].memory[4].items():
        assert torch.equal(value, kept[1].memory[4][name])


def test_data_lie_with_all_clients_or_with_the_honest_ones():
    def histograms(partition):
        data = Digits(10, 4, partition=partition)
        data.prepare_data()
        data.setup("fit")
        return data.class_histograms()

    everyone = histograms(GammaSimilarity(0.0))
    honest = histograms(HonestOnly(GammaSimilarity(0.0), 3))
    assert sum(map(sum, honest[:7])) == sum(map(sum, everyone))
    assert honest[7:] == honest[:3]
    with pytest.raises(ConfigurationError, match=r"HonestOnly.attackers: 10 of 10 clients leave none honest"):
        histograms(HonestOnly(GammaSimilarity(0.0), 10))
