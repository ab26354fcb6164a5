"""A model that chats: the byte-level tokenizer with ChatML's tokens, and the bundled model's template."""

from collections.abc import Sequence
from typing import Any

from tandem.internal.v1 import frontend_pb2, worker_pb2
from tandem.v1 import chat_pb2 as pb
from tokenizers import AddedToken, Tokenizer

from tests.architecture.source import ROOT
from tests.scheduler_svc.frontend.fake_core import model_state
from tests.scheduler_svc.frontend.tokenizers_for_tests import as_json, byte_level

TEMPLATE = (ROOT / "gpu_worker/bundled/model/chat_template.jinja").read_text(encoding="utf-8")
SPECIAL = ("<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TOOL = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}'


def tokenizer(special: Sequence[str] = SPECIAL, marks: Sequence[str] = MARKS) -> Tokenizer:
    made = Tokenizer.from_str(byte_level().to_str())
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in marks])
    return made


CHATML = tokenizer()
TOKENS = {token: CHATML.token_to_id(token) for token in (*SPECIAL, *MARKS)}


def chat_state(
    template: str = TEMPLATE,
    files: worker_pb2.ChatFiles | None = None,
    made: Tokenizer = CHATML,
    eos_token_ids: Sequence[int] = (),
    **info: Any,
) -> frontend_pb2.ModelState:
    """What the core sends of a model that chats."""
    size = made.get_vocab_size()
    state = model_state(**{"vocab_size": size, "max_length": 4096, "default_max_new_tokens": 1000, **info})
    if eos_token_ids:
        state.info.eos_token_ids[:] = eos_token_ids
    state.tokenizer_json, state.chat_template = as_json(made), template
    state.chat_files = (files or worker_pb2.ChatFiles()).SerializeToString()
    return state


def user(*parts: str, **fields: Any) -> pb.ChatMessage:
    return pb.ChatMessage(role="user", content=parts, **fields)


def spelled(text: str) -> list[int]:
    """The ids of a text, marks as their tokens and all else byte by byte."""
    ids, at = list[int](), 0
    while at < len(text):
        found = next((token for token in TOKENS if text.startswith(token, at)), None)
        ids += [TOKENS[found]] if found else list(text[at].encode())
        at += len(found) if found else 1
    return ids
