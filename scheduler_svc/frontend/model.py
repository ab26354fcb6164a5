"""Owns what the front end knows of the served model: its limits and defaults, and its tokenizer.

Knows nothing of requests. Made once from the core's ModelState; the identity of a core never changes.
"""

import logging
from dataclasses import dataclass, field

from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.frontend import status
from scheduler_svc.frontend.text import Text

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The served model. `text` is None where the worker brought no tokenizer."""

    info: control_pb2.GetModelInfoResponse
    defaults: inference_pb2.SamplingParams
    eos_token_ids: frozenset[int]
    text: Text | None
    # What hashes of pages begin with; told to nobody, not even to the log.
    cache_root: bytes = field(repr=False)

    def check_name(self, name: str) -> None:
        """Refuses another model than this one; empty means whatever is served."""
        if name and name != self.info.model:
            raise status.unknown_model(name, self.info.model)


def load(state: frontend_pb2.ModelState) -> Model:
    """Takes 0.5 s for a vocabulary of 150,000; not for the event loop."""
    info = control_pb2.GetModelInfoResponse()
    info.CopyFrom(state.info)
    text = None
    if state.tokenizer_json:
        try:
            text = Text(state.tokenizer_json, vocab_size=info.vocab_size, max_length=info.max_length)
        except ValueError as error:
            logger.error("no text prompts, no text output: the worker's tokenizer is %s", error)
    info.has_tokenizer = text is not None
    defaults = inference_pb2.SamplingParams(
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        num_samples=1,
    )
    defaults.MergeFrom(info.sampling_defaults)
    defaults.ClearField("seed")
    info.sampling_defaults.CopyFrom(defaults)
    return Model(
        info=info,
        defaults=defaults,
        eos_token_ids=frozenset(info.eos_token_ids),
        text=text,
        cache_root=state.cache_root,
    )
