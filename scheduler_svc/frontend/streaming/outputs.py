"""Owns the description of a stream: everything that its messages depend on besides the tokens.

The front end that accepts a request makes the description. The core keeps it for a request that lingers, so that
another front end can build the same stream. Knows nothing of the stream's state.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.core.messages.events import MAX_DESCRIPTION_BYTES
from scheduler_svc.frontend.chat.answer import ChatOutput
from scheduler_svc.frontend.chat.bodies import marked, marking
from scheduler_svc.frontend.chat.served import make_parser
from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.prompt import Prompt
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.text.detokenize import MAX_CONTEXT_TOKENS, Decode, Detokenizer
from scheduler_svc.frontend.text.output import SampleOutput, StopFinder
from scheduler_svc.frontend.text.tokenizer import Tokenizer
from scheduler_svc.frontend.validate import Checked


def describe(
    checked: Checked, accepted: pb.Accepted, prompt: Prompt, max_new_tokens: int
) -> frontend_pb2.StreamDescription:
    """Returns the description of a request's stream."""
    return frontend_pb2.StreamDescription(
        accepted=accepted,
        stop=checked.stop,
        max_new_tokens=max_new_tokens,
        want_text=checked.want_text,
        want_token_ids=checked.want_token_ids,
        skip_special_tokens=checked.skip_special_tokens,
        context=np.asarray(prompt.token_ids[-MAX_CONTEXT_TOKENS:], "<i4").tobytes(),
        # Without text and stop strings there is nothing to parse.
        chat=prompt.parsing if checked.want_text or checked.stop_strings else None,
    )


def serialized(description: frontend_pb2.StreamDescription) -> bytes:
    """The bytes that the core keeps. Raises Refusal if they are more than it takes."""
    data = description.SerializeToString()
    if len(data) > MAX_DESCRIPTION_BYTES:
        message = (
            f"resume.linger_seconds is set, and what is kept to resume the request has {len(data)} bytes, most of them "
            f"types of tools' arguments or stop strings; the limit is {MAX_DESCRIPTION_BYTES}"
        )
        raise status.invalid("resume.linger_seconds", message)
    return data


def make_outputs(description: frontend_pb2.StreamDescription, model: Model) -> tuple[SampleOutput, ...]:
    """Returns one output for each sample, with text if the caller wants it or a stop string needs it.

    Takes up to 10 ms for the largest set of stop strings.
    """
    stop, decode, hidden = description.stop, None, None
    controls = _controls_of(description, model)
    strings = tuple(dict.fromkeys(stop.stop_strings))
    if model.tokenizer is not None and description.HasField("chat"):
        decode, hidden = _decoder_of_chat(description, model.tokenizer, controls)
    elif model.tokenizer is not None and (description.want_text or strings):
        decode = model.tokenizer.decoder(skip_special_tokens=description.skip_special_tokens)
    context = np.frombuffer(description.context, "<i4").tolist()
    anchor, replacements = (), ()
    if model.tokenizer is not None:
        anchor, replacements = model.tokenizer.token_bytes.anchor, model.tokenizer.replacements
    stop_finder = StopFinder(strings, include_stop=stop.include_stop) if strings else None
    model_stops = frozenset[int]() if stop.ignore_eos else model.eos_token_ids

    def make(sample_idx: int) -> SampleOutput:
        parts: dict[str, Any] = {
            "detokenizer": Detokenizer(decode, context, anchor, replacements) if decode is not None else None,
            "stop_finder": stop_finder.fork() if stop_finder is not None else None,
            "stop_token_ids": model_stops | frozenset(stop.stop_token_ids),
            "min_new_tokens": stop.min_new_tokens,
            "include_stop": stop.include_stop,
        }
        if not description.HasField("chat"):
            return SampleOutput(**parts)
        parser = make_parser(
            description.chat, description.accepted.request_id, sample_idx, frozenset(controls.values())
        )
        return ChatOutput(**parts, parser=parser, hidden=hidden)

    return tuple(make(idx) for idx in range(description.accepted.sampling.num_samples))


def _decoder_of_chat(
    description: frontend_pb2.StreamDescription, tokenizer: Tokenizer, controls: Mapping[int, str]
) -> tuple[Decode, re.Pattern[str] | None]:
    """Returns (the decode function, the special tokens that the caller does not see although the parser does).

    `controls` are marked, so that text that reads the same is none of them.
    """
    special = tokenizer.special_tokens if description.skip_special_tokens else dict[int, str]()
    seen = _in_template(description.chat, special)
    decode = tokenizer.decoder_without(special.keys() - seen.keys())
    texts = sorted(seen.values(), key=len, reverse=True)
    if controls:
        written = frozenset(controls.values())
        decode, texts = marking(decode, controls), [marked(text) if text in written else text for text in texts]
    return decode, re.compile("|".join(map(re.escape, texts))) if texts else None


def _controls_of(description: frontend_pb2.StreamDescription, model: Model) -> dict[int, str]:
    """The control tokens that a grammar writes where the response template has their texts."""
    if not description.chat.marks_are_tokens or model.chat.renderer is None:
        return {}
    return _in_template(description.chat, {idx: text for text, idx in model.chat.renderer.marks.items()})


def _in_template(chat: frontend_pb2.ChatParsing, tokens: Mapping[int, str]) -> dict[int, str]:
    """Those of the tokens whose text is in the response template."""
    marks = "\n".join(_strings(json.loads(chat.response_template_json)["fields"]))
    return {idx: text for idx, text in tokens.items() if text in marks or re.escape(text) in marks}


def _strings(value: object) -> Iterator[str]:
    """Every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        inside = cast(dict[str, object] | list[object], value)
        for each in inside.values() if isinstance(inside, dict) else inside:
            yield from _strings(each)
