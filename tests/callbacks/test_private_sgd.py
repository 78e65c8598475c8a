"""DP-SGD at the clients: clipping of single samples, noise, its accountant, and what is refused."""

import math
from functools import partial

import lightning as L
import pytest
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fl_lightning import ConfigurationError, FederatedCallback, FederatedModule
from fl_lightning.callbacks import SCAFFOLD, FedBN, FedProx, FedTAN, FixBN, PrivateSGD
from fl_lightning.datamodules import TensorData
from fl_lightning.execution import GraphExecutor, SequentialExecutor, VectorizedExecutor
from fl_lightning.execution.strategy import CohortStrategy
from fl_lightning.methods.privacy import epsilon_of, noise_for
from tests.support.helpers import SaveRounds, blobs, distance, federated_run, small_cnn
from tests.support.private import of_rates, poisson, pretrained, steps_of

WITHOUT_PRIVACY = {"clip": math.inf, "noise": 0.0}
EXECUTORS = pytest.mark.parametrize(
    "executor",
    [SequentialExecutor, VectorizedExecutor, partial(VectorizedExecutor, block_size=2), GraphExecutor],
)


class Gradients(FederatedCallback):
    """Copies of the gradients by (round, client, step)."""

    def __init__(self):
        self.found = {}

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for row, client in enumerate(cohort.client_ids):
            parts = [x[row].flatten().clone() for x in cohort.grads.values()]
            self.found[cohort.round, client, step] = torch.cat(parts)


