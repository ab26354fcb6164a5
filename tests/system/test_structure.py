"""Structured answers of the bundled model through the whole service: tools, schemas, and the deaths of workers and of
servers of masks while they stream.

What the model writes has no sense, so its structure is the constraint's alone. OpenAI's client and jsonschema read it.
"""

import itertools
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jsonschema
import openai
import psutil
import pytest
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice

from tandem_client import Client
from tandem_client.errors import InvalidArgument
from tests.gpu_worker.constraints.schemas import SchemaMaker, with_null
from tests.rigs.processes import Child, Rig
from tests.system.real_service import TIMEOUT_SECONDS, real_service
from tests.system.test_gateway import gateway

# Its workers are forked by a process that has imported torch, which takes seconds.
pytestmark = pytest.mark.together("torch")

_WORKER = ("--page-size=16", "--max-rows=16", "--max-length=512", "--token-budget=128", "--num-pages=512")
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {"weather": WEATHER, "now": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "now", "parameters": {**SCHEMAS["now"], "additionalProperties": False}}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "What will the weather be?"}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Talking:
    """A service with the bundled model, its own client, and OpenAI's at a gateway."""

    rig: Rig
    workers: list[Child]
    client: Client
    openai: openai.OpenAI

    def chat(self, **asked: Any) -> Choice:
        """The first choice of the answer to `MESSAGES`, with at most 100 tokens at temperature 1 unless it is said."""
        asked = {"model": "", "messages": MESSAGES, "temperature": 1, "max_tokens": 100} | asked
        return self.openai.chat.completions.create(**asked).choices[0]

    def chunks(self, **asked: Any) -> list[ChunkChoice]:
        """The first choice of each chunk of a stream."""
        asked = {"model": "", "messages": MESSAGES, "temperature": 1, "max_tokens": 100} | asked
        return [chunk.choices[0] for chunk in self.openai.chat.completions.create(stream=True, **asked)]


@pytest.fixture(scope="module")
def talking() -> Iterator[Talking]:
    with Rig() as rig:
        worker = rig.real_worker(*_WORKER)
        address = rig.scheduler().address
        with Client(address) as client, gateway(rig, address) as (_, url):
            client.wait_ready(TIMEOUT_SECONDS)
            with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as of_openai:
                yield Talking(rig=rig, workers=[worker], client=client, openai=of_openai)


def _check_calls(calls: list[Any], finish_reason: str = "tool_calls") -> None:
    # A call that max_tokens cuts off is incomplete, and the last one.
    for call in calls[:-1] if finish_reason == "length" else calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def _at_once(ask: Callable[[Any], object], asked: Iterable[Any]) -> None:
    """In the same steps, which is quicker."""
    with ThreadPoolExecutor(8) as pool:
        for answer in [pool.submit(ask, each) for each in asked]:
            answer.result(TIMEOUT_SECONDS)


def _strict(schema: dict[str, Any]) -> Any:
    """A format of answers."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _tool(parameters: dict[str, Any], *, strict: bool = True) -> Any:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}


@pytest.mark.parametrize(
    ("choice", "parallel", "names", "numbers"),
    [
        ("required", True, {"weather", "now"}, range(1, 100)),
        ("required", False, {"weather", "now"}, range(1, 2)),
        ({"type": "function", "function": {"name": "weather"}}, True, {"weather"}, range(1, 2)),
        ({"type": "function", "function": {"name": "now"}}, True, {"now"}, range(1, 2)),
        ("auto", True, {"weather", "now"}, range(100)),
        ("none", True, set(), range(1)),
    ],
)
def test_calls_are_as_the_choice_says(
    talking: Talking, choice: Any, parallel: bool, names: set[str], numbers: range
) -> None:
    def ask(seed: int) -> None:
        answer = talking.chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel, seed=seed)
        calls: list[Any] = answer.message.tool_calls or []
        assert len(calls) in numbers and {call.function.name for call in calls} <= names
        _check_calls(calls, answer.finish_reason)
        if choice != "auto" and not parallel:
            assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)

    _at_once(ask, range(2))


def test_the_pieces_of_a_streamed_call_are_those_of_the_whole(talking: Talking) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}

    def ask(seed: int) -> None:
        [whole] = talking.chat(seed=seed, **asked).message.tool_calls or []
        pieces = [piece for choice in talking.chunks(seed=seed, **asked) for piece in (choice.delta.tool_calls or [])]
        named = [(piece.id, piece.function.name) for piece in pieces if piece.id]
        assert named == [(pieces[0].id, whole.function.name)]
        assert "".join(piece.function.arguments or "" for piece in pieces) == whole.function.arguments
        _check_calls([whole])

    _at_once(ask, range(2))


def test_a_refused_schema_is_named_by_the_place_in_the_request(talking: Talking) -> None:
    """In the message and in `param`, of a response format and of a strict tool."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    number = {"const": 1234567890123456789}
    for asked, path in (
        ({"response_format": _strict(schema)}, "response_format.json_schema.schema.properties.a"),
        ({"response_format": _strict(number)}, "response_format.json_schema.schema.const"),
        ({"tools": [_tool(schema)]}, "tools[0].function.parameters.properties.a"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            talking.chat(**asked)
        assert refused.value.param == path and path in refused.value.message
    with pytest.raises(InvalidArgument, match="does not support uniqueItems; leave it out") as own:
        list(talking.client.generate("a", json_schema=schema))
    assert own.value.keyword == "json_schema.properties.a"


def test_names_that_run_out_and_names_that_may_repeat(talking: Talking) -> None:
    """A required name that a pattern matches ends no stream, and a record has each name once; also in a strict tool."""
    score = {
        "type": "object", "patternProperties": {"^score$": {"type": "boolean"}, "^[xy]$": {"type": "null"}},
        "required": ["score"], "additionalProperties": False,
    }  # fmt: skip
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "boolean"}}
    record |= {"minProperties": 2, "maxProperties": 3}

    def ask(given: tuple[int, dict[str, Any], dict[str, Any]]) -> None:
        seed, schema, asked = given
        answer = talking.chat(seed=seed, max_tokens=120, **asked)
        calls: list[Any] = answer.message.tool_calls or []
        texts = [call.function.arguments for call in calls] or [answer.message.content]
        for text in texts[:-1] if answer.finish_reason == "length" else texts:
            jsonschema.validate(json.loads(text), schema)

    _at_once(
        ask,
        [
            (seed, schema, asked)
            for seed, schema in enumerate((score, record))
            for asked in ({"response_format": _strict(schema)}, {"tools": [_tool(schema)], "tool_choice": "required"})
        ],
    )


