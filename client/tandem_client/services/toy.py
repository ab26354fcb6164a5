"""The notice about the bundled model."""

from tandem_client.types import ModelInfo

# The name that a worker gives the bundled model.
_NAME = "bundled"
TOY_NOTICE = "the bundled model is a toy of 4 million parameters: what it writes is babble; --model serves another"


def is_toy(info: ModelInfo) -> bool:
    """Whether the bundled model is served."""
    return info.model == _NAME
