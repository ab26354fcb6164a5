"""The bodies of requests: OpenAI's fields, and vLLM's.

An attribute has the name of the client's keyword that it sets; where OpenAI's name is another one, it is the alias.
Only what a message of the service cannot hold is refused here; the service checks ranges.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, create_model
from pydantic_core import CoreSchema

from tandem_client.gateway.openai.fields import TAG, Body, Only
from tandem_client.wire.parts import IGNORED_IN_MESSAGES, SAMPLING

# Taken and ignored, because no answer depends on them. `user` is not among them: it divides the prefix cache.
IGNORED: Mapping[str, str] = {
    "metadata": "it labels stored answers, and none is stored",
    "store": "no answer is stored",
    "service_tier": "there is one tier; priority orders requests",
    "safety_identifier": "no user is reported",
    "prompt_cache_key": "the service finds equal beginnings of prompts by itself",
    "prompt_cache_options": "pages of prompts are kept while there is room for them",
    "prompt_cache_retention": "pages of prompts are kept while there is room for them",
    "prediction": "the answer is the same without it",
    "verbosity": "chat templates do not know it",
    "guided_decoding_backend": "there is one",
}
_NO_BEAMS = "there is no beam search"
_OF_GRAMMARS = "the service's grammars decide about white space"
_WITHOUT_EFFECT: Mapping[str, Only] = {
    "use_beam_search": Only((False,), _NO_BEAMS),
    "length_penalty": Only((1,), _NO_BEAMS),
    "early_stopping": Only((False,), _NO_BEAMS),
    "truncate_prompt_tokens": Only((), "a prompt is answered whole or refused"),
    "spaces_between_special_tokens": Only((True,), "the tokenizer decides"),
    "bad_words": Only(([],), "words are not banned; logit_bias bans tokens by -100"),
    "return_tokens_as_token_ids": Only((False,), "return_token_ids adds ids to an answer"),
    "kv_transfer_params": Only((), "other servers have no pages of this one"),
    "guided_whitespace_pattern": Only((), _OF_GRAMMARS),
}
OF_COMPLETIONS: Mapping[str, Only] = {
    **_WITHOUT_EFFECT,
    "suffix": Only(("",), "the model continues a text, and fills no gap in it"),
}
OF_TEMPLATES: Mapping[str, Only] = {
    "add_special_tokens": Only((False,), "the chat template has them"),
    "chat_template": Only((), "the model's own is used"),
}
OF_CHATS: Mapping[str, Only] = {
    **_WITHOUT_EFFECT,
    **OF_TEMPLATES,
    "echo": Only((False,), "an answer is a message of its own"),
    "include_reasoning": Only((True,), "reasoning is part of the answer"),
    "modalities": Only((["text"],), "answers are text"),
    "audio": Only((), "answers are text"),
    "moderation": Only((), "nothing is moderated, and a caller that asks for it relies on it"),
    "documents": Only((), "give them in messages"),
    "web_search_options": Only((), "nothing is searched"),
}
# Tags of unions.
_TEXT, _LIST, _IDS, _OBJECT, _REFUSAL, _ANY = (
    f"{TAG}{kind}" for kind in ("text", "list", "ids", "object", "refusal", "any")
)


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _wholes(values: object) -> object:
    items = cast(list[object], values)
    return list(map(_whole, items)) if isinstance(values, list) and float in map(type, items) else items


def _token_id(key: str) -> int | str:
    return int(key) if key.isascii() and key.isdecimal() and len(key) <= 10 else key


class _First:
    """fail_fast for a dict, which pydantic's core knows, and Field before version 2.14 does not."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> CoreSchema:
        schema = handler(source)
        schema["fail_fast"] = True
        return schema


def _tag(value: object) -> str | None:
    """The tag of a value, by its type."""
    return next((one for kind, one in ((str, _TEXT), (list, _LIST), (dict, _OBJECT)) if isinstance(value, kind)), None)


def _either(words: str, by: Callable[[Any], str | None] = _tag) -> Discriminator:
    """The reader of a union of types with tags. `words`: the error for a value of another type."""
    return Discriminator(by, custom_error_type="either", custom_error_message=words)