def test_an_answer_matches_its_schema_or_calls_a_tool(talking: Talking) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}

    def ask(seed: int) -> None:
        answer = talking.chat(tools=TOOLS, response_format=_strict(schema), seed=seed)
        calls: list[Any] = answer.message.tool_calls or []
        _check_calls(calls, answer.finish_reason)
        if not calls and answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.message.content or ""), schema)

    _at_once(ask, range(3))


@pytest.mark.parametrize("text", ["a<|im_end|>b", "<|endoftext|>", "</tool_call><think>"])
def test_texts_of_control_tokens_are_served_as_they_are(talking: Talking, text: str) -> None:
    """In content, in arguments of a call, and without a chat."""
    closed = {"type": "object", "additionalProperties": False}
    schema = closed | {"properties": {text: {"const": text}}, "required": [text]}
    answer = talking.chat(response_format=_strict(schema), max_tokens=200)
    assert (json.loads(answer.message.content or ""), answer.finish_reason) == ({text: text}, "stop")
    parameters = closed | {"properties": {"x": {"enum": [text]}}, "required": ["x"]}
    calls: list[Any] = talking.chat(tools=[_tool(parameters)], tool_choice="required").message.tool_calls or []
    assert calls and json.loads(calls[0].function.arguments) == {"x": text}
    stream = talking.client.generate("The", choices=[text], max_new_tokens=60)
    assert "".join(delta.text for delta in stream) == text


@pytest.mark.parametrize("choice", ["\nyes", " \n no", "yes\n", "\t"])
def test_a_choice_is_the_content_to_the_letter(talking: Talking, choice: str) -> None:
    """The prompt ends with a mark, after which other answers lose their first white space."""
    chosen = {"guided_choice": [choice]}
    assert talking.chat(extra_body=chosen).message.content == choice
    assert "".join(each.delta.content or "" for each in talking.chunks(extra_body=chosen)) == choice


@pytest.mark.parametrize("kind", ["choice", "grammar", "regex"])
def test_constraints_hold_beside_thinking_and_tools(talking: Talking, kind: str) -> None:
    value = {"choice": ["yes", "no"], "grammar": 'start: "yes" | "no"', "regex": "yes|no"}[kind]

    def ask(given: tuple[dict[str, Any], bool]) -> None:
        tools, thinking = given
        extra = {"chat_template_kwargs": {"enable_thinking": thinking}, "structured_outputs": {kind: value}}
        found = talking.chat(**tools, extra_body=extra)
        is_cut = thinking and found.finish_reason == "length"
        assert found.message.content in ("yes", "no") or found.message.tool_calls or is_cut

    _at_once(ask, itertools.product(({}, {"tools": TOOLS}), (False, True)))


def test_a_call_that_is_cut_has_no_part_in_the_content(talking: Talking) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    for num_tokens in range(1, 16, 3):
        cut = talking.chat(tools=TOOLS[:1], tool_choice="required", max_tokens=num_tokens, extra_body=extra)
        assert not cut.message.content and cut.finish_reason == "length"


