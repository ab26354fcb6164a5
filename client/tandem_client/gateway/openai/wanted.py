"""What one HTTP request asks for: the calls of the service, and how their answers are written."""

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.v1 import inference_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One request of `/v1/completions` or `/v1/chat/completions`."""

    # One for each prompt; a chat has one. Sample `i` of prompt `p` is choice `p * num_samples + i`.
    requests: tuple[inference_pb2.GenerateRequest, ...]
    num_samples: int
    # Path of a field of the service to the field that set it.
    names: Mapping[str, str]
    is_chat: bool
    is_stream: bool
    # Usage at the end of a stream, and in each of its chunks.
    with_usage: bool
    with_every_usage: bool
    # Alternatives of each token of the output, of the prompt; None: no logprobs.
    num_top: int | None
    num_prompt_top: int | None
    # The prompt comes before the output.
    is_echo: bool
    # The service makes at least one token; where none was asked for, it is not shown.
    hides_output: bool
    with_token_ids: bool