class TestClippedGradients:
    """What a local step computes before the noise."""

    @EXECUTORS
    def test_without_clipping_and_noise_a_run_with_frozen_statistics_is_that_of_fixbn(self, executor):
        callbacks = [FixBN(freeze_round=0)]
        plain = federated_run(*callbacks, data=of_rates(blobs()), model=pretrained).states
        private = federated_run(
            *callbacks, PrivateSGD(**WITHOUT_PRIVACY), data=of_rates(blobs()), model=pretrained, executor=executor()
        ).states  # fmt: skip
        assert max(distance(*pair) for pair in zip(plain, private, strict=True)) < 1e-12
        assert distance(plain[0], plain[-1]) > 0.01

    def test_a_step_is_the_sum_of_clipped_gradients_divided_by_the_expected_size(self):
        data, gradients = poisson(0.3), Gradients()
        model = torch.nn.Linear(4, 3).double()
        start = {name: value.detach().clone() for name, value in model.named_parameters()}
        federated_run(PrivateSGD(clip=0.7, noise=0.0, samples_at_once=4), gradients, data=data, model=model)
        assert {len(data.cohort_batch([c], [0]).batches()[0][1]) for c in range(3)} != {9}
        for client in range(3):
            inputs, targets = data.cohort_batch([client], [0]).batches()[0]
            total = torch.zeros(15, dtype=torch.float64)
            for x, y in zip(inputs.double(), targets, strict=True):
                alone = {name: value.clone().requires_grad_() for name, value in start.items()}
                loss = cross_entropy(functional_call(model, alone, (x[None],)), y[None])
                vector = torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(alone.values()))])
                total += vector * min(1.0, 0.7 / (float(vector.norm()) + 1e-6))
            torch.testing.assert_close(gradients.found[1, client, 0], total / 9, rtol=1e-10, atol=1e-12)

    def test_a_record_moves_the_clipped_sum_by_at_most_the_clipping_norm(self):
        """All records of a client in turn, with frozen statistics; with batch statistics, the bound fails."""
        clip, size = 0.5, 8
        everything = [torch.cat(x) for x in zip(*(c.dataset.tensors for c in blobs(1).clients), strict=True)]

        def clipped_sum(rows):
            (client,) = (data := blobs(1, sizes=(size,), batch_size=size)).clients
            client.dataset.tensors = tuple(part[rows] for part in everything)
            client.batch_size, gradients = len(rows), Gradients()
            federated_run(
                FixBN(freeze_round=0), PrivateSGD(clip, 0.0), gradients, data=of_rates(data), model=pretrained, rounds=1
            )  # fmt: skip
            return gradients.found[1, 0, 0] * len(rows)

        rows = torch.arange(size)
        whole = clipped_sum(rows)
        moved = [float((whole - clipped_sum(rows[rows != left])).norm()) for left in range(size)]
        assert max(moved) <= clip * (1 + 1e-9)
        assert max(moved) > clip * 0.9
        model = pretrained()
        parameters = dict(model.named_parameters())

        def with_batch_statistics(rows):
            inputs, targets = (part[rows] for part in everything)
            losses = cross_entropy(model(inputs), targets, reduction="none")
            total = torch.zeros(sum(x.numel() for x in parameters.values()), dtype=torch.float64)
            for loss in losses:
                parts = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
                vector = torch.cat([x.flatten() for x in parts])
                total += vector * min(1.0, clip / float(vector.norm()))
            return total

        whole = with_batch_statistics(rows)
        assert max(float((whole - with_batch_statistics(rows[rows != x])).norm()) for x in range(size)) > clip

    def test_dropout_has_a_mask_of_its_own_for_each_sample_under_every_executor(self):
        found = []
        for executor in (SequentialExecutor(), VectorizedExecutor()):
            data, gradients = poisson(1.0, size=12), Gradients()
            data.clients  # noqa: B018  # made in setup
            model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 3)).double()
            torch.nn.init.constant_(model[1].weight, 0.1)
            torch.nn.init.zeros_(model[1].bias)
            federated_run(
                PrivateSGD(**WITHOUT_PRIVACY), gradients, data=data, model=model, executor=executor, rounds=1
            )
            found.append(gradients.found)
        assert all(
            distance({"": a}, {"": b}) < 1e-14 for a, b in zip(*(x.values() for x in found), strict=True)
        )
        # with one mask for all samples, whole columns of the weight's gradient would be 0
        assert (found[0][1, 0, 0].view(-1)[:12] != 0).all()

    @pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
    def test_a_record_without_a_finite_gradient_adds_nothing(self, value):
        """Otherwise the record would decide whether its client diverges."""
        data = poisson(1.0)
        data.setup("fit")
        data.samples.inputs[data.distribution.clients[1][0]] = value
        gradients = Gradients()
        run = federated_run(
            PrivateSGD(1.0, 1.0), gradients, data=data, model=torch.nn.Linear(4, 3).double(),
            executor=VectorizedExecutor(), on_divergence="drop", rounds=1,
        )  # fmt: skip
        assert all(found.isfinite().all() for found in gradients.found.values())
        assert [*run.clients.end[1]] == [0, 1, 2]
        assert all(value.isfinite().all() for value in run.module.state_dict().values())