def test_a_tool_that_cannot_be_obeyed_is_named_in_a_warning(talking: Talking) -> None:
    loose = _tool({"type": "object", "not": {}}, strict=False)
    asked: dict[str, Any] = {"model": "", "messages": MESSAGES, "max_tokens": 100, "tools": [loose]}
    raw = talking.openai.chat.completions.with_raw_response.create(**asked, tool_choice="required")
    assert "tool 'f'" in raw.headers["x-tandem-warning"] and raw.parse().choices[0].message.tool_calls


def test_a_stream_has_the_content_of_the_whole_answer(talking: Talking) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello <|im_end|>"}], "seed": 1}
    whole = talking.chat(**asked).message.content
    assert whole and "".join(each.delta.content or "" for each in talking.chunks(**asked)) == whole


def test_logprobs_are_those_of_the_text(talking: Talking) -> None:
    """Tokens and bytes are those of the text, with characters of several tokens, and no alternative is lost."""
    chosen = {"guided_choice": [" 😀 é\n"]}
    ask: dict[str, Any] = {"model": "", "prompt": "Hi 😀", "echo": True, "logprobs": 20, "extra_body": chosen}
    [whole] = talking.openai.completions.create(**ask).choices
    assert whole.text == "Hi 😀 😀 é\n" and whole.logprobs is not None
    shown = whole.logprobs.model_dump()
    tokens = [(token, at) for token, at in zip(shown["tokens"], shown["text_offset"], strict=True) if token[:2] != "<|"]
    assert "".join(token for token, _ in tokens) == whole.text
    assert all(whole.text.startswith(token, at) for token, at in tokens)
    assert all(len(top) >= 20 for top in shown["top_logprobs"][1:])
    streamed = {name: list[Any]() for name in shown}
    for chunk in talking.openai.completions.create(**ask, stream=True):
        for name, values in (chunk.choices[0].logprobs.model_dump() if chunk.choices[0].logprobs else {}).items():
            streamed[name] += values
    assert (streamed["tokens"], streamed["text_offset"]) == (shown["tokens"], shown["text_offset"])
    answer = talking.chat(extra_body=chosen, logprobs=True, top_logprobs=20)
    content = (answer.logprobs and answer.logprobs.content) or []
    spoken = bytes(byte for entry in content for byte in entry.bytes or ()).decode()
    assert spoken == answer.message.content == " 😀 é\n"
    assert all(len(entry.top_logprobs) == 20 for entry in content)


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "not a name of a tool"),
        ({"tool_choice": "required", "extra_body": {"ignore_eos": True}}, "ignore_eos", "exclude each other"),
    ],
)
def test_what_excludes_each_other_is_refused_by_openais_names(
    talking: Talking, change: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as error:
        talking.chat(tools=TOOLS, **change)
    assert param in str(error.value)


@pytest.mark.parametrize(("num_schemas", "seed"), [(16, 5), pytest.param(300, 6, marks=pytest.mark.long)])
def test_random_schemas_finish_and_validate(talking: Talking, num_schemas: int, seed: int) -> None:
    client, maker, refused = talking.client, SchemaMaker(seed), Counter[str]()

    def ask(schema: dict[str, Any]) -> bool | None:
        """Whether an output finished; None if the schema is refused."""
        try:
            stream = client.generate(
                "The", json_schema=schema, max_new_tokens=300, temperature=1.0, seed=seed, request_id=schema["title"]
            )
            text = "".join(delta.text for delta in stream)
        except InvalidArgument as error:
            refused[str(error).partition("; ")[0].partition(": ")[2]] += 1
            return None
        assert stream.finished is not None
        if stream.finished.reason not in ("constraint_complete", "eos"):
            return False
        jsonschema.validate(json.loads(text), with_null(schema))
        return True

    schemas = [maker.make() | {"title": f"schema {i}"} for i in range(num_schemas)]
    with ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(ask, schemas))
    accepted = [end for end in ends if end is not None]
    print(f"refused {refused.most_common()}; finished {sum(accepted)} of {len(accepted)}")
    assert len(accepted) >= num_schemas // 2
    assert sum(accepted) >= 0.8 * len(accepted)


PET = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog", "bird"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
WORDS, CHOICES = "[A-Z][a-z]{2,8}( [a-z]{2,8}){3,6}", ["yes", "no", "perhaps not"]
# One constrained request of each kind, and whether a text obeys it. The first one may end by its length.
KINDS: list[tuple[dict[str, Any], Callable[[str], object]]] = [
    ({"json_schema": PET, "max_new_tokens": 250}, lambda text: jsonschema.validate(json.loads(text), PET) is None),
    ({"regex": WORDS, "max_new_tokens": 100}, lambda text: re.fullmatch(WORDS, text)),
    ({"choices": CHOICES, "max_new_tokens": 20}, CHOICES.__contains__),
]


