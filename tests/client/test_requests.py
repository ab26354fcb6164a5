"""Every field of the API has a keyword, each keyword sets its field, and a wrong one raises."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from tandem.v1 import inference_pb2

from tandem_client import Client, calls
from tandem_client.wire.request import FIELD_KEYWORDS, generate_request
from tests.client.descriptors import values
from tests.client.sampling import EXAMPLES

EVERY_OPTION = {
    "add_special_tokens": False,
    "request_id": "r",
    "model": "m",
    "priority": -3,
    "max_queue_seconds": 2.5,
    **EXAMPLES,
    "seed": 2**64 - 1,
    "logit_bias": {7: -2.5, 0: 1.0},
    "allowed_token_ids": (7, 8),
    "banned_token_ids": [9],
    "max_new_tokens": 9,
    "min_new_tokens": 2,
    "stop": ["a", "b"],
    "stop_token_ids": (3, 4),
    "ignore_eos": True,
    "include_stop": True,
    "max_time_seconds": 1.5,
    "want_text": False,
    "want_token_ids": True,
    "skip_special_tokens": False,
    "logprobs": 5,
    "prompt_logprobs_start": 2,
    "logprob_pieces": True,
    "cache_salt": "s",
    "bypass_cache_read": True,
    "bypass_cache_write": True,
    "linger_seconds": 5.0,
}


def test_every_keyword_sets_its_field() -> None:
    found = values(generate_request("hi", **EVERY_OPTION))
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in EVERY_OPTION.items()}
    assert {FIELD_KEYWORDS[path]: value for path, value in found.items()} == {"prompt": "hi", **given}
    assert len(found) == len(given) + 1


def test_options_that_are_not_given_stay_unset() -> None:
    assert generate_request("") == inference_pb2.GenerateRequest(text="")
    assert generate_request("", temperature=None, stop=None).WhichOneof("prompt") == "text"
    assert generate_request([]).WhichOneof("prompt") == "token_ids"
    # 0 must be set although it is the type's zero: 0 is greedy, unset is the model's default.
    assert generate_request("", temperature=0).sampling.HasField("temperature")
    assert generate_request("", logprobs=0).output.HasField("logprobs")
    # An empty list is an error that the service reports; it must not become "all tokens".
    assert generate_request("", allowed_token_ids=[]).sampling.HasField("allowed_token_ids")
    assert not generate_request("", allowed_token_ids=None, logit_bias=None).HasField("sampling")


def test_a_single_stop_string_may_be_given_without_a_list() -> None:
    assert generate_request("", stop="\n\n").stop.stop_strings == ["\n\n"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_tokens": 3}, TypeError, "no keyword max_tokens; did you mean max_new_tokens"),
        ({"zzz": 3}, TypeError, "no keyword zzz; known are .*top_p"),
        ({"top_k": -1}, ValueError, "top_k is -1; it must be 0 to 4294967295$"),
        ({"top_k": 2**32}, ValueError, "top_k is 4294967296; it must be 0 to 4294967295$"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens is -1; it must be 1 to 4294967295$"),
        ({"seed": 10**22}, ValueError, "seed is 1000.*; it must be 0 to 18446744073709551615$"),
        ({"priority": 2**31}, ValueError, "priority is 2147483648; it must be -2147483648 to 2147483647$"),
        ({"temperature": "hot"}, TypeError, "temperature is 'hot'"),
        ({"num_samples": -1}, ValueError, "num_samples is -1; it must be 1 to 4294967295$"),
        ({"logit_bias": {-1: 2}}, ValueError, r"logit_bias is \{-1: 2\}; each token id must be 0 to 4294967295$"),
        ({"logit_bias": {1: "x"}}, TypeError, "logit_bias is {1: 'x'}"),
        ({"logit_bias": [1, 2]}, TypeError, r"logit_bias is \[1, 2\]; a mapping from token ids to numbers is needed$"),
        ({"allowed_token_ids": [-1]}, ValueError, r"allowed_token_ids is \[-1\]; each must be 0 to 4294967295$"),
        ({"stop": [3]}, TypeError, r"stop is \[3\]"),
        ({"stop_token_ids": [-1]}, ValueError, r"stop_token_ids is \[-1\]; each must be 0 to 4294967295$"),
    ],
)
def test_the_error_of_a_wrong_keyword_names_it(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        generate_request("hi", **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: generate_request("ab\udcff"), "prompt has U+DCFF at character 2; it is not Unicode text"),
        (lambda: generate_request("", cache_salt="\ud83d"), "cache_salt has U+D83D at character 0"),
        (lambda: generate_request("", stop=["a", "b\ud800"]), "stop has U+D800 at character 1"),
        (lambda: generate_request("", request_id="a\ud800"), "request_id has U+D800 at character 1"),
        (lambda: calls.tokenize("\ud800"), "text has U+D800 at character 0"),
        (lambda: calls.tokenize("", model="\ud800"), "model has U+D800 at character 0"),
        (lambda: calls.detokenize([], model="\ud800"), "model has U+D800 at character 0"),
        (lambda: calls.abort("a", "\ud800"), "request_ids has U+D800 at character 0"),
    ],
)
def test_the_error_of_half_a_surrogate_pair_names_it(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("salt", ["\U0001f6b2" * 256, "\0" * 256, "\uffff"])
def test_any_text_may_be_a_salt(salt: str) -> None:
    sent = generate_request("", cache_salt=salt).SerializeToString()
    assert inference_pb2.GenerateRequest.FromString(sent).cache.salt == salt


@pytest.mark.parametrize("prompt", [b"bytes", 7, [1.5], [-1], ["a"]])
def test_the_error_of_a_wrong_prompt_names_it(prompt: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"prompt|iterable"):
        generate_request(prompt)


def test_options_are_keywords_only(client: Client) -> None:
    with pytest.raises(TypeError, match="positional"):
        client.generate("hi", 5.0)
