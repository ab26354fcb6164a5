"""Owns the description of a stream: everything that its messages depend on besides the tokens.

The front end that accepts a request makes the description. The core keeps it for a request that lingers, so that
another front end can build the same stream. Knows nothing of the stream's state.
"""

from collections.abc import Sequence

import numpy as np
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.text.detokenize import Detokenizer
from scheduler_svc.frontend.text.output import SampleOutput
from scheduler_svc.frontend.text.stop_strings import StopFinder
from scheduler_svc.frontend.validate.request import Checked

# Prompt tokens that give the first output token its context when it is decoded.
NUM_CONTEXT_TOKENS = 8


def describe(
    checked: Checked, accepted: pb.Accepted, token_ids: Sequence[int], max_new_tokens: int
) -> frontend_pb2.StreamDescription:
    """Returns the description of a request's stream. `token_ids` is its prompt."""
    return frontend_pb2.StreamDescription(
        accepted=accepted,
        stop=checked.stop,
        max_new_tokens=max_new_tokens,
        want_text=checked.want_text,
        want_token_ids=checked.want_token_ids,
        skip_special_tokens=checked.skip_special_tokens,
        context=np.asarray(token_ids[-NUM_CONTEXT_TOKENS:], "<i4").tobytes(),
    )


def make_outputs(description: frontend_pb2.StreamDescription, model: Model) -> tuple[SampleOutput, ...]:
    """Returns one output for each sample, with text if the caller wants it or a stop string needs it.

    Takes up to 10 ms for the largest set of stop strings.
    """
    stop, decode = description.stop, None
    strings = tuple(dict.fromkeys(stop.stop_strings))
    if model.tokenizer is not None and (description.want_text or strings):
        decode = model.tokenizer.decoder(skip_special_tokens=description.skip_special_tokens)
    context = np.frombuffer(description.context, "<i4").tolist()
    stop_finder = StopFinder(strings, include_stop=stop.include_stop) if strings else None
    model_stops = frozenset[int]() if stop.ignore_eos else model.eos_token_ids
    return tuple(
        SampleOutput(
            detokenizer=Detokenizer(decode, context) if decode is not None else None,
            stop_finder=stop_finder.fork() if stop_finder is not None else None,
            stop_token_ids=model_stops | frozenset(stop.stop_token_ids),
            min_new_tokens=stop.min_new_tokens,
            include_stop=stop.include_stop,
        )
        for _ in range(description.accepted.sampling.num_samples)
    )