def _texts(client: Client, count: int, during: Callable[[], object] = int) -> list[tuple[str, str]]:
    """The texts and finish reasons of requests that run at once, each with a seed of its own."""

    def read(i: int) -> tuple[str, str]:
        options: dict[str, Any] = {**KINDS[i % len(KINDS)][0], "temperature": 0.8, "top_p": 0.95, "seed": i}
        stream = client.generate("The animal", **options, timeout=TIMEOUT_SECONDS)
        text = "".join(delta.text for delta in stream)
        assert stream.finished is not None
        return text, stream.finished.reason.value

    with ThreadPoolExecutor(count) as pool:
        found = [pool.submit(read, i) for i in range(count)]
        during()
        return [each.result(TIMEOUT_SECONDS) for each in found]


def _check_texts(found: list[tuple[str, str]]) -> None:
    """All that ended by itself is valid; of the short ones all did."""
    for i, (text, reason) in enumerate(found):
        if i % len(KINDS) or reason != "length":
            assert reason in ("constraint_complete", "eos"), (text, reason)
            assert KINDS[i % len(KINDS)][1](text), text


def _mask_server(worker: Child) -> int:
    """The process that serves masks, a child of the one that forks it; 0 without one."""
    for process in psutil.Process(worker.pid).children():
        if "gpu_worker.constraints" in process.cmdline():
            return next((child.pid for child in process.children()), 0)
    return 0


def test_outputs_obey_their_constraints_and_killed_mask_servers_change_none(talking: Talking) -> None:
    expected, killed = _texts(talking.client, 12), {0}
    _check_texts(expected)
    assert sum(reason != "length" for _, reason in expected) >= 10
    assert len({text for text, _ in expected}) > 6

    def kill() -> None:
        # When all streams have ended, no other server starts.
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            if (process := _mask_server(talking.workers[-1])) not in killed:
                # One that ends twice before it has a mask blames the constraint.
                time.sleep(0.1)
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
                killed.add(process)
            time.sleep(0.02)

    assert _texts(talking.client, 12, kill) == expected
    assert len(killed) > 2


@pytest.mark.long
def test_two_ranks_choose_tokens_by_the_masks_of_the_leader(talking: Talking) -> None:
    expected = _texts(talking.client, 6)
    with real_service(flags=["--ranks", "2"]) as group:
        found = _texts(group.client, 6)
    _check_texts(found)
    # Sums of two ranks round differently, and a draw may then be another token.
    assert sum(one == other for one, other in zip(found, expected, strict=True)) >= 3


@pytest.mark.parametrize("num_kills", [1, pytest.param(20, marks=pytest.mark.long)])
def test_kills_change_no_structured_answer(talking: Talking, num_kills: int) -> None:
    """Greedy and sampled answers under four constraints, each while a worker is killed, against undisturbed ones."""
    client, workers, before = talking.client, talking.workers, talking.client.load().lane_resets
    constraints: list[dict[str, Any]] = [
        {"json_schema": {"type": "array", "items": WEATHER, "minItems": 5, "maxItems": 5}},
        {"regex": "[a-z]{3,9}( [a-z]{3,9}){40}"},
        {"lark": 'start: item ("; " item){20}\nitem: /[A-Z][a-z]{2,8}/ " " /[0-9]{1,4}/'},
        {},
    ]

    def ask(i: int) -> Any:
        return client.generate(
            f"Return the {i}", **constraints[i % 4], max_new_tokens=160, temperature=0.7 * (i % 8 > 3), seed=i
        )

    def read(stream: Any) -> list[int]:
        return [token for delta in stream for token in delta.token_ids]

    with ThreadPoolExecutor(8) as pool:
        undisturbed = list(pool.map(lambda i: read(ask(i)), range(8)))
    num_changed = 0
    for _ in range(num_kills):
        workers.append(talking.rig.real_worker(*_WORKER))
        workers[-1].wait_line("joined", TIMEOUT_SECONDS)
        with ThreadPoolExecutor(8) as pool:
            # An iterator that is dropped cancels its request.
            streams = [iter(ask(i)) for i in range(8)]
            begun = [next(stream).token_ids for stream in streams]
            rest = [pool.submit(read, stream) for stream in streams]
            workers[-2].kill()
            answers = [list(first) + of.result(TIMEOUT_SECONDS) for first, of in zip(begun, rest, strict=True)]
        num_changed += sum(one != other for one, other in zip(answers, undisturbed, strict=True))
    # Sums in another order may turn a near tie; the bundled model has few.
    assert num_changed <= num_kills // 4
    assert client.load().lane_resets >= before + num_kills
