"""Chats through a front end: prompts, parsed answers, RenderChat, what is refused, and streams that are resumed."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tandem.internal.v1 import frontend_pb2, worker_pb2
from tandem.v1 import chat_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend.chat.calls import call_id
from scheduler_svc.frontend.chat.forms import read_form
from scheduler_svc.frontend.chat.served import metadata, missing_libraries
from tests.scheduler_svc.frontend.chat.rig import CHATML, TOKENS, TOOL, chat_state, spelled, user
from tests.scheduler_svc.frontend.failures import Code, fails
from tests.scheduler_svc.frontend.fake_core import Service, rest, served, service
from tests.scheduler_svc.frontend.test_resume import LINGER, accepted_stream, detached, resume, resumed

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "é"]}}\n</tool_call>'
ANSWER = f"<think>\nFirst, é.\n</think>\n\nHello\n{CALL}\n{CALL}"


def chat(*messages: chat_pb2.ChatMessage, **fields: Any) -> chat_pb2.Chat:
    """A chat with an answer that begins with reasoning."""
    fields.setdefault("template_args_json", '{"enable_thinking": true}')
    return chat_pb2.Chat(messages=messages or [user("hi")], **fields)


async def answered(
    s: Service, tokens: Sequence[int], request: chat_pb2.Chat, *, reason: str = "EOS", **fields: Any
) -> list[Any]:
    """The messages of a chat with the answer `tokens`, one per step, and this end."""
    call = s.generate(chat=request, **fields)
    submit = await s.core.admit()
    for token in tokens[:-1]:
        await s.core.output(submit.stream, [token])
    end = {"stop_token_id": tokens[-1]} if reason == "EOS" else {}
    await s.core.output(submit.stream, tokens[-1:], reason, **end)
    return await rest(call)


def joined(messages: Sequence[tuple[str, Any]]) -> tuple[str, str, dict[int, tuple[str, str, str]]]:
    """(reasoning, content, calls by their number as (id, name, arguments)) of all deltas."""
    reasoning, content, calls = "", "", dict[int, tuple[str, str, str]]()
    for kind, message in messages:
        if kind == "delta":
            reasoning += message.reasoning
            content += message.text
            for piece in message.tool_calls:
                assert bool(piece.id) == bool(piece.name) == (piece.index not in calls)
                known = calls.get(piece.index, ("", "", ""))
                calls[piece.index] = (known[0] + piece.id, known[1] + piece.name, known[2] + piece.arguments)
    return reasoning, content, calls


def assert_whole(messages: Sequence[tuple[str, Any]], request_id: str) -> None:
    reasoning, content, calls = joined(messages)
    assert (reasoning, content) == ("First, é.", "Hello")
    assert [call[:2] for call in calls.values()] == [(call_id(request_id, 0, idx), "f") for idx in range(2)]
    assert [json.loads(call[2]) for call in calls.values()] == [{"a": [1, "é"]}] * 2


@served(state=chat_state(eos_token_ids=[TOKENS["<|im_end|>"]]))
async def test_a_chat_becomes_a_prompt_and_its_answer_has_parts(s: Service) -> None:
    tokens = [*spelled(ANSWER), TOKENS["<|im_end|>"]]
    messages = await answered(s, tokens, chat(tools_json=[TOOL]), request_id="r")
    assert_whole(messages, "r")
    [ids] = [[token for kind, each in messages if kind == "delta" for token in each.token_ids]]
    assert ids == tokens
    usage = messages[-1][1].usage
    # The marks count, and so do the line breaks between them.
    assert usage.reasoning_tokens == len(spelled("<think>\nFirst, é.\n</think>"))
    assert messages[-2][1].reason == pb.FINISH_REASON_EOS


@pytest.mark.parametrize(
    ("num_chars", "call"),
    [
        (9, ()),
        (30, ("f", "")),
        (47, ("f", '{"a": [1')),
        (54, ("f", '{"a": [1, "é"]}')),
        (60, ("f", '{"a": [1, "é"]}')),
    ],
)
@served(state=chat_state(eos_token_ids=[TOKENS["<|im_end|>"]]))
async def test_a_call_that_is_cut_is_an_incomplete_call(s: Service, num_chars: int, call: tuple[str, ...]) -> None:
    for reason in ("LENGTH", "CONTEXT_FULL", "TIME_LIMIT", "ABORTED"):
        messages = await answered(s, spelled(f"Hello\n{CALL[:num_chars]}"), chat(tools_json=[TOOL]), reason=reason)
        _, content, calls = joined(messages)
        assert content == "Hello" and [found[1:] for found in calls.values()] == ([call] if call else [])
        assert messages[-2][1].reason == pb.FinishReason.Value(f"FINISH_REASON_{reason}")


@served(state=chat_state())
async def test_render_chat_and_generate_agree(s: Service) -> None:
    request = chat(user("a", "<|im_end|>b"), template_args_json='{"enable_thinking": false}')
    made = await s.inference.RenderChat(pb.RenderChatRequest(chat=request))
    assert made.text == ("<|im_start|>user\na <|im_end|>b<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    control = [TOKENS[token] for token in ("<|im_start|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>")]
    assert [token for token in made.token_ids if token in TOKENS.values()] == control
    assert CHATML.decode(list(made.token_ids), skip_special_tokens=False) == made.text
    call = s.generate(chat=request)
    assert np.frombuffer((await s.core.admit()).prompt, "<i4").tolist() == made.token_ids
    call.cancel()


async def test_the_operators_form_parses_the_answers(tmp_path: Path) -> None:
    fields = {"content": {}, "reasoning_content": {"open": "(", "close": ")"}}
    answers = read_form({"start_anchor": "assistant", "fields": fields}, "mine")
    async with service(tmp_path, state=chat_state(eos_token_ids=[0]), answers=answers) as s:
        messages = await answered(s, [*spelled("a(b)c"), 0], chat())
        assert joined(messages) == ("b", "a\nc", {})


STOPPED = f"<think>\nOne.\n\nTwo.\n</think>\n\nHello\n{CALL}\n\nmore\n\nlost"
# What the model writes, the chat, the request's other fields, and reasoning, content and calls.
WITH_TOOL, MARKED = chat(tools_json=[TOOL]), "a<|im_start|>b<tool_call>"
NO_CALLS = chat_pb2.ToolChoice(mode=chat_pb2.TOOL_CHOICE_MODE_NONE)
ANSWERS: dict[str, tuple[str, chat_pb2.Chat, dict[str, Any], tuple[str, str]]] = {
    "no tools": (f"Hi {CALL}", chat(), {}, ("", f"Hi {CALL}")),
    "no calls wanted": (f"Hi {CALL}", chat(tools_json=[TOOL], tool_choice=NO_CALLS), {}, ("", f"Hi {CALL}")),
    "unparsed": (ANSWER, chat(tools_json=[TOOL], unparsed=True), {}, ("", ANSWER)),
    "unparsed, stops in its reasoning": (
        STOPPED, chat(unparsed=True), {"stop": pb.StopParams(stop_strings=["\n\n"])}, ("", "<think>\nOne."),
    ),
    # The mark of calls is not special.
    "special tokens left out": (MARKED, WITH_TOOL, {"output": pb.OutputParams()}, ("", "ab<tool_call>")),
    "special tokens kept": (MARKED, WITH_TOOL, {"output": pb.OutputParams(skip_special_tokens=False)}, ("", MARKED)),
    "token ids alone": (ANSWER, WITH_TOOL, {"output": pb.OutputParams(want_text=False)}, ("", "")),
}  # fmt: skip


@served(state=chat_state(eos_token_ids=[0]))
async def test_an_answer_without_calls(s: Service) -> None:
    for name, (written, request, fields, parts) in ANSWERS.items():
        messages = await answered(s, [*spelled(written), 0], request, **fields)
        assert joined(messages) == (*parts, {}), name
        assert "unparsed" not in name or messages[-1][1].usage.reasoning_tokens == 0


@pytest.mark.parametrize("want_text", [True, False])
@served(state=chat_state())
async def test_a_stop_string_ends_the_row_where_the_content_has_it(s: Service, want_text: bool) -> None:
    output = pb.OutputParams(want_text=want_text)
    call = s.generate(chat=chat(tools_json=[TOOL]), stop=pb.StopParams(stop_strings=["\n\n"]), output=output)
    submit = await s.core.admit()
    await s.core.output(submit.stream, spelled(STOPPED))
    finish = await s.core.expect("finish")
    # The line breaks are content for certain with the letter after them.
    assert finish.output_tokens == len(spelled(STOPPED[: STOPPED.index("ost")]))
    await s.core.output(submit.stream, [], "EOS")
    messages = await rest(call)
    reasoning, content, calls = joined(messages)
    whole = ("One.\n\nTwo.", "Hello\nmore", {0: "f"}) if want_text else ("", "", {})
    assert (reasoning, content, {idx: name for idx, (_, name, _) in calls.items()}) == whole
    assert messages[-2][1].stop_string == "\n\n"
    assert messages[-1][1].usage.output_tokens == finish.output_tokens


@served(state=chat_state())
async def test_a_resumed_chat_ends_at_the_same_stop_string(s: Service) -> None:
    stop = pb.StopParams(stop_strings=["\n\n"], include_stop=True)
    submit, accepted = await detached(s, chat=chat(tools_json=[TOOL]), stop=stop)
    reply = resume(s, accepted, offsets=[pb.SampleOffset(reasoning_chars=3, text_chars=7)])
    # The core had not heard of the stop string, and went on.
    await resumed(s.core, submit.description, (spelled(STOPPED + ANSWER), "LENGTH"))
    messages = await rest(reply)
    assert joined(messages)[:2] == (".\n\nTwo.", "ore\n\n")
    assert messages[-2][1].reason == pb.FINISH_REASON_STOP_STRING


@pytest.mark.parametrize("num_before", [0, 1, 9, 30, 75, 110])
@served(state=chat_state())
async def test_a_chat_is_resumed_by_another_front_end_from_any_place(s: Service, num_before: int) -> None:
    """The caller has what the first tokens made, and gets the rest, also if it asks for less."""
    tokens = spelled(ANSWER)
    call, submit, accepted = await accepted_stream(s, chat=chat(tools_json=[TOOL]), request_id="r")
    description = frontend_pb2.StreamDescription.FromString(submit.description)
    assert len(submit.description) < 2000 and description.chat.prefix == ""
    received: list[Any] = []
    if num_before:
        await s.core.output(submit.stream, tokens[:num_before])
        while sum(len(message.token_ids) for _, message in received) < num_before:
            received.append(("delta", (await call.read()).delta))
    assert (await s.leave(call)).detach
    reply = resume(s, accepted, offsets=[offset_of(received)])
    await resumed(s.core, submit.description, (tokens, "LENGTH"))
    [(kind, _), *more] = await rest(reply)
    assert kind == "accepted"
    assert_whole([*received, *more], "r")
    assert more[-1][1].usage.reasoning_tokens == len(spelled("<think>\nFirst, é.\n</think>"))


def offset_of(received: Sequence[tuple[str, Any]]) -> pb.SampleOffset:
    reasoning, content, calls = joined(received)
    return pb.SampleOffset(
        token_ids=sum(len(message.token_ids) for _, message in received),
        text_chars=len(content),
        reasoning_chars=len(reasoning),
        tool_calls=len(calls),
        tool_argument_chars=sum(len(call[2]) for call in calls.values()),
    )


@pytest.mark.parametrize("field", ["text_chars", "reasoning_chars", "tool_calls", "tool_argument_chars"])
@served(state=chat_state())
async def test_offsets_beyond_the_answer_are_refused_by_name(s: Service, field: str) -> None:
    submit, accepted = await detached(s, chat=chat(tools_json=[TOOL]))
    reply = resume(s, accepted, offsets=[pb.SampleOffset(**{field: 1000})])
    await resumed(s.core, submit.description, (spelled(ANSWER), "LENGTH"))
    words = await fails(reply, Code.INVALID_ARGUMENT)
    assert words.startswith(f"offsets[0].{field} is 1000; the limit is ")


async def test_what_would_be_too_large_to_keep_cannot_linger(tmp_path: Path) -> None:
    own = {"fields": {"content": {}}, "start_anchor": "x" * 33_000}
    state = chat_state(files=worker_pb2.ChatFiles(response_template_json=json.dumps(own)))
    async with service(tmp_path, state=state) as s:
        stop = pb.StopParams(stop_strings=[f"{idx:x}" * 240 for idx in range(16)])
        message = await fails(s.generate(chat=chat(), resume=LINGER, stop=stop), Code.INVALID_ARGUMENT)
        assert "resume.linger_seconds is set" in message and "the limit is 32768" in message


@served(state=chat_state())
async def test_the_model_info_says_what_is_parsed(s: Service) -> None:
    info = await s.model_info()
    assert (info.chat_refusal, list(info.chat_parts)) == ("", ["reasoning", "tool_calls"])
    assert (info.limits.max_chat_messages, info.limits.max_chat_tools) == (1024, 128)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (chat_state(template=""), "chats need a chat template, and the served model has none"),
        (chat_state(has_tokenizer=False), "chats need a tokenizer, and the served model has none"),
        (chat_state(template="{% if %}"), "the served model's chat files cannot be used: "),
    ],
)
async def test_a_model_that_cannot_chat_says_why(tmp_path: Path, state: frontend_pb2.ModelState, why: str) -> None:
    if "tokenizer" in why:
        state.tokenizer_json = b""
    async with service(tmp_path, state=state) as s:
        message = await fails(s.generate(chat=chat()), Code.INVALID_ARGUMENT)
        assert message.startswith(why) and (await s.model_info()).chat_refusal == message
        await fails(s.inference.RenderChat(pb.RenderChatRequest(chat=chat())), Code.INVALID_ARGUMENT, message)


@pytest.mark.parametrize(
    ("versions", "why"),
    [
        ({"transformers": "5.22.3", "jinja2": "3.1.6"}, "and 5.22.3 is installed: make -C /"),
        ({"transformers": "5.23.0.dev1", "jinja2": "3.1.5"}, "chats need jinja2 3.1.6 or newer"),
        ({"transformers": "5.23.1"}, "jinja2 3.1.6 or newer on the scheduler's machine, and it is not installed"),
        ({"transformers": "6.0", "jinja2": "4"}, ""),
    ],
)
def test_too_old_libraries_refuse_chats(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], why: str) -> None:
    def version(name: str) -> str:
        if name in versions:
            return versions[name]
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert (why in missing_libraries()) if why else missing_libraries() == ""


@served(state=chat_state("{{ raise_exception('after user must come assistant') }}"))
async def test_a_template_error_is_the_callers(s: Service) -> None:
    why = "the model's chat template refuses the chat: after user must come assistant"
    await fails(s.generate(chat=chat()), Code.INVALID_ARGUMENT, why)


@served(state=chat_state("{% for _ in range(10) %}{{ messages[0].content }}{% endfor %}"))
async def test_long_chats_are_refused_before_and_after_the_template(s: Service) -> None:
    limit = 4096 * max(len(token) for token in CHATML.get_vocab())
    long, more = (chat(*each, template_args_json="") for each in ([user("x" * limit)], [user("x" * limit), user("y")]))
    why = f"chat becomes {10 * limit} characters with the model's template; the limit is {limit}"
    await fails(s.generate(chat=long), Code.INVALID_ARGUMENT, why)
    why = f"chat has {limit + 1} characters; the limit is {limit}"
    await fails(s.generate(chat=more), Code.INVALID_ARGUMENT, why)


@served(state=chat_state())
async def test_a_chat_waits_for_a_thread_and_does_not_block_the_loop(s: Service) -> None:
    threads = s.front_end._readiness.model().tokenizer.threads.gate
    for _ in range(2):
        await threads.enter("")
    call = s.generate(chat=chat())
    while not threads.waiting.num_taken:
        await asyncio.sleep(0.001)
    threads.leave("")
    assert (await s.core.admit()).prompt
    call.cancel()
