"""Structured answers of the bundled model through the whole service: tools, schemas, and kills while they stream.

What the model writes has no sense, so its structure is the constraint's alone. OpenAI's client and jsonschema read it.
"""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

from tandem_client import Client
from tandem_client.errors import InvalidArgument
from tests.gpu_worker.constraints.schemas import SchemaMaker, with_null
from tests.rigs.processes import Rig
from tests.system.real_service import TIMEOUT_SECONDS
from tests.system.test_gateway import gateway

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


@pytest.fixture(scope="module")
def talking() -> Iterator[tuple[Client, openai.OpenAI]]:
    """The service's own client, and OpenAI's at a gateway."""
    with Rig() as rig:
        rig.real_worker(*_WORKER)
        address = rig.scheduler().address
        client = Client(address)
        client.wait_ready(TIMEOUT_SECONDS)
        with (
            gateway(rig, address) as (_, url),
            openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as of_openai,
        ):
            yield client, of_openai
        client.close()


def _check_calls(calls: list[Any], finish_reason: str = "tool_calls") -> None:
    # A call that max_tokens cuts off is incomplete, and the last one.
    for call in calls[:-1] if finish_reason == "length" else calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


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
    talking: tuple[Client, openai.OpenAI], choice: Any, parallel: bool, names: set[str], numbers: range
) -> None:
    for seed in range(6):
        answer = talking[1].chat.completions.create(
            model="", messages=MESSAGES, tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel, seed=seed,
            temperature=1, max_tokens=100,
        ).choices[0]  # fmt: skip
        calls: list[Any] = answer.message.tool_calls or []
        assert len(calls) in numbers and {call.function.name for call in calls} <= names
        _check_calls(calls, answer.finish_reason)
        if choice != "auto" and not parallel:
            assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)


@pytest.mark.parametrize("seed", range(4))
def test_the_pieces_of_a_streamed_call_are_those_of_the_whole(talking: tuple[Client, openai.OpenAI], seed: int) -> None:
    asked: dict[str, Any] = {
        "model": "", "messages": MESSAGES, "tools": TOOLS, "seed": seed, "temperature": 1, "max_tokens": 100,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }  # fmt: skip
    [whole] = talking[1].chat.completions.create(**asked).choices[0].message.tool_calls or []
    pieces = [
        piece
        for chunk in talking[1].chat.completions.create(stream=True, **asked)
        for piece in (chunk.choices[0].delta.tool_calls or [])
    ]
    assert [(piece.id, piece.function.name) for piece in pieces if piece.id] == [(pieces[0].id, whole.function.name)]
    assert "".join(piece.function.arguments or "" for piece in pieces) == whole.function.arguments
    _check_calls([whole])


