"""Chats through the service: parsed answers are equal over the deaths of workers and front ends.

The checking worker samples pieces of text at random. The response template here takes some of them as marks, so answers
have reasoning, content and valid calls in any order.
"""

import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from tandem_client import Client
from tandem_client.sync_client import GenerateStream
from tests.rigs.processes import Rig
from tests.rigs.waiting import LINGER_SECONDS, TIMEOUT_SECONDS, until
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
TOOL = {"type": "function", "function": {"name": "f"}}
NUM_CHATS, NUM_TOKENS = 8, 120


@pytest.fixture
def chat_files(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    (tmp_path / "r.json").write_text(json.dumps(RESPONSE))
    return ("--chat-template", str(tmp_path / "t.jinja"), "--response-template", str(tmp_path / "r.json"))


def chat(idx: int) -> dict[str, Any]:
    """The options of a question."""
    return {"chat": [{"role": "user", "content": f"Question {idx}, {'é' * (idx % 16)}"}], "tools": [TOOL]}


def check(client: Client, answers: list[GenerateStream]) -> None:
    """Every answer against the oracle's tokens and Transformers' parser of the whole text."""
    num_calls = num_reasons = 0
    for idx, stream in enumerate(answers):
        [answer] = stream.samples
        prompt = client.render_chat(**chat(idx))
        assert prompt.text.endswith("model:")
        ask = Ask(prompt=tuple(prompt.token_ids), max_new_tokens=NUM_TOKENS, temperature=1.0, seed=idx)
        expected = ask.expected()
        assert list(answer.token_ids) == expected.tokens
        message = parse_response(expected.text, RESPONSE, prefix="")
        assert answer.reasoning == message.get("reasoning_content", "")
        content, whole = (text.replace("|", "").split() for text in (answer.text, message.get("content", "")))
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
        assert content == whole
        # An answer is cut by its length. Transformers takes the text of a call that is cut for the whole call.
        is_cut = bool(calls) and not answer.tool_calls[-1].arguments.endswith("}")
        *before, last = [call.arguments for call in answer.tool_calls] or [""]
        found = [json.loads(arguments) for arguments in [*before, last + "}" * is_cut] if arguments]
        assert found == calls
        assert stream.summary is not None and (stream.summary.usage.reasoning_tokens > 0) == bool(answer.reasoning)
        num_calls += len(answer.tool_calls)
        num_reasons += bool(answer.reasoning)
    assert num_calls >= 3 and num_reasons >= 3


@pytest.mark.parametrize("num_kills", [2, pytest.param(30, marks=pytest.mark.long)])
def test_kills_change_no_chat(rig: Rig, chat_files: tuple[str, ...], num_kills: int) -> None:
    workers = [rig.worker(*SHAPE, *chat_files)]
    scheduler = rig.scheduler()
    caller = rig.ready_caller(scheduler)
    rng, answers = random.Random(num_kills), list[GenerateStream]()
    with Client(scheduler.address, max_retries=20) as client, ThreadPoolExecutor(NUM_CHATS) as threads:
        client.wait_ready(TIMEOUT_SECONDS)
        for _ in range(num_kills):
            streams = [
                client.generate(
                    **chat(idx), temperature=1.0, seed=idx, max_new_tokens=NUM_TOKENS, ignore_eos=True, resume=True,
                    linger_seconds=LINGER_SECONDS, timeout=TIMEOUT_SECONDS,
                )
                for idx in range(len(answers), len(answers) + NUM_CHATS)
            ]  # fmt: skip
            readers = [threads.submit(list, stream) for stream in streams]
            wanted = rng.randrange(100, 500)
            until(
                lambda streams=streams, wanted=wanted: (
                    sum(len(stream.samples[0].token_ids) for stream in streams) >= wanted
                ),
                "tokens",
            )
            rig.kill_serving(caller, workers)
            workers.append(rig.worker(*SHAPE, *chat_files))
            number = len(scheduler.lines)
            os.kill(scheduler.frontend_pid(), signal.SIGKILL)
            scheduler.wait_line("frontend listening on ", after=number)
            for reader in readers:
                reader.result()
            answers += streams
        check(client, answers)
    assert caller.wait_idle().lane_resets >= num_kills
