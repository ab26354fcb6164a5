"""Owns the front end's data of the served model: its limits and defaults, its tokenizer and its chats.

Knows nothing of requests. The front end makes a Model from the core's ModelState, and a new one when workers of other
sizes join or leave and the sizes change. The identity of the model never changes for one core, so the tokenizer is read
once.
"""

import hashlib
import logging
from dataclasses import dataclass, field
from importlib.util import find_spec

from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.frontend.chat.forms import AnswerForm
from scheduler_svc.frontend.chat.served import ServedChat, load_chat, settings_of
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.sizes import Sizes, check_count
from scheduler_svc.frontend.text.tokenizer import Tokenizer
from tandem_contract.limits import limit_at, limit_of

logger = logging.getLogger(__name__)

# A model's name may be the path of its folder.
_MAX_NAME_CHARS = limit_at(inference_pb2.GenerateRequest, "model").chars


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The served model. `tokenizer` is None if the worker sent none."""

    info: control_pb2.GetModelInfoResponse
    # The longest sequence that the pages of the largest present worker hold; at most info.max_length.
    longest_sequence: int
    # The length is that of a worker which is present or left recently; at least info.max_length. The front end refuses
    # a longer prompt as invalid. The core decides whether a shorter one can run now.
    sizes: Sizes
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer | None
    chat: ServedChat
    # The process that tries grammars makes its own tokenizer of it.
    tokenizer_json: bytes = field(repr=False)
    # SHA-256 of the bytes that `tokenizer` was made from.
    tokenizer_digest: bytes = field(repr=False)
    # The start of every chain of page hashes. It is a secret and never logged.
    cache_root: bytes = field(repr=False)

    def check_name(self, name: str) -> None:
        """Refuses a request for another model. An empty name stands for the served model."""
        check_count("model", len(name), _MAX_NAME_CHARS, "characters long")
        if name and name != self.info.model:
            raise status.unknown_model(name, self.info.model)


def load(state: frontend_pb2.ModelState, before: Model | None = None, answers: AnswerForm | None = None) -> Model:
    """Makes the model of a state, with the tokenizer of `before` if it is the same.

    `answers`: the operator's form of the answers of chats. Otherwise it takes 0.5 s for a vocabulary of 150,000, and a
    second more with a chat template, so call it outside the event loop.
    """
    info = control_pb2.GetModelInfoResponse()
    info.CopyFrom(state.info)
    digest = hashlib.sha256(state.tokenizer_json).digest()
    is_same = before is not None and before.tokenizer_digest == digest and before.info.vocab_size == info.vocab_size
    tokenizer = before.tokenizer if before is not None and is_same else _make_tokenizer(state)
    info.has_tokenizer = tokenizer is not None
    backend = None if tokenizer is None else tokenizer.backend
    chat = load_chat(state, backend, answers, None if before is None else before.chat)
    info.chat_refusal = chat.refusal
    info.constraint_refusal = _constraint_refusal(state, tokenizer)
    info.chat_parts[:] = () if chat.form is None else chat.form.parts
    defaults = inference_pb2.SamplingParams()
    for option in defaults.DESCRIPTOR.fields:
        if (limit := limit_of(option)).HasField("off"):
            setattr(defaults, option.name, int(limit.off) if option.type == option.TYPE_UINT32 else limit.off)
    defaults.MergeFrom(info.sampling_defaults)
    defaults.ClearField("seed")
    info.sampling_defaults.CopyFrom(defaults)
    max_length = max(info.max_length, state.recent_max_length)
    return Model(
        info=info,
        longest_sequence=min(info.max_length, state.longest_sequence or info.max_length),
        sizes=Sizes(
            prompt_tokens=max_length - 1,
            text_chars=0 if tokenizer is None else max_length * tokenizer.max_chars_per_token,
            length=max_length,
            top_k=max(info.vocab_size, info.sampling_defaults.top_k),
            samples=max(1, info.max_num_samples),
            logprobs=info.max_logprobs,
        ),
        eos_token_ids=frozenset(info.eos_token_ids),
        tokenizer=tokenizer,
        chat=chat,
        tokenizer_json=state.tokenizer_json,
        tokenizer_digest=digest,
        cache_root=state.cache_root,
    )


def _constraint_refusal(state: frontend_pb2.ModelState, tokenizer: Tokenizer | None) -> str:
    """Returns why constraints are refused, in one sentence; empty if they are served."""
    if find_spec("llguidance") is None:
        return "constraints need llguidance, which is not installed in the scheduler's environment"
    if tokenizer is None:
        return "constraints need a tokenizer, and the served model has none"
    return state.constraint_refusal


def _make_tokenizer(state: frontend_pb2.ModelState) -> Tokenizer | None:
    if not state.tokenizer_json:
        return None
    try:
        splits = settings_of(state).get("split_special_tokens", False)
        return Tokenizer(state.tokenizer_json, vocab_size=state.info.vocab_size, splits_special_tokens=splits)
    except ValueError as error:
        logger.error("text prompts and text output are not available: the worker's tokenizer cannot be used: %s", error)
        return None