class TestNoise:
    """The noise of a local step, and when it is added."""

    def test_an_empty_batch_is_a_step_of_noise_with_the_stated_variance(self):
        clip, noise, data = 0.5, 2.0, poisson(1 / 30)
        data.setup("fit")
        for client in data.clients:
            client.sampling_rate = 1e-12  # no sample is drawn; b stays known
        gradients, private = Gradients(), PrivateSGD(clip, noise)
        model = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.Linear(300, 3)).double()
        federated_run(private, gradients, data=data, model=model, rounds=4)
        expected = 1e-12 * 30
        drawn = torch.stack([*gradients.found.values()]) * expected / (noise * clip)
        count = drawn.numel()
        assert len(gradients.found) == 4 * 3 * 2
        assert steps_of(private) == {0: 8, 1: 8, 2: 8}
        # chi-square with so many degrees of freedom, five standard deviations
        assert abs(float(drawn.square().sum()) - count) < 5 * math.sqrt(2 * count)
        assert abs(float(drawn.sum())) < 5 * math.sqrt(count)
        correlations = torch.corrcoef(drawn) - torch.eye(len(drawn), dtype=torch.float64)
        assert correlations.abs().max() < 6 / math.sqrt(drawn.shape[1])  # new in each round, client and step

    def test_the_client_optimizer_averages_the_noisy_gradients(self):
        data, gradients = poisson(0.3), Gradients()
        optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        model = torch.nn.Linear(4, 3).double()
        start = torch.cat([value.detach().clone().flatten() for value in model.parameters()])
        run = federated_run(
            PrivateSGD(0.5, 1.0), gradients, data=data, model=model, rounds=1, local_steps=3, client_optimizer=optimizer
        )  # fmt: skip
        for client in range(3):
            velocity, moved = torch.zeros_like(start), start.clone()
            for step in range(3):
                velocity = 0.9 * velocity + gradients.found[1, client, step]
                moved -= 0.1 * velocity
            end = torch.cat([run.clients.end[1][client][f"{n}"].flatten() for n in ("weight", "bias")])
            torch.testing.assert_close(end, moved, rtol=1e-12, atol=1e-14)

    @pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
    def test_two_ranks_and_a_resumed_run_draw_the_same(self, executor, tmp_path):
        def run(*callbacks, **settings):
            private = PrivateSGD(0.5, 1.0)
            model = torch.nn.Linear(4, 3).double()
            torch.nn.init.constant_(model.weight, 0.1)
            torch.nn.init.zeros_(model.bias)
            settings = {"data": poisson(0.3), "model": model, "executor": executor(), "rounds": 4, **settings}
            found = federated_run(private, *callbacks, participation=2, **settings)
            return found.states[-1], private

        whole, private = run(SaveRounds(tmp_path))
        resumed, again = run(ckpt_path=tmp_path / "2.ckpt")
        assert distance(whole, resumed) == 0
        assert again.history == private.history
        assert again.epsilons() == private.epsilons()
        ranks, of_ranks = run(trainer={"devices": 2, "strategy": CohortStrategy()})
        assert distance(whole, ranks) < 1e-14
        assert of_ranks.epsilons() == private.epsilons()


