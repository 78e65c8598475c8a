"""HBN of Chen et al., arXiv 2505.21877, by hand."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning import ConfigurationError, FederatedModule, SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import MTFL, FedPer, HybridBN
from fl_lightning.callbacks.hybrid_bn import _pooled
from fl_lightning.experiments.run.trainer import make_trainer
from fl_lightning.round.plan import sample_cohort
from tests.support.helpers import SaveRounds, blobs, client_batch, distance, federated_run, small_cnn, train

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
EVALUATED = {"limit_val_batches": 1.0}
STEPS, ROUNDS, LR = 2, 4, 0.1


class ByHand(nn.Module):
    """A layer whose statistics are tensors, and whose factor w is a parameter."""

    def __init__(self, layer, mix):
        super().__init__()
        channels = layer.num_features
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps
        self.w = nn.Parameter(torch.zeros(channels)) if mix is None else None
        self.m, self.v, self.mix = torch.zeros(channels), torch.ones(channels), mix

    def forward(self, x):
        u, s = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
        a = self.mix if self.w is None else 1 / (1 + (-self.w).exp())
        mean, var = self.m + a * (u - self.m), self.v + a * (s - self.v)
        self.used, self.batch = (mean.detach(), var.detach()), (u.detach(), s.detach())
        shape = (-1, 1, 1)
        scaled = (x - mean.view(shape)) / (var.view(shape) + self.eps).sqrt()
        return scaled * self.weight.view(shape) + self.bias.view(shape)


def by_hand(data, mix=None, rate=0.3, collect="mixed", participation=3, pass_steps=2, mutant=None):
    """Separate models of all clients: the server's parameters and statistics after the last round."""
    server = deepcopy(small_cnn()).double()
    for place in (1, 4):
        server[place] = ByHand(server[place], mix).double()
        server[place].m, server[place].v = server[place].m.double(), server[place].v.double()
    own = {}
    for number in range(ROUNDS):
        models, sent = [], []
        clients = sample_cohort(3, participation, 0, number + 1)
        for client in clients:
            local = deepcopy(server)
            if client in own and mutant != "averaged w":
                local[1].w.data, local[4].w.data = (x.clone() for x in own[client])
            elif mix is None and mutant != "averaged w":
                local[1].w.data.zero_(), local[4].w.data.zero_()
            first = number * STEPS
            inputs = torch.cat([client_batch(data, client, first + k)[0] for k in range(pass_steps)])
            with torch.no_grad():
                local(inputs)
            sent.append([layer.used if collect == "mixed" else layer.batch for layer in (local[1], local[4])])
            optimizer = torch.optim.SGD(local.parameters(), lr=LR)
            for k in range(STEPS):
                inputs, targets = client_batch(data, client, first + k)
                optimizer.zero_grad()
                F.cross_entropy(local(inputs), targets).backward()
                optimizer.step()
            models.append(local)
            if mix is None:
                own[client] = [local[1].w.detach(), local[4].w.detach()]
        with torch.no_grad():
            for name, parameter in server.named_parameters():
                held = [dict(local.named_parameters())[name] for local in models]
                parameter.copy_(torch.stack(held).mean(0))
        samples = 8 * pass_steps
        for place, layer in enumerate((server[1], server[4])):
            means = torch.stack([each[place][0] for each in sent])
            variances = torch.stack([each[place][1] for each in sent])
            mean, total = means.mean(0), samples * len(clients)
            between = 0 if mutant == "no variance between clients" else (means - mean).square()
            divisor = total if mutant == "N" else total - 1
            layer.m = (1 - rate) * layer.m + rate * mean
            layer.v = (1 - rate) * layer.v + rate * (samples * (variances + between)).sum(0) / divisor
    names = [name for name, _ in server.named_parameters() if not name.endswith(".w")]
    state = {name: server.get_parameter(name).detach() for name in names}
    for place in (1, 4):
        state |= {f"{place}.running_mean": server[place].m, f"{place}.running_var": server[place].v}
    return state


def found(executor=SequentialExecutor, participation=3, **settings):
    settings = {"rate": 0.3, "samples": 16, **settings}
    run = {"rounds": ROUNDS, "local_steps": STEPS, "participation": participation, "executor": executor()}
    return train(small_cnn(), blobs(), callbacks=[HybridBN(**settings)], **run)


def pooled(rows, counts):
    passes = {"HybridBN samples": torch.tensor(counts).double(), "HybridBN 1": rows}
    return _pooled(passes, ["1"]).values()


def gap(state, reference):
    return distance({name: state[name] for name in reference}, reference)


