"""Reads a request of `/v1/completions`. Pure: JSON in, calls of the service out."""

from typing import cast

from tandem.v1 import inference_pb2

from tandem_client.gateway.errors import invalid
from tandem_client.gateway.openai import names
from tandem_client.gateway.openai.fields import Fields, text_of, wrong
from tandem_client.gateway.openai.options import Streaming, set_options, streaming, token_ids
from tandem_client.gateway.openai.wanted import Wanted

# Each is a request of the service.
MAX_PROMPTS = 256


def completion(values: dict[str, object]) -> Wanted:
    """Returns what the request asks for. Raises HttpError, which names the wrong field."""
    fields, known = Fields(values), dict(names.COMPLETION)
    shared = inference_pb2.GenerateRequest()
    set_options(fields, shared, known)
    stream = streaming(fields)
    most, is_echo = fields.integer("max_tokens"), fields.flag("echo") or False
    hides_output = most == 0 and is_echo
    if most is not None:
        shared.stop.max_new_tokens = 1 if hides_output else most
    num_top = fields.integer("logprobs")
    num_prompt_top = fields.integer("prompt_logprobs")
    if is_echo and num_top is not None:
        num_prompt_top = max(num_top, num_prompt_top or 0)
    with_token_ids = fields.flag("return_token_ids") or False
    _set_output(shared, num_top, num_prompt_top, stream, with_token_ids=with_token_ids)
    if (adds := fields.flag("add_special_tokens")) is not None:
        shared.add_special_tokens = adds
    prompts = _prompts(fields.any("prompt"))
    num_samples = shared.sampling.num_samples or 1
    # The old way to sample several and get the best of them; with as many as are returned it says nothing new.
    fields.same_as_unset({**names.OF_COMPLETIONS, "best_of": (num_samples,)})
    fields.drop(*names.IGNORED)
    fields.end()
    return Wanted(
        requests=tuple(_request(prompt, i, shared, single=len(prompts) == 1) for i, prompt in enumerate(prompts)),
        num_samples=num_samples,
        names=known,
        is_chat=False,
        is_stream=stream.is_stream,
        with_usage=stream.at_end,
        with_every_usage=stream.in_each,
        num_top=num_top,
        num_prompt_top=num_prompt_top,
        is_echo=is_echo,
        hides_output=hides_output,
        with_token_ids=with_token_ids,
    )


def _set_output(
    shared: inference_pb2.GenerateRequest,
    num_top: int | None,
    num_prompt_top: int | None,
    stream: Streaming,
    *,
    with_token_ids: bool,
) -> None:
    set_logprobs(shared.output, num_top, num_prompt_top)
    # Without them a message is smaller; with them, tokens can be counted before the end.
    shared.output.want_token_ids = with_token_ids or num_top is not None or stream.in_each


def set_logprobs(output: inference_pb2.OutputParams, num_top: int | None, num_prompt_top: int | None) -> None:
    """Asks for logprobs. The service has one number of alternatives for the prompt and the output."""
    if num_top is not None or num_prompt_top is not None:
        output.logprobs = max(num_top or 0, num_prompt_top or 0)
        output.logprob_pieces = True
    if num_prompt_top is not None:
        output.prompt_logprobs_start = 0


def _prompts(value: object) -> list[str | list[int]]:
    """The prompts: one text, one list of ids, or a list of either."""
    if value is None:
        raise invalid("prompt", "prompt is missing")
    if isinstance(value, str):
        return [text_of(value, "prompt")]
    if not isinstance(value, list):
        raise wrong("prompt", value, "a string, a list of token ids, or a list of these")
    items = cast(list[object], value)
    if not items:
        raise invalid("prompt", "prompt is empty; at least 1 token is needed")
    if isinstance(items[0], int | float):
        return [token_ids(items, "prompt")]
    if len(items) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt has {len(items)} prompts; the limit is {MAX_PROMPTS}")
    return [
        token_ids(cast(list[object], item), f"prompt[{i}]") if isinstance(item, list) else text_of(item, f"prompt[{i}]")
        for i, item in enumerate(items)
    ]


def _request(
    prompt: str | list[int], idx: int, shared: inference_pb2.GenerateRequest, *, single: bool
) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    request.CopyFrom(shared)
    if isinstance(prompt, str):
        request.text = prompt
        return request
    if not prompt:
        name = "prompt" if single else f"prompt[{idx}]"
        raise invalid(name, f"{name} is empty; at least 1 token is needed")
    request.token_ids.ids.extend(prompt)
    return request
