"""The scan of a message's bytes: how far it walks into hostile messages, and that it agrees with the parser."""

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem.v1 import chat_pb2, control_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend.rpc import calls
from scheduler_svc.frontend.rpc.status import Refusal
from scheduler_svc.frontend.scan import MAX_FIELDS_OF_ENTRY, Scan
from scheduler_svc.frontend.sizes import Rule, Sizes, rules_of
from tests.scheduler_svc.frontend.failures import refused

SIZES = Sizes(prompt_tokens=511, text_chars=2560, length=512)
GENERATE = pb.GenerateRequest.DESCRIPTOR


def field(number: int, data: bytes) -> bytes:
    """A field of bytes."""
    size, left = bytearray(), len(data)
    while left > 127:
        size.append(left & 127 | 128)
        left >>= 7
    tag = bytes([number << 3 | 2]) if number < 16 else bytes([(number << 3 | 2) & 127 | 128, number >> 4])
    return tag + bytes(size) + bytes([left]) + data


STOP, SAMPLING, TOKEN_IDS, TEXT, CHAT = (
    GENERATE.fields_by_name[name].number for name in ("stop", "sampling", "token_ids", "text", "chat")
)
MANY = 500_000
NO_FIELD = "has field number 31, which this server does not know"


def long(limit: str) -> str:
    return f"is more than {limit} long; the limit is {limit}"


def after(number: int) -> str:
    return f"comes after {number} other fields; the limit is {number}"