@EXECUTORS
@pytest.mark.parametrize("participation", [3, 2])
@pytest.mark.parametrize("settings", [{}, {"mix": 0.3, "collect": "batch"}], ids=["trained", "fixed"])
def test_it_equals_the_method_by_hand(executor, participation, settings):
    reference = partial(by_hand, blobs(), participation=participation, **settings)
    state = found(executor, participation, **settings)
    assert gap(state, reference()) < 1e-10
    mutants = ("no variance between clients", "N") + (() if settings else ("averaged w",))
    for mutant in mutants:
        assert gap(state, reference(mutant=mutant)) > 1e-5


@EXECUTORS
def test_with_the_factor_1_the_weights_are_those_of_bn(executor):
    bn = train(small_cnn(), blobs(), rounds=ROUNDS, local_steps=STEPS, executor=executor())
    weights = {name: bn[name] for name, _ in small_cnn().named_parameters()}
    assert gap(found(executor, mix=1.0), weights) < 1e-10
    assert gap(found(executor, mix=0.9), weights) > 1e-4


@EXECUTORS
def test_with_the_factor_0_clients_train_with_the_servers_statistics_as_in_eval_mode(executor):
    data, server = blobs(), deepcopy(small_cnn()).double()
    for number in range(ROUNDS):
        models = []
        for client in range(3):
            local = deepcopy(server).eval()  # FixBN after T*
            optimizer = torch.optim.SGD(local.parameters(), lr=LR)
            for k in range(STEPS):
                inputs, targets = client_batch(data, client, number * STEPS + k)
                optimizer.zero_grad()
                F.cross_entropy(local(inputs), targets).backward()
                optimizer.step()
            models.append(local)
        for name, parameter in server.named_parameters():
            parameter.data = torch.stack(
                [dict(local.named_parameters())[name].detach() for local in models]
            ).mean(0)
    reference = {name: parameter.detach() for name, parameter in server.named_parameters()}
    assert gap(found(executor, mix=0.0, rate=0.0), reference) < 1e-10


def test_the_gradient_of_w_is_that_of_the_formula():
    torch.manual_seed(0)
    layer, x = ByHand(nn.BatchNorm2d(2), None).double(), 3 + 2 * torch.randn(4, 2, 3, 3).double()
    mean, var = (torch.randn(2).double() for _ in range(2))
    layer.m, layer.v = mean, var.exp()
    layer(x).sin().sum().backward()
    u, s, a = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0), 0.5
    used = [(mean + a * (u - mean)).requires_grad_(), (var.exp() + a * (s - var.exp())).requires_grad_()]
    y = (x - used[0].view(-1, 1, 1)) / (used[1].view(-1, 1, 1) + 1e-5).sqrt()
    at_mean, at_var = torch.autograd.grad(y.sin().sum(), used)
    by_formula = a * (1 - a) * ((u - mean) * at_mean + (s - var.exp()) * at_var)
    assert torch.allclose(layer.w.grad, by_formula, atol=1e-12)


def test_the_server_pools_mixed_statistics_of_two_clients_far_apart():
    rows = torch.tensor([[[0.0], [1.0]], [[5.0], [1.0]]]).double()  # a = 1/2 of means 0 and 10
    mean, variance = pooled(rows, [1e9, 1e9])
    assert (float(mean), float(variance)) == pytest.approx((2.5, 7.25), rel=1e-8)


def test_clients_keep_their_factors():
    state = train(
        small_cnn(), blobs(), rounds=2, local_steps=STEPS, callbacks=[method := HybridBN(samples=16)]
    )
    assert {"batch_norm@1.mix", "batch_norm@4.mix"} == set(method.memory[0])
    assert not torch.equal(method.memory[0]["batch_norm@1.mix"], method.memory[1]["batch_norm@1.mix"])
    assert "1.mix" in state  # the mean over the clients, which no evaluation reads


class Recorded(HybridBN):
    def variants(self, trainer, pl_module):
        self.found = super().variants(trainer, pl_module)
        return self.found


