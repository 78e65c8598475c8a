"""The executor of a local step in which clients exchange inside of their forward pass."""

from fl_lightning.executors.vectorized import VectorizedExecutor


def joint_executor(method: str) -> VectorizedExecutor:
    """The executor of a step for which a method needs one forward pass over all clients together.

    Args:
        method: Name of the method, for messages.
    """
    return _JointExecutor(method)


class _JointExecutor(VectorizedExecutor):
    def __init__(self, method: str) -> None:
        super().__init__()
        self.user = f"the joint forward pass of {method} in the first local step"
        self.instead = "the same batch_size"