# The bytes of a hostile message, the most fields that the walk may visit, and the refusal: its field and the words.
HOSTILE: dict[str, tuple[bytes, int, str, str]] = {
    "stop strings": (field(STOP, field(3, b"ab") * MANY), 20, "stop.stop_strings", long("16")),
    "stop strings, in many messages": (field(STOP, field(3, b"ab")) * MANY, 40, "stop.stop_strings", long("16")),
    "empty messages": (field(STOP, b"") * MANY, 300, "stop", after(256)),
    "one long stop string": (
        field(STOP, field(3, b"a" * MANY)), 3,
        "stop.stop_strings", "has an entry of 500,000 bytes; the limit is 1,024",
    ),
    "prompt": (field(TOKEN_IDS, field(1, b"\x05" * MANY)), 3, "token_ids.ids", "is 500,000 long; the limit is 511"),
    "prompt, in many lists": (
        field(TOKEN_IDS, field(1, b"\x05") * MANY), 600, "token_ids.ids", "is 512 long; the limit is 511"
    ),
    "prompt, not packed": (field(TOKEN_IDS, b"\x08\x05" * MANY), 600, "token_ids.ids", long("511")),
    "prompt, empty pieces": (
        field(TOKEN_IDS, field(1, b"") * MANY), 4200,
        "token_ids.ids", "has more than 4,096 pieces that are not packed together; the limit is 4,096",
    ),
    "prompt, empty lists": (field(TOKEN_IDS, field(1, b"")) * MANY, 600, "token_ids", after(256)),
    "biases": (field(SAMPLING, field(10, b"\x08\x05\x15\0\0\0\0") * MANY), 4200, "sampling.logit_bias", long("4,096")),
    "a bias with unknown fields": (
        field(SAMPLING, field(10, b"\x08\x05" + b"\xf8\x01\x01" * MANY)), 3,
        "sampling.logit_bias", "has an entry of 1,500,002 bytes; the limit is 32",
    ),
    "banned tokens": (
        field(SAMPLING, field(12, b"\x05" * MANY)), 3,
        "sampling.banned_token_ids", "is 500,000 long; the limit is 4,096",
    ),
    "text": (field(TEXT, b"a" * MANY), 2, "text", "has 500,000 bytes; the limit is 2,560 characters"),
    "unknown fields": (b"\xf8\x01\x01" * MANY, 2, "GenerateRequest", NO_FIELD),
    "unknown fields inside": (field(STOP, b"\xf8\x01\x01" * MANY), 3, "StopParams", NO_FIELD),
    "depth": (b"\xfb\x01" * MANY, 2, "GenerateRequest", NO_FIELD),
    "messages": (field(CHAT, field(1, b"") * MANY), 1100, "chat.messages", long("1,024")),
    "parts of messages": (
        field(CHAT, field(1, field(2, b"") * 100) * MANY), 4300, "chat.messages.content", long("4,096")
    ),
    "calls of messages": (
        field(CHAT, field(1, field(4, b"") * 2) * MANY), 2100, "chat.messages.tool_calls", long("1,024")
    ),
    "fields of a message": (field(CHAT, field(1, field(1, b"user") * MANY)), 20, "chat.messages.role", after(8)),
    "one long part": (
        field(CHAT, field(1, field(2, b"a" * MANY))), 5,
        "chat.messages.content", "has an entry of 500,000 bytes; the limit is 10,240",
    ),
    "tools": (field(CHAT, field(2, b"{}") * MANY), 200, "chat.tools_json", long("128")),
    "offsets": (field(3, b"") * MANY, 70, "offsets", long("64")),
    "secret": (field(2, b"x" * MANY), 2, "resume_secret", "has 500,000 bytes; the limit is 1024"),
    "ids": (field(1, b"") * MANY, 1100, "request_ids", long("1,024")),
    "keys": (field(1, b"x") * MANY, 20, "keys", long("16")),
}  # fmt: skip
OF_OTHERS: dict[str, Any] = {
    "offsets": pb.ResumeRequest, "secret": pb.ResumeRequest, "ids": control_pb2.AbortRequest,
    "keys": control_pb2.ClearQuarantineRequest,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_the_walk_ends_at_the_first_field_beyond_its_limit(name: str) -> None:
    data, most_visited, path, words = HOSTILE[name]
    scan = Scan(OF_OTHERS.get(name, pb.GenerateRequest).DESCRIPTOR)
    assert refused(scan.check, data, SIZES).message == f"{path} {words}"
    assert scan.num_visited <= most_visited, "the walk goes on behind the limit"


def test_the_longest_walk_is_bounded_by_the_limits() -> None:
    # The test above has each of them; together they are one message. Messages in lists have a few fields each.
    def fields(rule: Rule) -> int:
        return SIZES.number(rule.entries) * (1 if rule.inside is None else 1 + MAX_FIELDS_OF_ENTRY)

    assert sum(fields(rule) for rule in rules_of(GENERATE).walk() if rule.is_list) + 256 < 40_000


def test_a_message_at_every_limit_passes() -> None:
    request = pb.GenerateRequest(
        request_id="é" * 128,
        token_ids=pb.TokenIds(ids=[2**32 - 1] * 511),
        stop=pb.StopParams(stop_strings=["\U0001f600" * 256] * 16, stop_token_ids=[2**32 - 1] * 256, min_new_tokens=1),
        sampling=pb.SamplingParams(
            banned_token_ids=[2**32 - 1] * 4096, logit_bias={2**32 - 1 - i: -1.5 for i in range(4096)}, top_p=0.5
        ),
        cache=pb.CacheParams(salt="\U0001f600" * 256),
    )
    Scan(GENERATE).check(request.SerializeToString(), SIZES)
    text = pb.GenerateRequest(text="\U0001f600" * 2560, priority=-5)
    Scan(GENERATE).check(text.SerializeToString(), SIZES)
    called = [chat_pb2.ToolCall(id="a", name="b", arguments_json="{}")]
    messages = [
        chat_pb2.ChatMessage(
            role="user", content=["a"] * 4, reasoning="r", tool_calls=called, tool_call_id="i", name="n"
        )
    ] * 1024
    chat = chat_pb2.Chat(messages=messages, tools_json=["\U0001f600" * 2560] * 128)
    Scan(GENERATE).check(pb.GenerateRequest(chat=chat).SerializeToString(), SIZES)
    offsets = [pb.SampleOffset(token_ids=2**32 - 1, text_chars=2**32 - 1)] * 64
    Scan(pb.ResumeRequest.DESCRIPTOR).check(pb.ResumeRequest(offsets=offsets).SerializeToString(), SIZES)


def test_a_message_counts_nothing_of_the_one_before() -> None:
    # A front end has one scan for all messages of a method.
    scan = Scan(GENERATE)
    assert "the limit is 8" in refused(scan.check, HOSTILE["fields of a message"][0], SIZES).message
    singles = pb.SamplingParams(temperature=1, top_p=0.5, top_k=1, min_p=0.5, seed=1, num_samples=1, typical_p=0.5)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 511), sampling=singles, model="m", priority=1)
    for _ in range(2):
        scan.check(request.SerializeToString(), SIZES)


PIECES = st.one_of(
    st.binary(max_size=6),
    st.sampled_from(
        [b"\x08\x05", b"\x42\x01\x07", b"\x32\x00", b"\x2a\x05\x62\x03\x01\x02\x03", b"\x22\x03\x0a\x01\x07"]
    ),
    st.builds(field, st.sampled_from([1, 3, 4, 5, 6, 9]), st.binary(max_size=12)),
)


@settings(max_examples=200)
@given(st.lists(PIECES, max_size=8).map(b"".join))
def test_the_scan_and_the_parser_agree(data: bytes) -> None:
    """What the parser accepts, without unknown fields, the scan passes; what the scan refuses, the parser refuses."""
    why = ""
    try:
        Scan(GENERATE).check(data, Sizes(prompt_tokens=50, text_chars=50))
    except Refusal as refusal:
        why = refusal.message
    try:
        calls.parse(pb.GenerateRequest, data)
    except Refusal:
        return
    assert not why


def test_malformed_bytes_are_left_to_the_parser() -> None:
    for data in (b"\x0a\x05ab", b"\x0a", b"\x0f\x01", b"\x0a" + b"\xff" * 11, b"\x32\x04\x1a\x05ab"):
        Scan(GENERATE).check(data, SIZES)
        with pytest.raises(DecodeError):
            pb.GenerateRequest.FromString(data)