class TestAccountant:
    """Epsilon of each client."""

    @pytest.mark.parametrize(
        ("rate", "noise", "steps", "delta", "epsilon"),
        [
            (0.01, 1.0, 1000, 1e-5, 2.101365),
            (0.05, 1.0, 200, 1e-5, 5.367641),
            (0.002, 1.0, 32000, 1e-5, 2.068667),
            (1.0, 10.0, 1, 1e-5, 0.375291),
            (0.5, 4.0, 100, 1e-4, 5.623764),
        ],
    )
    def test_epsilon_is_that_of_opacus(self, rate, noise, steps, delta, epsilon):
        assert epsilon_of(((noise, rate, steps),), delta) == pytest.approx(epsilon, abs=1e-6)
        assert epsilon_of(
            ((noise, rate, steps // 2), (noise, rate, steps - steps // 2)), delta
        ) == pytest.approx(epsilon, abs=1e-6)
        tight = epsilon_of(((noise, rate, steps),), delta, "prv")
        assert 0.8 * epsilon < tight < epsilon

    def test_each_client_has_its_own_epsilon_which_grows_with_its_own_rounds(self):
        private, seen = PrivateSGD(0.5, 1.0), []

        class Epsilons(FederatedCallback):
            def on_round_end(self, trainer, pl_module, cohort):
                seen.append((set(cohort.client_ids), private.epsilons(), steps_of(private)))

        data = of_rates(blobs(3, (40, 80, 16)))
        run = federated_run(private, Epsilons(), data=data, model=partial(small_cnn, "gn"), participation=2, rounds=5)  # fmt: skip
        for before, (clients, epsilons, steps) in zip([(set(), {}, {}), *seen], seen, strict=False):
            for client in range(3):
                name = f"client {client}"
                grown = epsilons.get(name, 0.0) > before[1].get(name, 0.0)
                assert grown == (client in clients)
                assert steps.get(client, 0) - before[2].get(client, 0) == 2 * (client in clients)
        last = seen[-1][1]
        for client, size in enumerate((40, 80, 16)):
            history = ((1.0, 8 / size, seen[-1][2][client]),)
            assert last[f"client {client}"] == epsilon_of(history, 1e-5)
        assert private.result() == {"privacy/epsilon": max(last.values())}
        assert run.rows[5]["privacy/epsilon"] == pytest.approx(max(last.values()), rel=1e-6)
        (table,) = private.tables().values()
        assert [row[0] for row in table.rows] == [*last]

    def test_the_unit_of_subjects_with_several_records_is_said(self):
        features, targets = torch.randn(40, 4, dtype=torch.float64), torch.arange(40) % 3
        subjects = torch.arange(40) // 4
        data = TensorData(
            features,
            targets,
            subjects=subjects,
            test_fraction=0.2,
            num_clients=1,
            batch_size=8,
            sampling="poisson",
        )
        private = PrivateSGD(0.5, 1.0)
        federated_run(private, data=data, model=torch.nn.Linear(4, 3).double(), rounds=1)
        assert private.result_lines()["privacy"].endswith(
            "unit: one record of a client, not a subject, who has up to 4 records"
        )

    def test_the_noise_of_a_wanted_epsilon_reaches_it_in_the_planned_rounds(self):
        private = PrivateSGD(0.5, epsilon=2.0)
        data = of_rates(blobs(3, (40, 80, 16)))
        federated_run(private, data=data, model=partial(small_cnn, "gn"), participation=2, rounds=5)
        assert 1.99 < max(private.epsilons().values()) <= 2.0
        needed = [
            noise_for(2.0, 1e-5, 8 / (40, 80, 16)[client], steps, "rdp")
            for client, steps in steps_of(private).items()
        ]
        assert private.planned_noise == pytest.approx(max(needed), rel=0.002)

    def test_a_plan_in_which_nobody_trains_has_no_noise_to_find(self):
        settings = {"participation": 0.001, "cohort_sampling": "poisson", "model": partial(small_cnn, "gn")}
        with pytest.raises(
            ConfigurationError, match=r"PrivateSGD\.epsilon: no client trains in the planned rounds"
        ):
            federated_run(PrivateSGD(0.5, epsilon=2.0), data=of_rates(blobs()), rounds=2, **settings)

    def test_without_noise_there_is_no_privacy_and_no_epsilon(self):
        private = PrivateSGD(0.5, 0.0)
        run = federated_run(private, data=poisson(0.3), model=torch.nn.Linear(4, 3).double())
        assert private.result_lines() == {"privacy": "none, as the noise is 0"}
        assert private.result() == {}
        assert "privacy/epsilon" not in run.rows[3]


class TestStages:
    """FixBN's two stages."""

    def test_only_the_second_stage_is_protected_and_the_result_says_so(self):
        private, gradients = PrivateSGD(0.5, 1.0, second_stage_only=True), Gradients()
        data = of_rates(blobs())
        run = federated_run(FixBN(freeze_round=2), private, gradients, data=data, rounds=5)
        plain = federated_run(FixBN(freeze_round=2), data=of_rates(blobs()), rounds=5)
        apart = [distance(*pair) for pair in zip(run.states, plain.states, strict=True)]
        assert apart[:3] == [0, 0, 0]
        assert apart[3] > 1e-3
        assert steps_of(private) == {0: 6, 1: 6, 2: 6}
        assert private.result_lines()["privacy"].startswith(
            "no guarantee: rounds 1 to 2 trained without protection; second stage: epsilon "
        )
        assert [*private.result()] == ["privacy/epsilon_of_second_stage"]

    def test_a_run_that_never_freezes_is_said_to_be_unprotected(self):
        private = PrivateSGD(0.5, 1.0, second_stage_only=True)
        federated_run(private, data=of_rates(blobs()), rounds=3)
        assert private.result_lines() == {
            "privacy": "no guarantee: rounds 1 to 3 trained without protection; second stage: no round is protected"
        }

    def test_a_first_stage_skips_clients_that_draw_no_sample(self):
        data = poisson(1 / 30, size=30)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3)).double()
        model.append(torch.nn.Unflatten(1, (3, 1))).append(torch.nn.Flatten())
        norm = torch.nn.Sequential(
            torch.nn.Unflatten(1, (1, 2, 2)), torch.nn.BatchNorm2d(1), torch.nn.Flatten(), model
        )
        private = PrivateSGD(0.5, 1.0, second_stage_only=True)
        run = federated_run(FixBN(freeze_round=3), private, data=data, model=norm.double(), rounds=5)
        sizes = {len(data.cohort_batch([c], [s]).batches()[0][1]) for c in range(3) for s in range(6)}
        assert 0 in sizes
        assert all(value.isfinite().all() for value in run.states[-1].values())


