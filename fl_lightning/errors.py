"""The exceptions for input that a user can mend."""


class ConfigurationError(ValueError):
    """A setting, a data set or a checkpoint that cannot be used.

    The message is one line that names the setting, the value that was found and what would work. The command line
    prints it without a traceback and exits with status 2.
    """


class CannotVectorize(ConfigurationError):
    """A model or batches that cannot be computed for all clients at once; one after the other they can."""
