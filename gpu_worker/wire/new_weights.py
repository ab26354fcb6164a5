"""What carries out an order to load new weights, as the link and the runner know it. Owns nothing."""

from typing import Protocol

from tandem.internal.v1 import worker_pb2 as pb


class WeightsLoader(Protocol):
    """Loads new weights in place of the served model's."""

    def load(self, order: pb.LoadWeights) -> pb.WeightsLoaded:
        """Loads them, or refuses and changes nothing. Raises a fatal error if it failed in between."""
        ...
