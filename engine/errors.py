"""Every error the engine raises on purpose.

An `EngineError` is something a user, a file, the network or the machine caused; its message says
what is wrong and what to do. A bug inside the engine is an `EngineInvariantError`.
"""


class EngineError(Exception):
    """Base of all errors that are not bugs."""


class ConfigError(EngineError):
    """A setting, or a combination of settings, cannot work."""


class KernelsUnavailableError(ConfigError):
    """The native kernels cannot be compiled or loaded here; `details` is what the compiler said."""

    def __init__(self, message: str, *, details: str = "") -> None:
        """Keep the compiler's words beside the sentence."""
        super().__init__(message)
        self.details = details


class RequestError(EngineError):
    """A request cannot be served as it is.

    `param` names the field of the request (the API's name for it), `code` is a stable word that a
    program can act on.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """Keep the field and the code beside the message."""
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt leaves no room for one generated token."""


class QueueFullError(RequestError):
    """As many requests as allowed are open already; try again later."""


class ModelError(EngineError):
    """A model file is missing, damaged or of a kind that is not supported."""


class EngineDeadError(EngineError):
    """The engine has stopped and serves nothing until it is restarted."""


class RankError(EngineError):
    """One of the processes that compute a model together is gone, or does not answer."""


class EngineInvariantError(AssertionError):
    """The engine's own books do not add up: a bug, never the user's fault."""
