"""Gradient inversion: Geiping et al., "Inverting Gradients", arXiv 2003.14053."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from fl_lightning import Cohort, ConfigurationError, FederatedModule
from fl_lightning.callbacks.observers.gradient_deviation import cohort_beside, first_executor
from fl_lightning.callbacks.observers.simulated_steps import SENT, Step, simulated_step
from fl_lightning.client_data import BatchStack
from fl_lightning.errors import check_at_least
from fl_lightning.methods import Drawing, MetricRows, Observer, Report, Table, evenly_spaced
from fl_lightning.pictures import inversion_figure
from fl_lightning.randomness import generator

_RATE, _SMOOTHNESS, _PRIOR = 0.1, 1e-3, 0.1
_MOST_SHOWN = 4
_LABELS = {"": "gradient", "_statistics": "and BN", "_mean_image": "mean image"}
_ENDINGS = {label: ending for ending, label in _LABELS.items()}


class _Found(NamedTuple):
    client: int
    true: Tensor
    guess: Tensor


class GradientInversion(Report, Observer):
    """Observer: how well training samples can be reconstructed from a client's first gradient.

    The attack runs in rounds that an evaluation follows, and in the last round. The attacker is a
    server that knows the model, the method, the labels, the range of the inputs, and the gradient of
    a client on a batch of 1 or 4 samples. The attacker seeks inputs whose gradient points in the
    same direction, and which are smooth::

        1 - cos(gradient of the inputs, gradient of the client) + 0.001 total variation

    by Adam from random inputs, with learning rate 0.1, which falls to 0.0001. A second attack also
    knows BN statistics, and adds 0.1 times the squared relative deviation of the mean and the
    variance of each BN layer's inputs from them, averaged over the layers. If clients send BN
    statistics, they are the mean and variance of the batch, which an attacker can compute from what
    the client sends after one local step. If BN statistics are frozen, they are the server's.
    Otherwise there is no second attack.

    The attack is lenient: clients in practice have larger batches, take several local steps, and
    keep labels to themselves. With a joint forward pass (FedTAN), the attacker also knows the batches
    of the other clients, in place of the statistics that they exchange. A failed attack proves
    nothing, because a stronger one may succeed.

    If a method changes the gradient at the client, the attack gets the changed gradient only for
    ``PrivateSGD``, with other noise than the client's. It gets the gradient of the loss otherwise.

    The metrics are means over the attacked clients. The PSNR (peak signal-to-noise ratio) of a
    reconstruction is ``10 log10(range^2 / mean squared error)`` in dB; samples of a batch are
    matched so that the error is smallest.

    - ``privacy/psnr_batch_<b>``: PSNR of reconstructions from batches of b samples.
    - ``privacy/psnr_batch_<b>_statistics``: PSNR of the second attack.
    - ``privacy/psnr_batch_<b>_mean_image``: PSNR of the mean of all inputs, which needs no attack.

    Files: ``inversion.csv`` has the PSNR of each client. ``inversion.png`` shows reconstructed images
    of the newest attack.

    Attack only data that you are allowed to see.

    Args:
        batch_sizes: Numbers of samples of a batch, each at least 1. The first samples of the
            client's first batch in this round are attacked.
        clients: Number of attacked clients, evenly spaced in the cohort.
        iterations: Number of steps of the attack. On a CPU, 500 steps on three clients of Digits
            with a ResNet-8 of width 8 take about 10 seconds, and three times as long for FedTAN.

    Raises:
        ConfigurationError: A setting is out of range, or the clients' samples are no pairs of
            floating-point inputs and targets.
    """

    paper = "Geiping et al., arXiv 2003.14053 (an observer: measurement only)"
    examples = ({"clients": 1, "iterations": 5}, {"batch_sizes": [2], "clients": 1, "iterations": 2})
    saved = ("history", "images")

    def __init__(self, batch_sizes: Sequence[int] = (1, 4), clients: int = 3, iterations: int = 500) -> None:
        self.batch_sizes, self.clients, self.iterations = list(batch_sizes), clients, iterations
        check_at_least(
            1, **{"GradientInversion.clients": clients, "GradientInversion.iterations": iterations}
        )
        for size in self.batch_sizes:
            check_at_least(1, **{"GradientInversion.batch_sizes": size})
        self.start_anew()

    def start_anew(self) -> None:
        """Reset all measurements for a new run."""
        self.history: list[tuple[int, int, str, int, float]] = []
        self.images: list[tuple[str, dict[str, Tensor]]] = []

    def configure_batch_norm(self, pl_module: FederatedModule) -> None:
        """Check the clients' training, and reset all measurements unless the run is resumed."""
        if pl_module.client.logs_itself:
            raise ConfigurationError(
                "GradientInversion: a LightningModule's training_step sees whole batches, which the attack cannot vary; give the "
                "network itself as model.model, with model.loss"
            )
        if not pl_module.trainer.current_epoch:
            self.start_anew()

    def on_round_start(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Attack some clients, if an evaluation follows."""
        if pl_module.evaluates_now:
            self.images = []
            with isolate_rng():
                for size in self.batch_sizes:
                    self._attack(pl_module, cohort, size)
            pl_module.log_numbers(self.result())

    def _attack(self, pl_module: FederatedModule, cohort: Cohort, size: int) -> None:
        """Attack batches of ``size`` samples, and log the results."""
        everyone = [*range(len(cohort))]
        batches = [_first(batch, size) for batch in pl_module.client_batches(cohort, everyone, 0).batches()]
        able = [row for row in everyone if len(batches[row][0]) == size]
        victims = [able[index] for index in evenly_spaced(self.clients, len(able))]
        if not victims:
            return
        seen = torch.cat([inputs for inputs, _ in batches])
        low, high, mean = float(seen.min()), float(seen.max()), seen.mean(0)
        joint = pl_module.joint_method is not None
        sources: dict[str, list[_Found]] = {}
        for rows, places in (
            [(everyone, [row]) for row in victims] if joint else [(victims, [*range(len(victims))])]
        ):
            known = tuple(torch.stack(part) for part in zip(*(batches[row] for row in rows), strict=True))
            for source, guess in self._sources(pl_module, cohort, rows, places, known, (low, high)).items():
                sources.setdefault(source, []).extend(
                    _Found(cohort.client_ids[rows[place]], known[0][place], _matched(found, known[0][place]))
                    for place, found in zip(places, guess, strict=True)
                )
        found = sources[""]
        sources["_mean_image"] = [_Found(one.client, one.true, mean.expand_as(one.true)) for one in found]
        shown = {"true": _shown([one.true for one in found])}
        for source, results in sources.items():
            shown[_LABELS[source]] = _shown([one.guess for one in results])
            self.history += [
                (cohort.round, size, _LABELS[source], one.client, _psnr(one.guess, one.true, high - low))
                for one in results
            ]
        if mean.dim() == 3 and len(mean) in (1, 3):
            self.images.append((f"batch of {size}", shown))

    def _sources(
        self,
        pl_module: FederatedModule,
        cohort: Cohort,
        rows: list[int],
        places: list[int],
        known: tuple[Tensor, ...],
        limits: tuple[float, float],
    ) -> dict[str, Tensor]:
        """Return reconstructions ``[places, b, ...]``, by what they use beside the gradient."""
        gradients = _sent_gradients(pl_module, cohort, rows, known)
        targets = [gradients[name][places] for name in gradients]
        true, treatments = simulated_step(pl_module, cohort, rows, known), cohort.treatments
        statistics: dict[str, tuple[Tensor, Tensor]] = {}
        for layer in true.means:
            names = f"{layer}.running_mean", f"{layer}.running_var"
            if treatments[names[0]] in SENT:
                found = true.means[layer], true.variances[layer]
                statistics[layer] = found[0][places].detach(), found[1][places].detach()
            elif treatments[names[0]] == "frozen":
                mean, variance = (cohort.server_buffers[name].expand(len(places), -1) for name in names)
                statistics[layer] = mean, variance
        inputs, labels = known
        drawn = [
            torch.randn(
                inputs[place].shape,
                dtype=inputs.dtype,
                generator=generator(
                    pl_module.seed, "gradient inversion", cohort.round, cohort.client_ids[rows[place]]
                ),
            )
            for place in places
        ]
        first = pl_module.on_device(torch.stack(drawn))

        def found_with(prior: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
            guess = first.clone().requires_grad_()
            optimizer = torch.optim.Adam([guess], _RATE)
            milestones = [self.iterations * part // 8 for part in (3, 5, 7)]
            schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, 0.1)
            for _ in range(self.iterations):
                tried = inputs.index_put((torch.tensor(places),), guess)
                step = simulated_step(pl_module, cohort, rows, (tried, labels))
                sent = [value[places] for value in step.gradients.values()]
                loss = _distance(sent, targets) + _SMOOTHNESS * _variation(guess)
                if prior:
                    loss = loss + _PRIOR * _deviation(step, prior, places)
                (guess.grad,) = torch.autograd.grad(loss.sum(), [guess])
                optimizer.step()
                schedule.step()
                guess.data.clamp_(*limits)
            # a model that has diverged gives no direction
            found: Tensor = guess.detach().nan_to_num()
            return found

        return {"": found_with({}), **({"_statistics": found_with(statistics)} if statistics else {})}

    def result(self) -> Mapping[str, float]:
        """Return the metrics of the newest attack."""
        values: dict[str, list[float]] = {}
        for number, size, label, _, psnr in self.history:
            if number == self.history[-1][0]:
                values.setdefault(f"privacy/psnr_batch_{size}{_ENDINGS[label]}", []).append(psnr)
        return {name: sum(each) / len(each) for name, each in values.items()}

    def result_lines(self) -> Mapping[str, str]:
        """Return the PSNR of the newest attack on the smallest batch as text."""
        metrics, name = self.result(), f"privacy/psnr_batch_{min(self.batch_sizes)}"
        if name not in metrics:
            return {}
        line = f"PSNR {metrics[name]:.1f} dB at batch size {min(self.batch_sizes)} (mean image {metrics[f'{name}_mean_image']:.1f})"
        return {"inverted gradient": line}

    def tables(self) -> Mapping[str, Table]:
        """Return the table ``inversion`` with the PSNR of each attack."""
        columns = ("round", "batch size", "known", "client", "psnr")
        return {"inversion": Table(columns, self.history)} if self.history else {}

    def figures(self, rows: MetricRows) -> Mapping[str, Drawing]:
        """Return the figure ``inversion`` of reconstructed images."""
        images = dict(self.images)
        return {"inversion": lambda title: inversion_figure(images, title)} if images else {}


def _first(batch: object, size: int) -> tuple[Tensor, Tensor]:
    """Return the first samples of a batch, which must be inputs and targets."""
    parts = batch if isinstance(batch, tuple | list) else ()
    if (
        len(parts) != 2
        or not all(isinstance(part, Tensor) for part in parts)
        or not parts[0].is_floating_point()
    ):
        raise ConfigurationError(
            "GradientInversion: a client's batch must be a pair of floating-point inputs and targets, for which alone the attack "
            "can seek inputs; leave it out of trainer.callbacks"
        )
    return parts[0][:size], parts[1][:size]


def _sent_gradients(
    pl_module: FederatedModule, cohort: Cohort, rows: list[int], batch: tuple[Tensor, ...]
) -> dict[str, Tensor]:
    """Return the gradients ``[rows, *shape]`` that clients send after a local step, by name."""
    copy, executor = cohort_beside(pl_module, cohort, common=False), first_executor(pl_module)
    for method in pl_module.federated_callbacks:
        executor = method.step_executor(pl_module, executor)
    executor.backward(pl_module.client, copy, BatchStack(stack=batch), rows)
    treatments = cohort.treatments
    return {name: copy.grads[name][rows] for name in copy.params if treatments[name] in SENT}


def _distance(found: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Return 1 - cos of the angle between gradients, ``[clients]``."""

    def dot(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
        return torch.stack([(a * b).flatten(1).sum(1) for a, b in zip(one, other, strict=True)]).sum(0)

    return 1 - dot(found, targets) / (dot(found, found) * dot(targets, targets)).sqrt().clamp(min=1e-12)


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
    """Return the guesses ``[b, ...]`` in the order in which they fit the true samples best."""
    from scipy.optimize import linear_sum_assignment  # slow to import

    errors = (guess[None] - true[:, None]).double().square().flatten(2).mean(2)
    return guess[torch.from_numpy(linear_sum_assignment(errors.cpu())[1])]


def _psnr(guess: Tensor, true: Tensor, span: float) -> float:
    """Return the PSNR of a batch in dB; at most 120, as errors below are rounding."""
    error = (guess - true).double().square().mean()
    return float(10 * torch.log10(span**2 / error.clamp(min=1e-12 * span**2)))


def _shown(batches: Sequence[Tensor]) -> Tensor:
    """Return the first images of some batches ``[b, C, H, W]``."""
    return torch.cat([*batches])[:_MOST_SHOWN].cpu()