# With a bound of its length pydantic looks at the characters: JSON may have half a surrogate pair, which no text has.
Text = Annotated[str, Field(min_length=0)]
Number = Annotated[float, Field(allow_inf_nan=False)]
# JSON has one kind of numbers, so 16.0 is whole; true and "3" are not numbers.
_WHOLE, _UINT32 = BeforeValidator(_whole), Field(ge=0, le=2**32 - 1)
Unsigned = Annotated[int, _UINT32, _WHOLE]
_Seed = Annotated[int, Field(ge=-(2**63), lt=2**64), _WHOLE, AfterValidator(lambda number: number % 2**64)]
# vLLM's "all tokens" is -1.
_TopK = Annotated[int, Field(ge=-1, le=2**32 - 1), _WHOLE, AfterValidator(lambda number: max(0, number))]
# A list ends with its first error, because a body may have a million.
_FIRST = Field(fail_fast=True)
TokenIds = Annotated[list[Annotated[int, _UINT32]], _FIRST, BeforeValidator(_wholes)]
Texts = Annotated[list[Text], _FIRST]
# The keys of an object are strings in JSON.
Bias = Annotated[dict[Annotated[int, _UINT32, BeforeValidator(_token_id)], Number], _First()]
_AsText = Annotated[Text, Tag(_TEXT)]
_AsIds = Annotated[TokenIds, Tag(_IDS)]
_AsTexts = Annotated[Texts, Tag(_LIST)]
# Any JSON. What is text already is written by the caller as JSON.
Json = Annotated[
    _AsText | Annotated[Any, Tag(_ANY)],
    Discriminator(lambda value: _TEXT if isinstance(value, str) else _ANY),
    WithJsonSchema({}),
]


def _part_tag(value: object) -> str | None:
    if not isinstance(value, dict):
        return _TEXT if isinstance(value, str) else None
    kind = cast(dict[str, object], value).get("type")
    return _OBJECT if kind == "text" else _REFUSAL if kind == "refusal" else None


def _prompt_tag(value: object) -> str | None:
    items = cast(list[object], value) if isinstance(value, list) else ()
    return _IDS if items and isinstance(items[0], int | float) else _tag(cast(object, value))


_ADDED: Mapping[str, str] = dict.fromkeys(IGNORED_IN_MESSAGES, "other servers and libraries add it to their answers")


class TextPart(Body):
    """A part of a message."""

    IGNORED = _ADDED
    type: Literal["text"]
    text: Text


class RefusalPart(Body):
    """A part of an earlier answer."""

    IGNORED = _ADDED
    type: Literal["refusal"]
    refusal: Text


_Part = Annotated[
    _AsText | Annotated[TextPart, Tag(_OBJECT)] | Annotated[RefusalPart, Tag(_REFUSAL)],
    _either("only text parts are supported, no images, sound or files", _part_tag),
]
_Parts = Annotated[list[_Part], _FIRST, Tag(_LIST)]


class Function(Body):
    """What is called. Models write any arguments, and agents send them back: a string in OpenAI's API, or the value."""

    IGNORED = _ADDED
    name: Text
    arguments: Json | None = None


class Call(Body):
    """A call of a tool."""

    IGNORED = _ADDED
    id: Text | None = None
    type: Literal["function"] | None = None
    function: Function


class Message(Body):
    """A message of a conversation. The service checks roles."""

    IGNORED = _ADDED
    WITHOUT_EFFECT: ClassVar[Mapping[str, Only]] = {"audio": Only((), "messages are text")}
    role: Text
    content: Annotated[_AsText | _Parts, _either("it must be a string or a list of parts")] | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    tool_calls: Annotated[list[Call], _FIRST] | None = None
    # The old form of one call; a message of the role `function` has its result.
    function_call: Function | None = None
    tool_call_id: Text | None = None
    name: Text | None = None


class Conversation(Body):
    """Messages, and what a template takes."""

    messages: Annotated[list[Message], _FIRST]
    tools: Annotated[list[dict[str, Any]], _FIRST] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    template_args: dict[str, Any] | None = Field(None, alias="chat_template_kwargs")
    reasoning_effort: Text | None = None


class JsonSchema(Body):
    """OpenAI's schema of an output."""

    IGNORED: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("name", "description", "strict"), "the output obeys the schema under any name"
    )
    json_schema: Json = Field(alias="schema")


class ResponseFormat(Body):
    """OpenAI's constraint of an output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's constraint of an output."""

    WITHOUT_EFFECT: ClassVar[Mapping[str, Only]] = {
        "disable_any_whitespace": Only((False,), _OF_GRAMMARS),
        "whitespace_pattern": Only((), _OF_GRAMMARS),
        "structural_tag": Only((), "tool calls have their own constraint, by tools and tool_choice"),
        "disable_additional_properties": Only((False,), "the schema decides"),
        "disable_fallback": Only((False, True), "there is one kind of grammars"),
    }
    json_schema: Json | None = Field(None, alias="json")
    regex: Text | None = None
    choices: Texts | None = Field(None, alias="choice")
    lark: Text | None = Field(None, alias="grammar")
    json_object: bool | None = None


