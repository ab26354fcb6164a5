"""Logprobs of OpenAI's shapes, from the pieces that the service makes of real tokens: whole answers and streams."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from tandem.v1 import inference_pb2

from scheduler_svc.frontend.streaming.stream import add_pieces
from scheduler_svc.frontend.text.detokenize import Detokenizer
from scheduler_svc.frontend.text.tokenizer import Tokenizer
from tests.client.fake_service import Ending, accepted, delta, finished, summary
from tests.client.gateway.conftest import Fronted
from tests.scheduler_svc.frontend.tokenizers_for_tests import BOS, EOS, as_json, sentencepiece_like

MADE = sentencepiece_like()["llama"]
TOKENIZER = Tokenizer(as_json(MADE), vocab_size=MADE.get_vocab_size())


def ids_of(words: Sequence[str]) -> list[int]:
    return [MADE.token_to_id(word) or 0 for word in words]


def spelled(char: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in char.encode()]


PROMPT = [BOS, "▁the", *spelled("😀"), "▁a"]
OUTPUT = ["▁the", "▁", *spelled("😀"), "▁a", "a", *spelled("😀")[:2], EOS]
# Equal texts: a letter and its byte, a space and its byte; and parts of characters.
TOP = ["▁a", "a", "<0x61>", "▁", "<0x20>", "▁the", "the", EOS, *(f"<0x{byte:02X}>" for byte in range(0xE0, 0xEC))]
assert len(TOP) == 20
CHAT: dict[str, Any] = {"model": "", "messages": [{"role": "user", "content": "a"}], "logprobs": True}


def behave(request: inference_pb2.GenerateRequest, ending: Ending) -> Iterator[inference_pb2.GenerateResponse]:
    """Writes OUTPUT one token at a time; the text of each token is held back until the next comes."""
    prompt, output = ids_of(PROMPT), ids_of(OUTPUT)
    reading = partial(TOKENIZER.pieces, skip_special_tokens=True)
    decode = TOKENIZER.decoder(skip_special_tokens=True)
    yield accepted(request)
    if request.output.HasField("prompt_logprobs_start"):
        info = inference_pb2.PromptInfo(start=1, logprobs=scored(len(prompt) - 1))
        add_pieces(info.logprobs, prompt[1:], reading(prompt[:1]))
        text, data = reading([]).push(prompt[0])
        info.first.text, info.first.data = text, data
        yield inference_pb2.GenerateResponse(prompt_info=info)
    pieces, text = reading(prompt), Detokenizer(decode, prompt[-8:], TOKENIZER.token_bytes.anchor)
    held = ""
    for i, token_id in enumerate(output):
        shown, held = held, text.push((token_id,))
        is_end = i == len(output) - 1
        if is_end:
            shown, held = shown + held + text.finish(), ""
        made = scored(1)
        add_pieces(made, [token_id], pieces, is_end=is_end)
        yield delta(i, [token_id], shown, logprobs=made)
    yield finished(len(output))
    yield summary(len(output))


def scored(count: int) -> inference_pb2.Logprobs:
    return inference_pb2.Logprobs(
        logprobs=[-0.5] * count, top_k=20, top_token_ids=ids_of(TOP) * count,
        top_logprobs=[-1.0 - i for i in range(20)] * count,
    )  # fmt: skip


@pytest.fixture
def told(fronted: Fronted) -> Iterator[Fronted]:
    fronted.service.behaviour, fronted.service.text_of = behave, TOKENIZER.decoder(skip_special_tokens=True)
    yield fronted
    fronted.service.text_of = None


def completed(told: Fronted, **more: Any) -> tuple[str, dict[str, list[Any]]]:
    """(text, logprobs) of a completion; those of a stream are joined."""
    ask: dict[str, Any] = {"model": "", "prompt": ids_of(PROMPT), "logprobs": 20, **more}
    answer = told.client.completions.create(**ask)
    text, found = "", dict[str, list[Any]]()
    for part in answer if "stream" in more else [answer]:
        [choice] = part.choices
        text += choice.text
        for name, values in (choice.logprobs.model_dump() if choice.logprobs is not None else {}).items():
            found[name] = found.get(name, []) + values
    return text, found


@pytest.mark.parametrize("echo", [True, False])
def test_tokens_of_a_completion_are_its_text_and_stand_where_they_begin(told: Fronted, echo: bool) -> None:
    text, found = completed(told, echo=echo)
    tokens = [BOS, "the", "", "", "", "😀", " a", " the", " ", "", "", "", "😀", " a", "a", "", "", EOS]
    offsets = [0, 0, 3, 3, 3, 3, 4, 6, 10, 11, 11, 11, 11, 12, 14, 15, 15, 15]
    num_prompt, prompt_chars = (0, 0) if echo else (len(PROMPT), 6)
    assert text == MADE.decode(ids_of(PROMPT + OUTPUT))[prompt_chars:]
    assert found["tokens"] == tokens[num_prompt:]
    assert found["text_offset"] == [offset - prompt_chars for offset in offsets[num_prompt:]]
    # The last two tokens begin a character that does not come.
    assert text == "".join(tokens[num_prompt:]).replace(BOS, "").replace(EOS, "\ufffd\ufffd")
    assert (text, found) == completed(told, echo=echo, stream=True)


def test_alternatives_with_equal_texts_are_all_there(told: Fronted) -> None:
    _, found = completed(told)
    ids, tops = ids_of(TOP), found["top_logprobs"]
    others = {f"token_id:{ids[i]}": -1.0 - i for i in (2, 4, *range(9, 20))}
    named = {" a": -1.0, "a": -2.0, " ": -4.0, " the": -6.0, "the": -7.0, EOS: -8.0}
    assert tops[0] == {**named, "": -9.0, **others}
    # This token does not belong to the alternatives, but has the text of one.
    assert tops[2] == {**named, "": -0.5, f"token_id:{ids[8]}": -9.0, **others}
    assert [top[token] for top, token in zip(tops, found["tokens"], strict=True)] == [
        -1.0 - TOP.index(word) if word in TOP else -0.5 for word in OUTPUT
    ]


def test_a_choice_has_the_alternatives_that_it_asks_for(told: Fronted) -> None:
    """The service may return more: it has one number for the prompt and the output."""
    [choice] = told.client.chat.completions.create(**CHAT, top_logprobs=2).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    tops = [[top.logprob for top in entry.top_logprobs] for entry in choice.logprobs.content]
    assert tops == [[-1.0, -2.0]] * len(OUTPUT)


def test_bytes_of_a_chat_are_those_of_its_tokens(told: Fronted) -> None:
    [choice] = told.client.chat.completions.create(**CHAT, top_logprobs=20).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    content = choice.logprobs.content
    spoken = " the 😀 aa".encode() + "😀".encode()[:2]
    assert bytes(byte for entry in content for byte in entry.bytes or ()) == spoken
    assert (content[-1].token, content[-1].bytes) == (EOS, None)
    assert [len(entry.top_logprobs) for entry in content] == [20] * len(content)
    parts = [top.bytes for top in content[0].top_logprobs[8:]]
    assert parts == [[byte] for byte in range(0xE0, 0xEC)]
    assert [(top.token, top.bytes) for top in content[0].top_logprobs[:3]] == [
        (" a", list(b" a")), ("a", list(b"a")), ("a", list(b"a")),
    ]  # fmt: skip
    streamed = [
        entry
        for chunk in told.client.chat.completions.create(**CHAT, top_logprobs=20, stream=True)
        for entry in ((chunk.choices[0].logprobs.content or []) if chunk.choices[0].logprobs is not None else [])
    ]
    assert streamed == content
