"""Mask of the local steps: state that the client optimizer must not change."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import Tensor

from fl_lightning.cohort.cohort import Cohort
from fl_lightning.optimizers.client import ClientOptimizer

Mask = Mapping[int, Collection[str] | None]
"""Names of masked parameters by row. None means the entire row, with its buffers."""

Place = tuple[str, int, str]
"""Key of an optimizer state, row, and name of a parameter or block."""


class SkippedSteps:
    """Mask of the local steps: parameters without a gradient, and rows that have taken all steps.

    The optimizer steps all rows at once. The masked state is saved before and restored afterwards:
    parameters in each step, and a row once, from the row's last step to the end of the local steps.
    """

    def __init__(self) -> None:
        self._names: dict[int, list[str]] = {}  # of this step
        self._earlier: dict[int, set[str]] = {}  # of the round's earlier steps
        self._rows: dict[Place, Tensor] = {}  # saved rows
        self._versions: list[int] = []

    def start_round(self) -> None:
        """Forget all masked state."""
        self._rows.clear()
        self._earlier.clear()

    def start_step(self) -> None:
        """Mask no parameter in the next step."""
        self._names.clear()

    def add(self, row: int, names: Sequence[str]) -> None:
        """Mask parameters of a row in this step."""
        self._names[row] = [*names]

    def names(self, row: int) -> list[str]:
        """Return the names of a row's masked parameters in this step."""
        return self._names.get(row, [])

    def gradients_written(self, cohort: Cohort) -> None:
        """Note that the backward passes have written the gradients."""
        self._versions = _versions(cohort)

    def step(self, cohort: Cohort, optimizer: ClientOptimizer) -> None:
        """Take one step of the client optimizer for all rows, except for masked parameters.

        Raises:
            ConfigurationError: The optimizer counts steps, but a parameter was masked in an earlier
                step, or counts are kept between rounds.
        """
        mask = self._of_step(cohort, optimizer)
        saved = _save(cohort, optimizer, mask)
        optimizer.step()
        _restore(cohort, optimizer, mask, saved)

    def _of_step(self, cohort: Cohort, optimizer: ClientOptimizer) -> Mask:
        # if no method has written to the gradients since the backward passes, the CPU need not wait for values
        written = self._versions != _versions(cohort)
        mask = {
            row: {name for name in names if not (written and cohort.grads.row(row)[name].any())}
            for row, names in self._names.items()
        }
        for row, earlier in self._earlier.items():
            if cohort.step < cohort.local_steps[row] and (again := earlier - mask.get(row, set())):
                optimizer.refuse_other_counts(min(again))
        for row, names in mask.items():
            self._earlier.setdefault(row, set()).update(names)
            if names and optimizer.initial_steps:
                optimizer.refuse_other_counts(min(names))
        return {row: names for row, names in mask.items() if names}

    def finish_step(self, cohort: Cohort, optimizer: ClientOptimizer, step: int, last: int) -> None:
        """Mask the rows that take their last local step with ``step``.

        If ``step`` equals ``last``, the last local step of the round, no state needs to be saved.
        """
        if step < last:
            done = [row for row, steps in enumerate(cohort.local_steps) if step + 1 == steps]
            self._rows |= _save(cohort, optimizer, dict.fromkeys(done))

    def restore_rows(self, cohort: Cohort, optimizer: ClientOptimizer) -> None:
        """Restore the rows that :meth:`finish_step` has masked."""
        _restore(cohort, optimizer, dict.fromkeys(row for _, row, _ in self._rows), self._rows)


def _versions(cohort: Cohort) -> list[int]:
    return [block._version for block in cohort.grads.blocks.values()]


def _save(cohort: Cohort, optimizer: ClientOptimizer, mask: Mask) -> dict[Place, Tensor]:
    return {place: view.clone() for place, view in _views(cohort, optimizer, mask)}


def _restore(cohort: Cohort, optimizer: ClientOptimizer, mask: Mask, saved: Mapping[Place, Tensor]) -> None:
    for place, view in _views(cohort, optimizer, mask):
        if place in saved:
            view.copy_(saved[place])
        else:  # a state that the optimizer has created since
            view.zero_()


def _views(cohort: Cohort, optimizer: ClientOptimizer, mask: Mask) -> Iterator[tuple[Place, Tensor]]:
    """Yield the masked parameters, buffers and optimizer states."""
    states = optimizer.states(create=False) if mask else {}
    of_optimizer = {key: cohort.optimizer_rows(blocks) for key, blocks in states.items()}
    for key, rows in {"": cohort.params, **of_optimizer, "buffer": cohort.buffers}.items():
        for row, names in mask.items():
            views = {n: block[row] for n, block in rows.blocks.items()} if names is None else rows.row(row)
            for name in views if names is None else names:
                if name in views:
                    yield (key, row, name), views[name]
