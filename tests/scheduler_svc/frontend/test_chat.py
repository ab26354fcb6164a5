"""Chats through a front end: prompts, parsed answers, RenderChat, what is refused, and streams that are resumed."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest
from tandem.internal.v1 import frontend_pb2, worker_pb2
from tandem.v1 import chat_pb2, control_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend.chat import served
from scheduler_svc.frontend.chat.calls import call_id
from scheduler_svc.frontend.chat.forms import read_form
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.scheduler_svc.frontend.chat.rig import CHATML, TOKENS, TOOL, chat_state, spelled, user
from tests.scheduler_svc.frontend.failures import failure
from tests.scheduler_svc.frontend.fake_core import Service, rest, until
from tests.scheduler_svc.frontend.test_resume import resumed

Run = Callable[..., None]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "é"]}}\n</tool_call>'
ANSWER = f"<think>\nFirst, é.\n</think>\n\nHello\n{CALL}\n{CALL}"
LINGER = pb.ResumeParams(linger_seconds=60.0)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    error = await failure(call)
    return error.code(), str(error.details())


def chat(*messages: chat_pb2.ChatMessage, **fields: Any) -> chat_pb2.Chat:
    """A chat whose answer begins with reasoning."""
    fields.setdefault("template_args_json", '{"enable_thinking": true}')
    return chat_pb2.Chat(messages=messages or [user("hi")], **fields)


def generate(s: Service, request: chat_pb2.Chat, **fields: Any) -> Any:
    return s.inference.Generate(pb.GenerateRequest(chat=request, **fields), timeout=TIMEOUT_SECONDS)


async def answered(s: Service, tokens: Sequence[int], request: chat_pb2.Chat, **fields: Any) -> list[Any]:
    """The messages of a chat whose answer is `tokens`, one per step, and EOS."""
    call = generate(s, request, **fields)
    submit = await s.core.admit()
    for token in tokens[:-1]:
        await s.core.output(submit.stream, [token])
    await s.core.output(submit.stream, tokens[-1:], "EOS", stop_token_id=tokens[-1])
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


def test_a_chat_becomes_a_prompt_and_its_answer_has_parts(run: Run) -> None:
    async def scenario(s: Service) -> None:
        tokens = [*spelled(ANSWER), TOKENS["<|im_end|>"]]
        messages = await answered(s, tokens, chat(tools_json=[TOOL]), request_id="r")
        assert_whole(messages, "r")
        [ids] = [[token for kind, each in messages if kind == "delta" for token in each.token_ids]]
        assert ids == tokens
        usage = messages[-1][1].usage
        # The marks count, and so do the line breaks between them.
        assert usage.reasoning_tokens == len(spelled("<think>\nFirst, é.\n</think>"))
        assert messages[-2][1].reason == pb.FINISH_REASON_EOS

    run(scenario, state=chat_state(eos_token_ids=[TOKENS["<|im_end|>"]]))


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
def test_a_call_that_is_cut_is_an_incomplete_call(run: Run, num_chars: int, call: tuple[str, ...]) -> None:
    async def scenario(s: Service) -> None:
        for reason in ("LENGTH", "CONTEXT_FULL", "TIME_LIMIT", "ABORTED"):
            tokens = spelled(f"Hello\n{CALL[:num_chars]}")
            stream = generate(s, chat(tools_json=[TOOL]))
            submit = await s.core.admit()
            for token in tokens[:-1]:
                await s.core.output(submit.stream, [token])
            await s.core.output(submit.stream, tokens[-1:], reason)
            messages = await rest(stream)
            _, content, calls = joined(messages)
            assert content == "Hello" and [found[1:] for found in calls.values()] == ([call] if call else [])
            assert messages[-2][1].reason == pb.FinishReason.Value(f"FINISH_REASON_{reason}")

    run(scenario, state=chat_state(eos_token_ids=[TOKENS["<|im_end|>"]]))


def test_render_chat_and_generate_agree(run: Run) -> None:
    async def scenario(s: Service) -> None:
        request = chat(user("a", "<|im_end|>b"), template_args_json='{"enable_thinking": false}')
        made = await s.inference.RenderChat(pb.RenderChatRequest(chat=request))
        assert made.text == (
            "<|im_start|>user\na <|im_end|>b<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        control = [TOKENS[token] for token in ("<|im_start|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>")]
        assert [token for token in made.token_ids if token in TOKENS.values()] == control
        assert CHATML.decode(list(made.token_ids), skip_special_tokens=False) == made.text
        call = generate(s, request)
        submit = await s.core.admit()
        assert submit.prompt == b"".join(token.to_bytes(4, "little") for token in made.token_ids)
        call.cancel()

    run(scenario, state=chat_state())


def test_the_operators_form_parses_the_answers(run: Run) -> None:
    async def scenario(s: Service) -> None:
        messages = await answered(s, [*spelled("a(b)c"), 0], chat())
        assert joined(messages) == ("b", "a\nc", {})

    fields = {"content": {}, "reasoning_content": {"open": "(", "close": ")"}}
    answers = read_form({"start_anchor": "assistant", "fields": fields}, "mine")
    run(scenario, state=chat_state(eos_token_ids=[0]), answers=answers)


@pytest.mark.parametrize("tool_choice", [None, chat_pb2.ToolChoice(mode=chat_pb2.TOOL_CHOICE_MODE_NONE)])
def test_without_tools_calls_stay_in_the_content(run: Run, tool_choice: Any) -> None:
    async def scenario(s: Service) -> None:
        tools = [TOOL] if tool_choice else []
        messages = await answered(s, [*spelled(f"Hi {CALL}"), 0], chat(tools_json=tools, tool_choice=tool_choice))
        assert joined(messages) == ("", f"Hi {CALL}", {})

    run(scenario, state=chat_state(eos_token_ids=[0]))


def test_an_unparsed_answer_is_text_with_its_marks(run: Run) -> None:
    async def scenario(s: Service) -> None:
        messages = await answered(s, [*spelled(ANSWER), 0], chat(tools_json=[TOOL], unparsed=True))
        assert joined(messages) == ("", ANSWER, {})
        assert messages[-1][1].usage.reasoning_tokens == 0

    run(scenario, state=chat_state(eos_token_ids=[0]))


@pytest.mark.parametrize("skips", [True, False])
def test_special_tokens_in_the_content_are_left_out_if_wanted(run: Run, skips: bool) -> None:
    async def scenario(s: Service) -> None:
        tokens = [*spelled("a<|im_start|>b<tool_call>"), 0]
        output = pb.OutputParams(skip_special_tokens=skips)
        messages = await answered(s, tokens, chat(tools_json=[TOOL]), output=output)
        # The mark of calls is not special.
        assert joined(messages)[1] == ("ab<tool_call>" if skips else "a<|im_start|>b<tool_call>")

    run(scenario, state=chat_state(eos_token_ids=[0]))


STOPPED = f"<think>\nOne.\n\nTwo.\n</think>\n\nHello\n{CALL}\n\nmore\n\nlost"


@pytest.mark.parametrize("want_text", [True, False])
def test_a_stop_string_ends_the_row_where_the_content_has_it(run: Run, want_text: bool) -> None:
    async def scenario(s: Service) -> None:
        output = pb.OutputParams(want_text=want_text)
        call = generate(s, chat(tools_json=[TOOL]), stop=pb.StopParams(stop_strings=["\n\n"]), output=output)
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

    run(scenario, state=chat_state())


def test_a_resumed_chat_ends_at_the_same_stop_string(run: Run) -> None:
    async def scenario(s: Service) -> None:
        stop = pb.StopParams(stop_strings=["\n\n"], include_stop=True)
        call = generate(s, chat(tools_json=[TOOL]), stop=stop, resume=LINGER, request_id="r")
        submit = await s.core.admit()
        secret = (await call.read()).accepted.resume_secret
        await until_resumable(s, submit)
        call.cancel()
        await s.core.expect("cancel")
        offset = pb.SampleOffset(reasoning_chars=3, text_chars=7)
        reply = s.inference.Resume(
            pb.ResumeRequest(request_id="r", resume_secret=secret, offsets=[offset]), timeout=TIMEOUT_SECONDS
        )
        # The core had not heard of the stop string, and went on.
        await resumed(s.core, submit.description, (spelled(STOPPED + ANSWER), "LENGTH"))
        messages = await rest(reply)
        assert joined(messages)[:2] == (".\n\nTwo.", "ore\n\n")
        assert messages[-2][1].reason == pb.FINISH_REASON_STOP_STRING

    run(scenario, state=chat_state())


def test_an_unparsed_answer_ends_at_a_stop_string_in_its_reasoning(run: Run) -> None:
    async def scenario(s: Service) -> None:
        stop = pb.StopParams(stop_strings=["\n\n"])
        messages = await answered(s, [*spelled(STOPPED), 0], chat(unparsed=True), stop=stop)
        assert joined(messages)[1] == "<think>\nOne."

    run(scenario, state=chat_state(eos_token_ids=[0]))


def test_token_ids_alone_have_no_parts(run: Run) -> None:
    async def scenario(s: Service) -> None:
        tokens = [*spelled(ANSWER), 0]
        messages = await answered(s, tokens, chat(tools_json=[TOOL]), output=pb.OutputParams(want_text=False))
        assert joined(messages) == ("", "", {})

    run(scenario, state=chat_state(eos_token_ids=[0]))


@pytest.mark.parametrize("num_before", [0, 1, 9, 30, 75, 110])
def test_a_chat_is_resumed_by_another_front_end_from_any_place(run: Run, num_before: int) -> None:
    """The caller has what the first tokens made, and gets the rest, also if it asks for less."""

    async def scenario(s: Service) -> None:
        tokens = spelled(ANSWER)
        call = generate(s, chat(tools_json=[TOOL]), resume=LINGER, request_id="r")
        submit = await s.core.admit()
        accepted = (await call.read()).accepted
        await until_resumable(s, submit)
        description = frontend_pb2.StreamDescription.FromString(submit.description)
        assert len(submit.description) < 2000 and description.chat.prefix == ""
        received: list[Any] = []
        if num_before:
            await s.core.output(submit.stream, tokens[:num_before])
            while sum(len(message.token_ids) for _, message in received) < num_before:
                received.append(("delta", (await call.read()).delta))
        call.cancel()
        assert (await s.core.expect("cancel")).detach
        offset = offset_of(received)
        reply = s.inference.Resume(
            pb.ResumeRequest(request_id="r", resume_secret=accepted.resume_secret, offsets=[offset]),
            timeout=TIMEOUT_SECONDS,
        )
        await resumed(s.core, submit.description, (tokens, "LENGTH"))
        [(kind, _), *more] = await rest(reply)
        assert kind == "accepted"
        assert_whole([*received, *more], "r")
        assert more[-1][1].usage.reasoning_tokens == len(spelled("<think>\nFirst, é.\n</think>"))

    run(scenario, state=chat_state())


async def until_resumable(s: Service, submit: frontend_pb2.Submit) -> None:
    """The write of Accepted may end after the caller has it."""
    assert s.front_end is not None
    stream = s.front_end._streams._samples[submit.stream].stream
    await until(lambda: stream.is_resumable)


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
def test_offsets_beyond_the_answer_are_refused_by_name(run: Run, field: str) -> None:
    async def scenario(s: Service) -> None:
        call = generate(s, chat(tools_json=[TOOL]), resume=LINGER, request_id="r")
        submit = await s.core.admit()
        secret = (await call.read()).accepted.resume_secret
        await until_resumable(s, submit)
        call.cancel()
        await s.core.expect("cancel")
        request = pb.ResumeRequest(request_id="r", resume_secret=secret, offsets=[pb.SampleOffset(**{field: 1000})])
        reply = s.inference.Resume(request, timeout=TIMEOUT_SECONDS)
        await resumed(s.core, submit.description, (spelled(ANSWER), "LENGTH"))
        code, message = await refusal(reply)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert message.startswith(f"offsets[0].{field} is 1000; the limit is ")

    run(scenario, state=chat_state())


def test_what_would_be_too_large_to_keep_cannot_linger(run: Run) -> None:
    async def scenario(s: Service) -> None:
        stop = pb.StopParams(stop_strings=[f"{idx:x}" * 240 for idx in range(16)])
        code, message = await refusal(generate(s, chat(), resume=LINGER, stop=stop))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "resume.linger_seconds is set" in message and "the limit is 32768" in message

    own = {"fields": {"content": {}}, "start_anchor": "x" * 33_000}
    run(scenario, state=chat_state(files=worker_pb2.ChatFiles(response_template_json=json.dumps(own))))


def test_the_model_info_says_what_is_parsed(run: Run) -> None:
    async def scenario(s: Service) -> None:
        info = await s.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert (info.chat_refusal, list(info.chat_parts)) == ("", ["reasoning", "tool_calls"])
        assert (info.limits.max_chat_messages, info.limits.max_chat_tools) == (1024, 128)

    run(scenario, state=chat_state())


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (chat_state(template=""), "chats need a chat template, and the served model has none"),
        (chat_state(has_tokenizer=False), "chats need a tokenizer, and the served model has none"),
        (chat_state(template="{% if %}"), "the served model's chat files cannot be used: "),
    ],
)
def test_a_model_that_cannot_chat_says_why(run: Run, state: frontend_pb2.ModelState, why: str) -> None:
    if "tokenizer" in why:
        state.tokenizer_json = b""

    async def scenario(s: Service) -> None:
        code, message = await refusal(generate(s, chat()))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and message.startswith(why)
        info = await s.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert info.chat_refusal == message
        with pytest.raises(grpc.aio.AioRpcError, match=why[:20]):
            await s.inference.RenderChat(pb.RenderChatRequest(chat=chat()))

    run(scenario, state=state)


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
        raise served.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(served.metadata, "version", version)
    assert (why in served.missing_libraries()) if why else served.missing_libraries() == ""


def test_a_template_error_is_the_callers(run: Run) -> None:
    async def scenario(s: Service) -> None:
        code, message = await refusal(generate(s, chat()))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert message == "the model's chat template refuses the chat: after user must come assistant"

    run(scenario, state=chat_state("{{ raise_exception('after user must come assistant') }}"))


def test_long_chats_are_refused_before_and_after_the_template(run: Run) -> None:
    async def scenario(s: Service) -> None:
        limit = 4096 * max(len(token) for token in CHATML.get_vocab())
        code, message = await refusal(generate(s, chat(user("x" * limit), template_args_json="")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert message == f"chat becomes {10 * limit} characters with the model's template; the limit is {limit}"
        _, message = await refusal(generate(s, chat(user("x" * limit), user("y"), template_args_json="")))
        assert message == f"chat has {limit + 1} characters; the limit is {limit}"

    run(scenario, state=chat_state("{% for _ in range(10) %}{{ messages[0].content }}{% endfor %}"))


def test_a_chat_waits_for_a_thread_and_does_not_block_the_loop(run: Run) -> None:
    async def scenario(s: Service) -> None:
        assert s.front_end is not None
        threads = s.front_end._readiness.model().tokenizer.threads.gate
        for _ in range(2):
            await threads.enter("")
        call = generate(s, chat())
        while not threads.waiting.num_taken:
            await asyncio.sleep(0.001)
        threads.leave("")
        assert (await s.core.admit()).prompt
        call.cancel()

    run(scenario, state=chat_state())