def test_a_second_accuracy_is_that_of_another_pass_with_the_new_weights():
    run = federated_run(
        method := Recorded(mix=1.0, samples=16), rounds=2, local_steps=STEPS, trainer=EVALUATED
    )
    variant = method.found["pass"]
    model, sent = small_cnn().double().train(), []
    model.load_state_dict(run.module.model.state_dict())
    for client in range(3):
        seen = []
        hook = model[1].register_forward_pre_hook(
            lambda _, inputs, seen=seen: seen.append(inputs[0].detach())
        )
        model(torch.cat([client_batch(blobs(), client, STEPS + k)[0] for k in range(2)]))
        hook.remove()
        sent.append(seen[0].transpose(0, 1).flatten(1))
    means, variances = (
        torch.stack([f(x) for x in sent]) for f in (lambda x: x.mean(1), lambda x: x.var(1, correction=0))
    )
    mean = means.mean(0)
    variance = (variances + (means - mean).square()).mean(0) * 48 / 47
    assert torch.allclose(variant["1.running_mean"], mean, atol=1e-12)
    assert torch.allclose(variant["1.running_var"], variance, atol=1e-12)
    found = float(run.trainer.callback_metrics["val/accuracy_pass"])
    run.trainer.test(run.module, blobs(), verbose=False)  # the same data, and layers without a pass
    assert float(run.trainer.callback_metrics["test/accuracy_pass"]) == found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mix": 1.5}, r"HybridBN.mix: 1.5 must be at least 0 and at most 1 \(or null: trained\)"),
        ({"samples": 1}, "HybridBN.samples: 1 must be at least 2"),
        ({"collect": "all"}, "HybridBN.collect: 'all' must be one of mixed, batch"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        HybridBN(**settings)


def test_a_pass_reads_whole_batches_and_weighs_clients_by_their_samples():
    """17 samples are three batches of 8, as far as the round has them. Rows of unequal passes are weighed."""

    class Counted(HybridBN):
        def on_round_start(self, trainer, pl_module, cohort):
            super().on_round_start(trainer, pl_module, cohort)
            self.counts = cohort.extra["HybridBN samples"].tolist()

    federated_run(method := Counted(mix=1.0, samples=17), rounds=2, local_steps=4)
    assert method.counts == [24.0] * 3
    federated_run(method := Counted(mix=1.0, samples=99), rounds=2, local_steps=STEPS)
    assert method.counts == [16.0] * 3
    rows = torch.tensor([[[0.0], [1.0]], [[4.0], [2.0]]]).double()
    mean, variance = pooled(rows, [3.0, 1.0])
    assert float(mean) == pytest.approx(1.0)
    assert float(variance) == pytest.approx((3 * (1 + 1) + 1 * (2 + 9)) / 3)


class Compared(HybridBN):
    """Compares a pass of one batch with the first local step, which reads the same batch."""

    def on_before_aggregate(self, trainer, pl_module, cohort):
        super().on_before_aggregate(trainer, pl_module, cohort)
        for layer in ("1", "4"):
            step = torch.stack([cohort.buffers[f"{layer}.sent_{x}"] for x in ("mean", "var")], 1)
            assert float((step - cohort.extra[f"HybridBN {layer}"]).abs().max()) < 1e-12


@pytest.mark.parametrize("others", [list, lambda: [FedPer(head="4")], lambda: [MTFL()]])
def test_a_pass_starts_from_the_clients_own_state(others):
    federated_run(*others(), Compared(rate=0.5, samples=8), rounds=3, local_steps=1)


class Noise(nn.Module):
    """Random augmentation of the model's own, in training and in evaluation."""

    def forward(self, x):
        return x + torch.rand_like(x[:1])


class LastOne(list):
    """A cohort of the last client of a cohort."""

    def __init__(self, cohort):
        super().__init__(cohort.client_ids[-1:])
        self.client_ids, self.round = [*self], cohort.round


class Apart(HybridBN):
    def _passes(self, pl_module, cohort, state):
        every = super()._passes(pl_module, cohort, state)
        last = super()._passes(pl_module, LastOne(cohort), lambda row: state(len(cohort) - 1))
        assert all(torch.equal(every[name][-1:], last[name]) for name in every)
        return every


def test_a_pass_is_without_dropout_and_draws_numbers_of_its_own():
    def served(*first):
        model = nn.Sequential(small_cnn()[:1], *first, *small_cnn()[1:])
        run = federated_run(Apart(mix=1.0, rate=1.0, samples=16), model=model, rounds=1, local_steps=STEPS)
        layer = run.module.model[1 + len(first)]
        return torch.stack([layer.running_mean, layer.running_var])

    assert torch.equal(served(nn.Dropout(0.5)), served())
    assert not torch.equal(served(Noise()), served())


def test_a_new_process_tests_with_another_pass(tmp_path):
    """The checkpoint has what the pass reads, and a head with BN keeps w under another name."""
    settings = {"samples": 16}
    for others in (list, lambda: [FedPer(head="4")]):
        saving = SaveRounds(tmp_path)
        run = federated_run(
            *others(), HybridBN(**settings), saving, rounds=2, local_steps=STEPS, trainer=EVALUATED
        )
        found = float(run.trainer.callback_metrics["val/accuracy_pass"])
        fresh = FederatedModule(small_cnn().double(), lambda p: torch.optim.SGD(p, lr=LR), local_steps=STEPS)
        trainer = make_trainer(
            {"accelerator": "cpu", "logger": False, "enable_progress_bar": False},
            callbacks=[*others(), HybridBN(**settings)],
        )
        trainer.test(fresh, blobs(), ckpt_path=tmp_path / "2.ckpt", verbose=False)
        assert float(trainer.callback_metrics["test/accuracy_pass"]) == found
