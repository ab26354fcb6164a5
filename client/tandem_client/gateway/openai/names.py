"""The names of the service's fields in OpenAI's API, for errors, and the fields that the gateway takes and ignores."""

from collections.abc import Collection, Mapping

_COMMON: Mapping[str, str] = {
    "model": "model",
    "request_id": "x-request-id",
    "priority": "priority",
    "sampling.temperature": "temperature",
    "sampling.top_p": "top_p",
    "sampling.top_k": "top_k",
    "sampling.min_p": "min_p",
    "sampling.typical_p": "typical_p",
    "sampling.seed": "seed",
    "sampling.presence_penalty": "presence_penalty",
    "sampling.frequency_penalty": "frequency_penalty",
    "sampling.repetition_penalty": "repetition_penalty",
    "sampling.num_samples": "n",
    "sampling.logit_bias": "logit_bias",
    "sampling.allowed_token_ids": "allowed_token_ids",
    "sampling.allowed_token_ids.ids": "allowed_token_ids",
    "stop.max_new_tokens": "max_tokens",
    "stop.min_new_tokens": "min_tokens",
    "stop.stop_strings": "stop",
    "stop.stop_token_ids": "stop_token_ids",
    "stop.ignore_eos": "ignore_eos",
    "stop.include_stop": "include_stop_str_in_output",
    "output.skip_special_tokens": "skip_special_tokens",
    "output.logprobs": "logprobs",
    "output.prompt_logprobs_start": "prompt_logprobs",
    "cache.salt": "cache_salt",
    "constraint": "response_format",
    "constraint.json_schema": "response_format",
    "constraint.json_object": "response_format",
    "constraint.regex": "structured_outputs.regex",
    "constraint.choices": "structured_outputs.choice",
    "constraint.choices.choices": "structured_outputs.choice",
    "constraint.lark": "structured_outputs.grammar",
}
COMPLETION: Mapping[str, str] = {
    **_COMMON, "prompt": "prompt", "text": "prompt", "token_ids": "prompt", "token_ids.ids": "prompt",
    "add_special_tokens": "add_special_tokens",
}  # fmt: skip
CHAT: Mapping[str, str] = {
    **_COMMON,
    "prompt": "messages",
    "chat": "messages",
    "chat.messages": "messages",
    "chat.messages[].tool_calls[].name": "messages[].tool_calls[].function.name",
    "chat.messages[].tool_calls[].arguments_json": "messages[].tool_calls[].function.arguments",
    "chat.tools_json": "tools",
    "chat.tool_choice": "tool_choice",
    "chat.tool_choice.mode": "tool_choice",
    "chat.tool_choice.name": "tool_choice.function.name",
    "chat.parallel_tool_calls": "parallel_tool_calls",
    "chat.template_args_json": "chat_template_kwargs",
    "chat.continue_final_message": "continue_final_message",
    "chat.add_generation_prompt": "add_generation_prompt",
    "output.logprobs": "top_logprobs",
}

# Nothing of an answer depends on them. `user` is not among them: it divides the prefix cache.
IGNORED = (
    "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction",
)  # fmt: skip
# Fields that are taken only with values which ask for nothing.
WITHOUT_EFFECT: Mapping[str, Collection[object]] = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "bad_words": ([],),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
}
OF_COMPLETIONS: Mapping[str, Collection[object]] = {
    **WITHOUT_EFFECT, "suffix": ("",), "best_of": (1,),
}  # fmt: skip
OF_CHATS: Mapping[str, Collection[object]] = {
    **WITHOUT_EFFECT,
    "echo": (False,),
    "add_special_tokens": (False,),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "audio": (),
    "functions": (),
    "function_call": (),
    "chat_template": (),
    "documents": (),
    "web_search_options": (),
}
