"""`ToolError`: a failure that comes with the words that the model is to read."""

from __future__ import annotations

from postgrad.rollout.results import ErrorKind


class ToolError(Exception):
    """The model reads `error: NAME: ` and this text, without the name of an exception. A tool may raise it: "no such city".

    kind:      under which the failure is counted.
    transient: whether the same call may well succeed when it is made again (see `retry`).
    """

    kind = ErrorKind.RAISED  # of a subclass whose constructor does not call this one
    transient = False

    def __init__(self, text: str, *, kind: ErrorKind = ErrorKind.RAISED, transient: bool = False) -> None:
        super().__init__(text)
        self.kind = ErrorKind(kind)
        self.transient = transient
