"""Methods that cannot be combined. ``policy`` refuses treatments that contradict each other."""

from collections.abc import Iterable, Mapping

from fl_lightning.errors import ConfigurationError
from fl_lightning.round.declarations import Declarations


def check_together(callbacks: Iterable[Declarations]) -> None:
    """Check that no two methods need the same exclusive resource (``Declarations.takes``).

    Raises:
        ConfigurationError: Two methods take the same resource.
    """
    taken: dict[str, tuple[Declarations, str]] = {}
    for callback in callbacks:
        takes = callback.takes
        for resource in takes:
            remedy = takes[resource] if isinstance(takes, Mapping) else ""
            other, its_remedy = taken.setdefault(resource, (callback, remedy))
            if other is not callback:
                instead = remedy or its_remedy or "use one of them"
                raise ConfigurationError(
                    f"callbacks {type(other).__name__} and {type(callback).__name__} cannot be combined: both decide over "
                    f"{resource}; {instead}"
                )
