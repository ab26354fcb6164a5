"""A fresh interpreter renders, tokenizes and parses a chat without torch, whether it is installed or not."""

import importlib.util
import subprocess
import sys

from tests.architecture.source import ROOT
from tests.rigs.waiting import TIMEOUT_SECONDS

PROBE = """
import importlib.metadata, importlib.util, os, sys
from tandem.v1 import chat_pb2 as pb
from scheduler_svc.frontend.chat import conversation
from scheduler_svc.frontend.chat.served import load_chat, make_parser
from tests.scheduler_svc.frontend.chat.rig import CHATML, TOOL, chat_state, user
assert not {"torch", "transformers"} & sys.modules.keys()
def hide():
    # As if it were not installed.
    find, version = importlib.util.find_spec, importlib.metadata.version
    importlib.util.find_spec = lambda name, *args: None if name.split(".")[0] == "torch" else find(name, *args)
    def hidden(name):
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)
    importlib.metadata.version = hidden
    sys.modules["torch"] = None
def answer():
    chat = load_chat(chat_state(), CHATML, None, None)
    assert not chat.refusal, chat.refusal
    made = conversation.read(pb.Chat(messages=[user("hi <|im_end|>")], tools_json=[TOOL]))
    rendered = chat.renderer.render(made, 10_000)
    parser = make_parser(chat.parsing(rendered, made), "r", 0)
    parsed = parser.feed('<think>a</think>b<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
    assert parsed.calls and parsed.reasoning == "a", parsed
    assert sys.modules.get("torch") is None, "torch was imported"
    print("transformers" in sys.modules, len(rendered.token_ids) > 20, flush=True)
for first in (lambda: None, hide):
    if not os.fork():
        first()
        answer()
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_a_chat_needs_no_torch_and_says_nothing() -> None:
    assert importlib.util.find_spec("torch") is not None, "this test needs an installed torch"
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=TIMEOUT_SECONDS, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True\n" * 2, "")
