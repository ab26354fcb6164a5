"""Chats through the service: parsed answers are equal over the deaths of workers and front ends.

The checking worker samples pieces of text at random. The response template here takes some of them as marks, so answers
have reasoning, content and valid calls in any order.
"""

import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from tandem.v1 import chat_pb2, inference_pb2_grpc
from tandem.v1 import inference_pb2 as pb
from transformers.utils.chat_parsing import parse_response

from tests.rigs.processes import Rig, SchedulerProcess
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.system.asks import Ask

SHAPE = ("--max-rows", "16", "--max-length", "600", "--num-pages", "1200", "--step-ms", "4")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tools | tojson if tools }}model:"
# Calls end with a mark that is sampled often, so most of them end.
RAW = {"repeats": True, "join": "", "content_args": {"strip": False}}
RESPONSE = {
    "start_anchor": "model:",
    "fields": {
        "content": {"repeats": True, "join": "|"},
        "reasoning_content": {"open": " the", "close": "\n\n", **RAW},
        "tool_calls": {
            "open": "STOP",
            "close": "ab",
            "repeats": True,
            "content": "text",
            "content_args": {"strip": False},
            "transform": {"function": {"name": "f", "arguments": {"text": "{content}"}}},
        },
    },
}
TOOL = '{"type": "function", "function": {"name": "f"}}'
NUM_CHATS, NUM_TOKENS = 8, 120


@dataclass(slots=True)
class Answer:
    """What one caller got, also over several calls."""

    ids: list[int] = field(default_factory=list[int])
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    usage: pb.Usage | None = None

    def take(self, message: pb.GenerateResponse) -> None:
        delta = message.delta
        self.ids += delta.token_ids
        self.reasoning += delta.reasoning
        self.content += delta.text
        for piece in delta.tool_calls:
            if piece.id:
                assert piece.index == len(self.calls)
                self.calls.append((piece.id, piece.name, ""))
            call_id, name, arguments = self.calls[piece.index]
            self.calls[piece.index] = (call_id, name, arguments + piece.arguments)
        if message.HasField("summary"):
            self.usage = message.summary.usage

    def offset(self) -> pb.SampleOffset:
        return pb.SampleOffset(
            token_ids=len(self.ids),
            text_chars=len(self.content),
            reasoning_chars=len(self.reasoning),
            tool_calls=len(self.calls),
            tool_argument_chars=sum(len(call[2]) for call in self.calls),
        )


@pytest.fixture
def chat_files(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    (tmp_path / "r.json").write_text(json.dumps(RESPONSE))
    return ("--chat-template", str(tmp_path / "t.jinja"), "--response-template", str(tmp_path / "r.json"))


def request(idx: int) -> pb.GenerateRequest:
    messages = [chat_pb2.ChatMessage(role="user", content=[f"Question {idx}, {'é' * (idx % 16)}"])]
    return pb.GenerateRequest(
        chat=chat_pb2.Chat(messages=messages, tools_json=[TOOL]),
        stop=pb.StopParams(max_new_tokens=NUM_TOKENS, ignore_eos=True),
        sampling=pb.SamplingParams(temperature=1.0, seed=idx),
        resume=pb.ResumeParams(linger_seconds=600.0),
    )


def read(address: str, idx: int, answers: list[Answer]) -> None:
    """Reads one answer to its end, and resumes it whenever its stream breaks."""
    answer, accepted = answers[idx], pb.Accepted()
    # Front ends that die often start again after a pause.
    for _ in range(2400):
        with grpc.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            again = pb.ResumeRequest(
                request_id=accepted.request_id, resume_secret=accepted.resume_secret, offsets=[answer.offset()]
            )
            call = (
                stub.Resume(again, timeout=TIMEOUT_SECONDS)
                if accepted.resume_secret
                else stub.Generate(request(idx), timeout=TIMEOUT_SECONDS)
            )
            try:
                for message in call:
                    if message.HasField("accepted"):
                        accepted = message.accepted
                    answer.take(message)
                return
            except grpc.RpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED):
                    raise
                time.sleep(0.1)
    raise AssertionError("the stream does not end")


def check(address: str, answers: list[Answer]) -> None:
    """Every answer against the oracle's tokens and Transformers' parser of the whole text."""
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for idx, answer in enumerate(answers):
            prompt = stub.RenderChat(pb.RenderChatRequest(chat=request(idx).chat))
            assert prompt.text.endswith("model:")
            ask = Ask(prompt=tuple(prompt.token_ids), max_new_tokens=NUM_TOKENS, temperature=1.0, seed=idx)
            expected = ask.expected()
            assert answer.ids == expected.tokens
            message = parse_response(expected.text, RESPONSE, prefix="")
            assert answer.reasoning == message.get("reasoning_content", "")
            content, whole = (text.replace("|", "").split() for text in (answer.content, message.get("content", "")))
            calls = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
            assert content == whole
            # An answer is cut by its length. Transformers takes the text of a call that is cut for the whole call.
            is_cut = bool(calls) and not answer.calls[-1][2].endswith("}")
            *before, last = [arguments for _, _, arguments in answer.calls] or [""]
            found = [json.loads(arguments) for arguments in [*before, last + "}" * is_cut] if arguments]
            assert found == calls
            assert answer.usage is not None and (answer.usage.reasoning_tokens > 0) == bool(answer.reasoning)
    assert sum(len(answer.calls) for answer in answers) >= 3
    assert sum(bool(answer.reasoning) for answer in answers) >= 3


def kill_front_end(scheduler: SchedulerProcess) -> None:
    number = len(scheduler.lines)
    os.kill(scheduler.frontend_pid(), signal.SIGKILL)
    scheduler.wait_line("frontend listening on ", after=number)


@pytest.mark.parametrize("num_kills", [2, pytest.param(30, marks=pytest.mark.long)])
def test_kills_change_no_chat(rig: Rig, chat_files: tuple[str, ...], num_kills: int) -> None:
    workers = [rig.worker(*SHAPE, *chat_files)]
    scheduler = rig.scheduler()
    caller = rig.caller(scheduler)
    caller.wait_serving()
    answers = [Answer() for _ in range(NUM_CHATS * num_kills)]
    rng = random.Random(num_kills)
    with ThreadPoolExecutor(len(answers)) as threads:
        for kill in range(num_kills):
            first = kill * NUM_CHATS
            readers = [threads.submit(read, scheduler.address, idx, answers) for idx in range(first, first + NUM_CHATS)]
            wanted = rng.randrange(100, 500)
            while sum(len(answer.ids) for answer in answers[first:]) < wanted and not all(r.done() for r in readers):
                time.sleep(0.002)
            rig.kill_serving(caller, workers)
            workers.append(rig.worker(*SHAPE, *chat_files))
            kill_front_end(scheduler)
            for reader in readers:
                reader.result()
    check(scheduler.address, answers)
    assert caller.wait_idle().lane_resets >= num_kills