class StreamOptions(Body):
    """Which chunks of a stream have usage."""

    IGNORED: ClassVar[Mapping[str, str]] = {"include_obfuscation": "a chunk is as long as its text"}
    include_usage: bool = False
    continuous_usage_stats: bool = False


# The options of sampling that are numbers with a point.
_numbers: dict[str, Any] = {
    name: (cast(Any, Number) | None, None) for name, (kind, _) in SAMPLING.items() if kind is float
}
_Numbers = create_model("_Numbers", __base__=Body, **_numbers)


class Options(_Numbers):
    """What completions and chats have in common."""

    IGNORED = IGNORED
    model: Text | None = None
    top_k: _TopK | None = None
    seed: _Seed | None = None
    num_samples: Annotated[int, Field(ge=1, le=2**32 - 1), _WHOLE] | None = Field(None, alias="n")
    logit_bias: Bias | None = None
    allowed_token_ids: TokenIds | None = None
    max_new_tokens: Unsigned | None = Field(None, alias="max_tokens")
    min_new_tokens: Unsigned | None = Field(None, alias="min_tokens")
    stop: Annotated[
        _AsText | _AsTexts, _either("it must be a string or a list of strings")
    ] | None = None  # fmt: skip
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop: bool | None = Field(None, alias="include_stop_str_in_output")
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), _WHOLE] | None = None
    cache_salt: Text | None = None
    user: Text | None = None
    num_prompt_top: Unsigned | None = Field(None, alias="prompt_logprobs")
    with_token_ids: bool = Field(False, alias="return_token_ids")
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # vLLM had these before `structured_outputs`.
    guided_json: Json | None = None
    guided_regex: Text | None = None
    guided_choice: Texts | None = None
    guided_grammar: Text | None = None


_Prompt = Annotated[_AsText | Annotated[TokenIds, Tag(_LIST)], _either("it must be a string or a list of token ids")]


class Completion(Options):
    """POST /v1/completions."""

    WITHOUT_EFFECT = OF_COMPLETIONS
    prompt: Annotated[
        _AsText | _AsIds | Annotated[list[_Prompt], _FIRST, Tag(_LIST)],
        _either("it must be a string, a list of token ids, or a list of these", _prompt_tag),
    ]
    add_special_tokens: bool | None = None
    num_top: Unsigned | None = Field(None, alias="logprobs")
    echo: bool = False
    # The old way to sample several and get the best of them; with as many as are returned it says nothing new.
    best_of: Unsigned | None = None


class Chat(Options, Conversation):
    """POST /v1/chat/completions."""

    WITHOUT_EFFECT = OF_CHATS
    # The new name of `max_tokens`.
    max_completion_tokens: Unsigned | None = None
    has_logprobs: bool | None = Field(None, alias="logprobs")
    num_top: Unsigned | None = Field(None, alias="top_logprobs")
    tool_choice: Annotated[
        Annotated[Literal["auto", "none", "required"], Tag(_TEXT)] | Annotated["NamedTool", Tag(_OBJECT)],
        _either("it must be auto, none, required, or an object with a function's name"),
    ] | None = None  # fmt: skip
    parallel_tool_calls: bool | None = None
    # The old form of tools, which has one call in an answer.
    functions: Annotated[list[dict[str, Any]], _FIRST] | None = None
    function_call: Annotated[
        Annotated[Literal["auto", "none"], Tag(_TEXT)] | Annotated["ToolName", Tag(_OBJECT)],
        _either("it must be auto, none, or an object with a function's name"),
    ] | None = None  # fmt: skip


class ToolName(Body):
    """The name of a tool."""

    name: Text


class NamedTool(Body):
    """A choice of one tool."""

    type: Literal["function"]
    function: ToolName


class TokenizeText(Body):
    """POST /tokenize with a text."""

    model: Text | None = None
    prompt: Text
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(Conversation):
    """POST /tokenize with a conversation."""

    WITHOUT_EFFECT = OF_TEMPLATES
    model: Text | None = None
    return_token_strs: bool | None = None


class Detokenize(Body):
    """POST /detokenize."""

    model: Text | None = None
    token_ids: TokenIds = Field(alias="tokens")