def test_a_refused_schema_is_named_by_the_place_in_the_request(talking: tuple[Client, openai.OpenAI]) -> None:
    """In the message and in `param`, of a response format and of a strict tool."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    number: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 1234567890123456789}}}
    for asked, path in (
        ({"response_format": form}, "response_format.json_schema.schema.properties.a"),
        ({"response_format": number}, "response_format.json_schema.schema.const"),
        ({"tools": [tool]}, "tools[0].function.parameters.properties.a"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            talking[1].chat.completions.create(model="", messages=MESSAGES, **asked)
        assert refused.value.param == path and path in refused.value.message
    with pytest.raises(InvalidArgument, match="does not support uniqueItems; leave it out") as own:
        list(talking[0].generate("a", json_schema=schema))
    assert own.value.keyword == "json_schema.properties.a"


def test_names_that_run_out_and_names_that_may_repeat(talking: tuple[Client, openai.OpenAI]) -> None:
    """A required name that a pattern matches ends no stream, and a record has each name once; also in a strict tool."""
    score = {
        "type": "object", "patternProperties": {"^score$": {"type": "boolean"}, "^[xy]$": {"type": "null"}},
        "required": ["score"], "additionalProperties": False,
    }  # fmt: skip
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "boolean"}}
    record |= {"minProperties": 2, "maxProperties": 3}
    for schema in (score, record):
        tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
        form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        for seed in range(3):
            asked: dict[str, Any] = {
                "model": "",
                "messages": MESSAGES,
                "seed": seed,
                "temperature": 1,
                "max_tokens": 120,
            }
            answers = [
                talking[1].chat.completions.create(response_format=form, **asked).choices[0],
                talking[1].chat.completions.create(tools=[tool], tool_choice="required", **asked).choices[0],
            ]
            for answer in answers:
                calls: list[Any] = answer.message.tool_calls or []
                texts = [call.function.arguments for call in calls] or [answer.message.content]
                for text in texts[:-1] if answer.finish_reason == "length" else texts:
                    jsonschema.validate(json.loads(text), schema)


def test_an_answer_matches_its_schema_or_calls_a_tool(talking: tuple[Client, openai.OpenAI]) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    for seed in range(6):
        answer = (
            talking[1]
            .chat.completions.create(
                model="", messages=MESSAGES, tools=TOOLS, response_format=form, seed=seed, temperature=1, max_tokens=100
            )
            .choices[0]
        )
        calls: list[Any] = answer.message.tool_calls or []
        _check_calls(calls, answer.finish_reason)
        if not calls and answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.message.content or ""), schema)


@pytest.mark.parametrize("text", ["a<|im_end|>b", "<|endoftext|>", "</tool_call><think>"])
def test_texts_of_control_tokens_are_served_as_they_are(talking: tuple[Client, openai.OpenAI], text: str) -> None:
    """In content, in arguments of a call, and without a chat."""
    schema = {
        "type": "object",
        "properties": {text: {"const": text}},
        "required": [text],
        "additionalProperties": False,
    }
    asked: dict[str, Any] = {"model": "", "messages": MESSAGES, "seed": 1, "max_tokens": 200}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    answer = talking[1].chat.completions.create(response_format=form, **asked).choices[0]  # pyright: ignore[reportArgumentType]
    assert (json.loads(answer.message.content or ""), answer.finish_reason) == ({text: text}, "stop")
    parameters = {
        "type": "object",
        "properties": {"x": {"enum": [text]}},
        "required": ["x"],
        "additionalProperties": False,
    }
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    answer = talking[1].chat.completions.create(tools=tools, tool_choice="required", **asked).choices[0]
    calls: list[Any] = answer.message.tool_calls or []
    assert calls and all(json.loads(call.function.arguments) == {"x": text} for call in calls[:1])
    stream = talking[0].generate("The", choices=[text], max_new_tokens=60)
    assert "".join(delta.text for delta in stream) == text


@pytest.mark.parametrize("choice", ["\nyes", " \n no", "yes\n", "\t"])
def test_a_choice_is_the_content_to_the_letter(talking: tuple[Client, openai.OpenAI], choice: str) -> None:
    """The prompt ends with a mark, after which other answers lose their first white space."""
    asked: dict[str, Any] = {"model": "", "messages": MESSAGES, "extra_body": {"guided_choice": [choice]}}
    assert talking[1].chat.completions.create(**asked).choices[0].message.content == choice
    chunks = list(talking[1].chat.completions.create(stream=True, **asked))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        (
            {"tools": [{"type": "function", "function": {
                "name": "f", "strict": True,
                "parameters": {"properties": {"a": {"type": "array", "uniqueItems": True}}}}}]},
            "tools[0].function.parameters", "uniqueItems",
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "not a name of a tool"),
        ({"tool_choice": "required", "extra_body": {"ignore_eos": True}}, "ignore_eos", "exclude each other"),
    ],
)  # fmt: skip
def test_what_excludes_each_other_is_refused_by_openais_names(
    talking: tuple[Client, openai.OpenAI], change: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as error:
        talking[1].chat.completions.create(**{"model": "", "messages": MESSAGES, "tools": TOOLS, **change})
    assert param in str(error.value)


@pytest.mark.parametrize(("num_schemas", "seed"), [(24, 5), pytest.param(300, 6, marks=pytest.mark.long)])
def test_random_schemas_finish_and_validate(talking: tuple[Client, openai.OpenAI], num_schemas: int, seed: int) -> None:
    client, maker, refused = talking[0], SchemaMaker(seed), Counter[str]()

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


@pytest.mark.parametrize("num_kills", [1, pytest.param(20, marks=pytest.mark.long)])
def test_kills_change_no_structured_answer(rig: Rig, num_kills: int) -> None:
    """Greedy and sampled answers under four constraints, each while a worker is killed, against undisturbed ones."""
    workers = [rig.real_worker(*_WORKER)]
    client = Client(rig.scheduler().address)
    client.wait_ready(TIMEOUT_SECONDS)
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

    undisturbed = [read(ask(i)) for i in range(8)]
    num_changed = 0
    for _ in range(num_kills):
        workers.append(rig.real_worker(*_WORKER))
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
    assert client.load().lane_resets >= num_kills
    client.close()
