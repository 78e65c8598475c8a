"""The methods of a run: its federated callbacks, and how their hooks are found."""

from collections.abc import Callable, Iterator

import lightning as L

from fl_lightning.round.declarations import Declarations


class Methods(list[Declarations]):
    """The methods that are active in a run, in the order in which their hooks are called."""

    @classmethod
    def of(cls, trainer: L.Trainer) -> "Methods":
        """Those among a trainer's callbacks."""
        return cls(cb for cb in trainer.callbacks if isinstance(cb, Declarations))  # type: ignore[attr-defined]  # set in a helper of the trainer

    def hooks(self, name: str) -> Iterator[tuple[str, Callable[..., None]]]:
        """The methods that have a hook of this name, each by its class's name, with the hook."""
        for method in self:
            if method.overrides(name):
                yield type(method).__name__, getattr(method, name)

    @property
    def joint(self) -> str | None:
        """The method for whose sake the first local step is one forward pass over all clients; None without."""
        return next((type(method).__name__ for method in self if method.needs_joint_forward), None)