class Counted(torch.nn.Module):
    """Counts its samples in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, inputs):
        self.total = self.total + inputs.sum()
        return inputs


class TestRefusals:
    """What cannot be private ends with one line before anything is trained."""

    @pytest.mark.parametrize(
        ("callbacks", "settings", "message"),
        [
            ([], {}, "BN layer '1' normalises with its batch in round 1"),
            ([FixBN(freeze_round=2)], {}, "BN layer '1' normalises with its batch in round 1"),
            ([FedBN()], {}, "BN layer '1' normalises with its batch in round 1"),
            ([FedTAN()], {}, "FedTAN sends values that no noise protects"),
            (
                [SCAFFOLD()],
                {"model": partial(small_cnn, "gn")},
                "SCAFFOLD sends values that no noise protects",
            ),
            ([], {"model": partial(small_cnn, "gn"), "centralised": True}, "centralised training joins"),
            (
                [],
                {"model": partial(small_cnn, "gn"), "weighting": "samples"},
                "model.weighting: samples tells",
            ),
            (
                [],
                {
                    "model": partial(small_cnn, "gn"),
                    "loss": torch.nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]).double()),
                },
                "the mean of a single sample has no weight",
            ),
            (
                [],
                {"model": lambda: torch.nn.Sequential(Counted(), small_cnn("gn"))},
                "changes the buffer '0.total'",
            ),
        ],
    )
    def test_runs_that_no_noise_protects(self, callbacks, settings, message):
        with pytest.raises(ConfigurationError, match=f"^PrivateSGD: .*{message}"):
            federated_run(*callbacks, PrivateSGD(1.0, 1.0), data=of_rates(blobs()), **settings)

    def test_batches_that_are_no_poisson_samples(self):
        with pytest.raises(ConfigurationError, match="the batches of client 0 are no Poisson samples"):
            federated_run(PrivateSGD(1.0, 1.0), data=blobs(), model=partial(small_cnn, "gn"))
        with pytest.raises(ConfigurationError, match=r"^data\.sampling: poisson draws batches of any size"):
            federated_run(data=poisson(0.3), model=torch.nn.Linear(4, 3).double())

    def test_a_lightning_module(self):
        class Module(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 3)

            def training_step(self, batch, batch_idx):
                return cross_entropy(self.layer(batch[0]), batch[1])

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        module = FederatedModule(Module().double(), local_steps=1)
        runner = L.Trainer(max_epochs=1, callbacks=[PrivateSGD(1.0, 1.0)], logger=False, accelerator="cpu")
        with pytest.raises(ConfigurationError, match=r"^PrivateSGD: a LightningModule's training_step"):
            runner.fit(module, datamodule=poisson(0.3))

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"clip": 1.0}, "noise=None and epsilon=None; give one"),
            ({"clip": 1.0, "noise": 1.0, "epsilon": 1.0}, "noise=1.0 and epsilon=1.0; give one"),
            ({"clip": 0.0, "noise": 1.0}, "PrivateSGD.clip"),
            ({"clip": math.inf, "noise": 1.0}, "PrivateSGD.clip: inf needs noise: 0"),
            ({"clip": 1.0, "noise": -1.0}, "PrivateSGD.noise"),
            ({"clip": 1.0, "epsilon": 0.0}, "PrivateSGD.epsilon"),
            ({"clip": 1.0, "noise": 1.0, "delta": 1.0}, "PrivateSGD.delta"),
            ({"clip": 1.0, "noise": 1.0, "accountant": "moments"}, "PrivateSGD.accountant"),
            ({"clip": 1.0, "noise": 1.0, "samples_at_once": 0}, "PrivateSGD.samples_at_once"),
        ],
    )
    def test_settings_out_of_range(self, settings, message):
        with pytest.raises(ConfigurationError, match=message):
            PrivateSGD(**settings)

    def test_a_method_without_values_of_its_own_is_allowed_and_only_sees_noise(self):
        data = of_rates(blobs())
        run = federated_run(FedProx(0.1), PrivateSGD(1.0, 1.0), data=data, model=partial(small_cnn, "gn"))
        assert all(value.isfinite().all() for value in run.states[-1].values())

    def test_a_missing_accountant(self, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "opacus.accountants", None)
        with pytest.raises(ConfigurationError, match=r"pip install 'fl_lightning\[privacy\]'"):
            PrivateSGD(1.0, 1.0)


class TestResumed:
    """A resumed run counts what was used before."""

    def saved(self, folder, *callbacks, **settings):
        model = torch.nn.Linear(4, 3).double()
        settings = {"data": poisson(0.9), "model": model, "rounds": 3, **settings}
        federated_run(*callbacks, SaveRounds(folder), **settings)
        return folder / "3.ckpt"

    def resumed(self, path, private, **settings):
        settings = {"data": poisson(0.9), "model": torch.nn.Linear(4, 3).double(), "rounds": 4, **settings}
        federated_run(private, ckpt_path=path, **settings)
        return private.histories()["client 0"]

    def test_rounds_without_the_method_are_refused(self, tmp_path):
        plain = {"data": blobs(), "model": partial(small_cnn, "gn")}
        path = self.saved(tmp_path, **plain)
        with pytest.raises(ConfigurationError, match="rounds 1 to 3 of the resumed run trained without it"):
            self.resumed(path, PrivateSGD(0.5, 1.0), data=of_rates(blobs()), model=partial(small_cnn, "gn"))

    @pytest.mark.parametrize(
        ("first", "second", "rate", "history"),
        [
            ({"noise": 1.0}, {"noise": 1.0}, 0.9, ((1.0, 0.9, 8),)),
            ({"noise": 1.0}, {"noise": 2.0}, 0.9, ((1.0, 0.9, 6), (2.0, 0.9, 2))),
            ({"noise": 1.0}, {"noise": 1.0}, 0.2, ((1.0, 0.9, 6), (1.0, 0.2, 2))),
            ({"noise": 0.0}, {"noise": 2.0}, 0.9, ((0.0, 0.9, 6), (2.0, 0.9, 2))),
        ],
    )
    def test_other_settings_are_further_steps(self, first, second, rate, history, tmp_path):
        path = self.saved(tmp_path, PrivateSGD(0.5, **first))
        private = PrivateSGD(0.5, **second)
        assert self.resumed(path, private, data=poisson(rate)) == history
        if first["noise"]:
            assert private.epsilons()["client 0"] == epsilon_of(history, 1e-5)
        else:
            assert private.result_lines()["privacy"] == "none, as the noise is 0"

    @pytest.mark.parametrize("first", [{"noise": 1.0}, {"epsilon": 60.0}, {"noise": 0.0}])
    def test_another_epsilon_is_refused(self, first, tmp_path):
        path = self.saved(tmp_path, PrivateSGD(0.5, **first))
        with pytest.raises(
            ConfigurationError, match=r"PrivateSGD\.epsilon: 50\.0 is not that of the resumed run"
        ):
            self.resumed(path, PrivateSGD(0.5, epsilon=50.0))

    def test_the_same_epsilon_keeps_its_noise_beyond_the_planned_rounds(self, tmp_path):
        first = PrivateSGD(0.5, epsilon=60.0)
        path, second = self.saved(tmp_path, first), PrivateSGD(0.5, epsilon=60.0)
        self.resumed(path, second)
        assert second.planned_noise == first.planned_noise
        assert max(second.epsilons().values()) > 60  # one more round than planned
