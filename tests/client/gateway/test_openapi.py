"""The description of the API: valid, and true of what is taken and refused."""

from typing import Any

import jsonschema
import openapi_spec_validator
import pytest

from tandem_client.gateway.openai import bodies
from tests.client.gateway import plain_http
from tests.client.gateway.conftest import Fronted

USER = {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}, "b"]}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
SAID = {"role": "assistant", "content": None, "tool_calls": [CALL], "audio": None, "reasoning_details": [1]}
RESULT = {"role": "function", "name": "f", "content": "5"}
BODIES: list[tuple[str, dict[str, Any], bool]] = [
    ("completions", {"prompt": "a"}, True),
    ("completions", {"prompt": [1, 2.0], "max_tokens": 16.0, "seed": -(2**63), "stop": ["a"], "n": None}, True),
    ("completions", {"prompt": ["a", [1]], "logit_bias": {"7": -1}, "best_of": 1, "suffix": ""}, True),
    ("completions", {"prompt": "a", **dict.fromkeys(bodies.IGNORED, 7)}, True),
    ("completions", {"prompt": "a", "structured_outputs": {"json": {"type": "object"}}}, True),
    ("completions", {"prompt": "a", "guided_json": "{}"}, True),
    ("completions", {"prompt": "a", "verbosity": "low", "user": "u", "prompt_cache_options": {"ttl": "30m"}}, True),
    ("completions", {}, False),
    ("completions", {"prompt": "a", "max_tokens": "3"}, False),
    ("completions", {"prompt": "a", "max_tokens": True}, False),
    ("completions", {"prompt": "a", "temprature": 1}, False),
    ("completions", {"prompt": "a", "n": 0}, False),
    ("completions", {"prompt": "a", "suffix": "b"}, False),
    ("chat/completions", {"messages": [USER, SAID], "tool_choice": "auto", "tools": [{"type": "function"}]}, True),
    ("chat/completions", {"messages": [USER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
    ("chat/completions", {"messages": [USER], "response_format": {"type": "json_object"}}, True),
    ("chat/completions", {"messages": [USER], "functions": [{"name": "f"}], "function_call": {"name": "f"}}, True),
    ("chat/completions", {"messages": [USER, RESULT], "functions": [{"name": "f"}], "function_call": "none"}, True),
    ("chat/completions", {"messages": [USER], "functions": [{"name": "f"}], "function_call": "required"}, False),
    ("chat/completions", {"messages": [USER], "functions": ["f"]}, False),
    ("chat/completions", {"messages": [USER], "moderation": {"model": "m"}}, False),
    ("chat/completions", {"messages": [{"content": "a"}]}, False),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, False),
    ("chat/completions", {"messages": [USER], "tool_choice": "maybe"}, False),
]


@pytest.fixture(scope="module")
def described(module_fronted: Fronted) -> dict[str, Any]:
    answer = plain_http.get(f"{module_fronted.url}/openapi.json")
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    return answer.json()


def test_the_description_is_valid_and_has_every_path(described: dict[str, Any]) -> None:
    openapi_spec_validator.validate(described)
    assert sorted(described["paths"]) == [
        "/", "/detokenize", "/health", "/livez", "/metrics", "/openapi.json", "/tokenize", "/v1/chat/completions",
        "/v1/completions", "/v1/models", "/v1/models/{name}", "/version",
    ]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "is_taken"), BODIES, ids=str)
def test_the_description_says_what_is_taken(
    described: dict[str, Any], fronted: Fronted, path: str, body: dict[str, Any], is_taken: bool
) -> None:
    content = described["paths"][f"/v1/{path}"]["post"]["requestBody"]["content"]["application/json"]
    schema = {**content["schema"], "components": described["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(body) == is_taken
    status = plain_http.post(f"{fronted.url}/v1/{path}", json=body).status_code
    assert status == (200 if is_taken else 400)
