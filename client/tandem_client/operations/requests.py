"""Builds the requests of an operator's calls that tell their progress."""

import os
from typing import Literal

from tandem.v1 import control_pb2

Running = Literal["finish", "recompute", "continue", "abort"]


def update_request(
    folder: str | os.PathLike[str], *, version: str, running: Running, in_turn: bool, max_seconds: float
) -> control_pb2.UpdateWeightsRequest:
    """The request of an update of weights. Raises ValueError for an unknown `running`."""
    name = f"RUNNING_REQUESTS_{running.upper()}"
    if name not in control_pb2.RunningRequests.keys()[1:]:
        raise ValueError(f"running is {running!r}; it must be finish, recompute, continue or abort")
    return control_pb2.UpdateWeightsRequest(
        version=version,
        folder=os.fspath(folder),
        running=control_pb2.RunningRequests.Value(name),
        in_turn=in_turn,
        max_seconds=max_seconds,
    )
