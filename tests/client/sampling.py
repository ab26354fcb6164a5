"""A value of each number of SamplingParams, within its limits and other than every other one's."""

from tandem_client.wire.parts import SAMPLING

EXAMPLES = {name: at / 16 if kind is float else at for at, (name, (kind, _)) in enumerate(SAMPLING.items(), start=1)}
