"""Gradient inversion, after Geiping et al., "Inverting Gradients", arXiv 2003.14053."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.nn.functional import normalize

from fl_lightning import Cohort, ConfigurationError, FederatedModule
from fl_lightning.batch_norm import averaging_by, mean_of_all
from fl_lightning.callbacks.observers.gradient_deviation import cohort_beside, first_executor
from fl_lightning.callbacks.observers.simulated_steps import (
    SENT,
    Step,
    first_batches,
    simulated_step,
    without_dropout,
)
from fl_lightning.client_data import BatchStack
from fl_lightning.errors import check_at_least
from fl_lightning.methods import Drawing, MetricRows, Observer, Report, Table, evenly_spaced
from fl_lightning.pictures import inversion_figure
from fl_lightning.randomness import generator

_RATE, _SMOOTHNESS, _PRIOR = 0.1, 1e-3, 0.1
_MOST_SHOWN = 4
_LABELS = {"": "gradient", "_statistics": "and BN", "_mean_image": "mean image"}
_ENDINGS = {label: ending for ending, label in _LABELS.items()}


class _Victims(NamedTuple):
    """Clients that are attacked together.

    Attributes:
        rows: Clients of a simulated step, as indices into the cohort.
        places: The attacked clients, as indices into ``rows``.
        inputs: Inputs ``[rows, b, ...]``.
        targets: Targets ``[rows, b, ...]``.
    """

    rows: list[int]
    places: list[int]
    inputs: Tensor
    targets: Tensor


class _Scale(NamedTuple):
    """Mean and deviation of each channel of the inputs, and the range of standardised inputs."""

    mean: Tensor
    deviation: Tensor
    low: float
    high: float

    @classmethod
    def of(cls, inputs: Tensor) -> "_Scale":
        """Return the scale of inputs ``[n, ...]``; their channels are dimension 1."""
        dims = [dim for dim in range(inputs.dim()) if dim != 1]
        deviation, mean = torch.std_mean(inputs, dims, correction=0, keepdim=True)
        deviation = torch.where(deviation > 0, deviation, 1)
        scaled = (inputs - mean) / deviation
        return cls(mean, deviation, float(scaled.min()), float(scaled.max()))

    def to(self, inputs: Tensor) -> Tensor:
        """Return standardised inputs."""
        return (inputs - self.mean) / self.deviation

    def back(self, inputs: Tensor) -> Tensor:
        """Return the inputs whose standardised values are given."""
        return inputs * self.deviation + self.mean


class GradientInversion(Report, Observer):
    """Observer: how well training samples can be reconstructed from a client's first gradient.

    The attack runs in rounds that an evaluation follows, and in the last round. The attacker is a
    server that knows the model, the method, the labels, and a client's gradient on a batch of 1 or 4
    samples. The attacker also knows the mean, the standard deviation and the range of the inputs,
    which are those of the cohort's first batches in this round. Inputs are standardised with the
    mean and deviation of each channel of an image, or of each feature of a table. The attacker
    minimises, over the inputs::

        1 - cos(gradient of the inputs, gradient of the client) + 0.001 total variation

    The attack takes 500 steps of Adam from random inputs. The learning rate falls from 0.1 to 0.0001.
    The paper's attack takes more steps, uses signs of gradients, and restarts.

    A second attack also knows BN statistics. It adds a penalty: 0.1 times the squared relative
    difference between the BN statistics of the reconstruction and the known ones, averaged over the
    layers. If clients send BN statistics, the known statistics are the mean and variance of the
    batch. The server can compute them from what a client sends after one local step. With HybridBN,
    the server cannot, but the attacker gets them. If BN statistics are frozen, the known statistics
    are the server's. Otherwise there is no second attack.

    The setting favours the attacker: clients in practice have larger batches, take several local
    steps, and keep labels to themselves. The attacker also knows a client's local parameters, such
    as gamma and beta of FedBN. With a joint forward pass (FedTAN), the attacker also knows the
    batches of the other clients. Dropout is off. A failed attack does not show that the data are
    safe, because a stronger attack may succeed.

    If a method changes the gradient at the client, the attack gets the changed gradient only for
    ``PrivateSGD``, with the client's noise. It gets the gradient of the loss otherwise.

    The metrics are means over the attacked clients, for standardised inputs. Samples of a batch are
    matched so that the squared error is smallest.

    - ``privacy/psnr_batch_<b>``: PSNR (peak signal-to-noise ratio) of the reconstructions from
      batches of b samples, ``10 log10(range^2 / mean squared error)`` in dB.
    - ``privacy/correlation_batch_<b>``: Mean correlation of a reconstruction with the true sample,
      which does not depend on contrast.
    - ``..._statistics``: The same for the second attack.
    - ``..._mean_image``: The same for the mean of the other clients' first batches, which needs no
      attack. An attack with a correlation below this baseline has failed.

    Files: ``inversion.csv`` has the values of each client. ``inversion.png`` shows training images
    and reconstructions of the newest attack. Attack only data that you are allowed to see.

    Args:
        batch_sizes: Numbers of samples of a batch, each at least 1. The first samples of the
            client's first batch in this round are attacked. A client whose first batch has fewer
            samples is not attacked.
        clients: Number of attacked clients, evenly spaced in the cohort.
        iterations: Number of steps of the attack. On a CPU, 500 steps on three clients of Digits
            with a ResNet-8 of width 8 take about 10 seconds, and three times as long for FedTAN.

    Raises:
        ConfigurationError: A setting is out of range, the clients' samples are no pairs of
            floating-point inputs and targets, or the model cannot be simulated.
    """

    paper = "after Geiping et al., arXiv 2003.14053 (an observer: measurement only)"
    examples = ({"clients": 1, "iterations": 5}, {"batch_sizes": [2], "clients": 1, "iterations": 2})
    saved = ("history",)

    def __init__(self, batch_sizes: Sequence[int] = (1, 4), clients: int = 3, iterations: int = 500) -> None:
        sizes = [*batch_sizes] if isinstance(batch_sizes, list | tuple) else []
        for size in sizes:
            check_at_least(1, **{"GradientInversion.batch_sizes": size})
        if not sizes or len({*sizes}) < len(sizes):
            raise ConfigurationError(
                f"GradientInversion.batch_sizes: {batch_sizes!r} must be a list of different numbers, such as [1, 4]"
            )
        check_at_least(
            1, **{"GradientInversion.clients": clients, "GradientInversion.iterations": iterations}
        )
        self.batch_sizes, self.clients, self.iterations = sizes, clients, iterations
        self.start_anew()

    def start_anew(self) -> None:
        """Reset all measurements for a new run."""
        self.history: list[tuple[int, int, str, int, float, float]] = []
        self.images: dict[str, dict[str, Tensor]] = {}

    def configure_batch_norm(self, pl_module: FederatedModule) -> None:
        """Check the clients' training, and reset all measurements unless the run is resumed."""
        if pl_module.client.logs_itself:
            raise ConfigurationError(
                "GradientInversion: the attack cannot simulate a LightningModule's training_step; give the network itself as "
                "model.model, with model.loss"
            )
        if not pl_module.trainer.current_epoch:
            self.start_anew()

    def on_round_start(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Attack some clients if an evaluation follows. In round 1, try the first step of the attack."""
        if not pl_module.evaluates_now and cohort.round > 1:
            return
        with isolate_rng():
            batches = first_batches(pl_module, cohort, "GradientInversion")
            if pl_module.evaluates_now:
                self.images = {}
            for size in self.batch_sizes:
                for victims in self._victims(pl_module, batches, size):
                    self._step(pl_module, cohort, victims)  # its message names the batch size
                    if pl_module.evaluates_now:
                        self._attack(pl_module, cohort, batches, victims)
        if pl_module.evaluates_now:
            pl_module.log_numbers(self._metrics(cohort.round))

    def _victims(
        self, pl_module: FederatedModule, batches: Sequence[tuple[Tensor, Tensor]], size: int
    ) -> list[_Victims]:
        """Return the attacked clients. With a joint forward pass, each is attacked apart."""
        able = [row for row, (inputs, _) in enumerate(batches) if len(inputs) >= size]
        attacked = [able[index] for index in evenly_spaced(self.clients, len(able))]
        if pl_module.joint_method is not None:
            groups = [(able, [able.index(row)]) for row in attacked]
        else:
            groups = [(attacked, [*range(len(attacked))])] if attacked else []
        return [
            _Victims(
                rows, places, *(torch.stack([batches[row][part][:size] for row in rows]) for part in (0, 1))
            )
            for rows, places in groups
        ]

    def _step(
        self, pl_module: FederatedModule, cohort: Cohort, victims: _Victims, inputs: Tensor | None = None
    ) -> Step:
        size = victims.inputs.shape[1]
        batch = victims.inputs if inputs is None else inputs, victims.targets
        setting = f"GradientInversion.batch_sizes: {size}"
        return simulated_step(pl_module, cohort, victims.rows, batch, setting)

    def _attack(
        self,
        pl_module: FederatedModule,
        cohort: Cohort,
        batches: Sequence[tuple[Tensor, Tensor]],
        victims: _Victims,
    ) -> None:
        """Attack clients, and note the results."""
        gradients = _sent_gradients(pl_module, cohort, victims)
        finite = [_finite(inputs) for inputs, _ in batches]
        size, seen = victims.inputs.shape[1], torch.cat(finite)
        # clients that send the gradient 0 cannot be attacked, and equal inputs have no range
        sends = torch.stack([value.flatten(1).any(1) for value in gradients.values()]).any(0)
        places = [
            place for place in victims.places if sends[place] and victims.inputs[place].isfinite().all()
        ]
        if not places or seen.min() == seen.max():
            return
        scale = _Scale.of(seen)
        victims = victims._replace(places=places)
        known = self._statistics(pl_module, cohort, victims)
        targets = [value[places] for value in gradients.values()]
        guesses = {"": self._guess(pl_module, cohort, victims, targets, {}, scale)}
        if known:
            guesses["_statistics"] = self._guess(pl_module, cohort, victims, targets, known, scale)
        true = scale.to(victims.inputs[places])
        others = [
            [inputs for row, inputs in enumerate(finite) if row != victims.rows[place] and len(inputs)]
            for place in places
        ]
        if all(others):
            means = [scale.to(torch.cat(each)).mean(0).expand_as(true[0]) for each in others]
            guesses["_mean_image"] = torch.stack(means)
        shown = {"true": true}
        for ending, guess in guesses.items():
            matched = torch.stack([_matched(*pair) for pair in zip(guess, true, strict=True)])
            shown[_LABELS[ending]] = matched
            for place, found, wanted in zip(places, matched, true, strict=True):
                client = cohort.client_ids[victims.rows[place]]
                scores = _psnr(found, wanted, scale.high - scale.low), _correlation(found, wanted)
                self.history.append((cohort.round, size, _LABELS[ending], client, *scores))
        if true.dim() == 5 and true.shape[2] in (1, 3) and f"batch of {size}" not in self.images:
            images = {
                label: scale.back(batch.flatten(0, 1)[:_MOST_SHOWN]).cpu() for label, batch in shown.items()
            }
            self.images[f"batch of {size}"] = images

    def _statistics(
        self, pl_module: FederatedModule, cohort: Cohort, victims: _Victims
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the BN statistics that the server knows: mean and variance by layer."""
        true, treatments = self._step(pl_module, cohort, victims), cohort.treatments
        known: dict[str, tuple[Tensor, Tensor]] = {}
        for layer in true.means:
            names = f"{layer}.running_mean", f"{layer}.running_var"
            if treatments[names[0]] in SENT:
                found = true.means[layer], true.variances[layer]
                known[layer] = found[0][victims.places].detach(), found[1][victims.places].detach()
            elif treatments[names[0]] == "frozen":
                mean, variance = (
                    cohort.server_buffers[name].expand(len(victims.places), -1) for name in names
                )
                known[layer] = mean, variance
        return known

    def _guess(
        self,
        pl_module: FederatedModule,
        cohort: Cohort,
        victims: _Victims,
        targets: Sequence[Tensor],
        known: Mapping[str, tuple[Tensor, Tensor]],
        scale: _Scale,
    ) -> Tensor:
        """Return standardised reconstructions ``[places, b, ...]``.

        Args:
            pl_module: The federated module.
            cohort: The round's cohort.
            victims: The attacked clients.
            targets: The gradients that they send.
            known: BN statistics that the attacker knows, by layer.
            scale: Scale of the inputs.
        """
        places = victims.places
        purpose = "gradient inversion"
        drawn = [
            torch.randn(
                victims.inputs.shape[1:],
                dtype=victims.inputs.dtype,
                generator=generator(
                    pl_module.seed, purpose, cohort.round, cohort.client_ids[victims.rows[place]]
                ),
            )
            for place in places
        ]
        guess = pl_module.on_device(torch.stack(drawn)).requires_grad_()
        optimizer = torch.optim.Adam([guess], _RATE)
        milestones = [self.iterations * part // 8 for part in (3, 5, 7)]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, 0.1)
        for _ in range(self.iterations):
            inputs = victims.inputs.index_put((torch.tensor(places),), scale.back(guess))
            step = self._step(pl_module, cohort, victims, inputs)
            sent = [value[places] for value in step.gradients.values()]
            loss = _distance(sent, targets) + _SMOOTHNESS * _variation(guess)
            if known:
                loss = loss + _PRIOR * _deviation(step, known, places)
            (guess.grad,) = torch.autograd.grad(loss.sum(), [guess])
            optimizer.step()
            schedule.step()
            guess.data.clamp_(scale.low, scale.high)
        # a model that has diverged gives no direction
        found: Tensor = guess.detach().nan_to_num()
        return found

    def _metrics(self, number: int) -> dict[str, float]:
        """Return the metrics of a round."""
        values: dict[str, list[float]] = {}
        for of_round, size, label, _, *scores in self.history:
            if of_round == number:
                for name, score in zip(("psnr", "correlation"), scores, strict=True):
                    values.setdefault(f"privacy/{name}_batch_{size}{_ENDINGS[label]}", []).append(score)
        return {name: sum(each) / len(each) for name, each in values.items()}

    def result(self) -> Mapping[str, float]:
        """Return the metrics of the newest attack."""
        return self._metrics(self.history[-1][0]) if self.history else {}

    def result_lines(self) -> Mapping[str, str]:
        """Return the result of the newest attack on the smallest batch as text."""
        metrics, size = self.result(), min(self.batch_sizes)
        if f"privacy/psnr_batch_{size}" not in metrics:
            return {"inverted gradient": f"no client could be attacked at batch size {size}"}
        line = "PSNR {:.1f} dB, correlation {:.2f} at batch size {}".format(
            metrics[f"privacy/psnr_batch_{size}"], metrics[f"privacy/correlation_batch_{size}"], size
        )
        return {"inverted gradient": line}

    def tables(self) -> Mapping[str, Table]:
        """Return the table ``inversion`` with the values of each attack."""
        columns = ("round", "batch size", "known", "client", "psnr", "correlation")
        return {"inversion": Table(columns, self.history)} if self.history else {}

    def figures(self, rows: MetricRows) -> Mapping[str, Drawing]:
        """Return the figure ``inversion`` of reconstructed images."""
        images = self.images
        return {"inversion": lambda title: inversion_figure(images, title)} if images else {}


def _finite(inputs: Tensor) -> Tensor:
    """Return the inputs ``[n, ...]`` of samples whose values are all finite."""
    return inputs[inputs.isfinite()[:, None].flatten(1).all(1)]


def _sent_gradients(pl_module: FederatedModule, cohort: Cohort, victims: _Victims) -> dict[str, Tensor]:
    """Return the gradients ``[rows, *shape]`` that clients send after a local step, by name."""
    copy, executor = cohort_beside(pl_module, cohort, common=False), first_executor(pl_module)
    for method in pl_module.federated_callbacks:
        executor = method.step_executor(pl_module, executor)
    batches = BatchStack(stack=(victims.inputs.clone(), victims.targets.clone()))
    with without_dropout(pl_module.model), averaging_by(lambda x, _: mean_of_all(x, len(victims.rows))):
        executor.backward(pl_module.client, copy, batches, victims.rows)
    treatments = cohort.treatments
    return {name: copy.grads[name][victims.rows] for name in copy.params if treatments[name] in SENT}


def _distance(found: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Return 1 - cos of the angle between gradients, ``[clients]``."""
    one, other = (torch.cat([value.flatten(1) for value in each], 1) for each in (found, targets))
    return 1 - (normalize(one, eps=1e-30) * normalize(other, eps=1e-30)).sum(1)


def _variation(images: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels, ``[clients]``; 0 for other inputs."""
    if images.dim() != 5:
        return images.new_zeros(len(images))
    return sum((images.diff(dim=dim).abs().flatten(1).mean(1) for dim in (3, 4)), images.new_zeros(()))


def _deviation(step: Step, known: Mapping[str, tuple[Tensor, Tensor]], places: list[int]) -> Tensor:
    """Return the mean over the layers of the statistics' squared relative deviations, ``[clients]``."""
    terms = []
    for layer, (mean, variance) in known.items():
        errors = (
            (step.means[layer][places] - mean).square(),
            (step.variances[layer][places] - variance).square(),
        )
        for error, size in zip(errors, (variance, variance.square()), strict=True):
            terms.append(error.sum(1) / size.sum(1).clamp(min=1e-12))
    return torch.stack(terms).sum(0) / len(known)


def _matched(guess: Tensor, true: Tensor) -> Tensor:
    """Return the guesses ``[b, ...]`` in the order that fits the true samples best."""
    from scipy.optimize import linear_sum_assignment  # slow to import

    errors = (guess[None] - true[:, None]).double().square().reshape(len(true), len(true), -1).mean(2)
    return guess[torch.from_numpy(linear_sum_assignment(errors.cpu())[1])]


def _psnr(guess: Tensor, true: Tensor, span: float) -> float:
    """Return the PSNR of a batch in dB; at most 120, as errors below are rounding."""
    error = (guess - true).double().square().mean()
    return float(10 * torch.log10(span**2 / error.clamp(min=1e-12 * span**2)))


def _correlation(guess: Tensor, true: Tensor) -> float:
    """Return the mean correlation of guesses ``[b, ...]`` with true samples; 0 if one is constant."""
    one, other = (
        x - x.mean(1, keepdim=True) for x in (each.double().reshape(len(each), -1) for each in (guess, true))
    )
    return float((normalize(one) * normalize(other)).sum(1).mean())
