"""Owns the tokenizer that renders chats: Transformers' own, with the served checkpoint's templates.

Transformers turns control tokens in the caller's strings into ordinary text; this module refuses those in keys, which
Transformers leaves as they are. Transformers is imported with the first chat template, and imports no torch.
"""

import dataclasses
import json
import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from tandem.internal.v1 import worker_pb2

from scheduler_svc.frontend.chat.conversation import Conversation, Message, levels
from scheduler_svc.frontend.chat.shape import Shape, probe
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.sizes import refuse, wrong
from tandem_contract.plural import numbered

if TYPE_CHECKING:
    import tokenizers

logger = logging.getLogger(__name__)

# Transformers puts a caller's control tokens between these two, until they have been tokenized as text.
MARKERS = "\U000f0000\U000f0001"
_MARKER = re.compile(f"[{MARKERS}]")
# What a template makes of a marker that it writes as JSON in ASCII: the token behind it would not be recognized.
_ESCAPED_MARKER = "\\udb80\\udc0"
MAX_ERROR_CHARS = 300
_IN_BRACKETS = re.compile(r"<.*>", re.DOTALL).fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    token_ids: list[int]
    # Control tokens of the caller's text are between MARKERS.
    marked: str

    @property
    def text(self) -> str:
        return without_markers(self.marked)


def without_markers(text: str) -> str:
    """What a template made, with the caller's text as it is."""
    return _MARKER.sub("", text)


class Renderer:
    """The templates of one checkpoint. Not for the event loop: a long chat takes seconds."""

    def __init__(self, backend: "tokenizers.Tokenizer", template: str, files: worker_pb2.ChatFiles) -> None:
        """Copies the backend. Takes about a second, most of it the import of Transformers, and raises its errors."""
        self._tokenizer = _make_tokenizer(backend, template, files)
        added: Mapping[int, Any] = self._tokenizer.added_tokens_decoder
        # The ids of the tokens that llguidance treats as marks, by their texts: special ones, and <these>.
        self.marks: Mapping[str, int] = {
            token.content: idx for idx, token in added.items() if token.special or _IN_BRACKETS(token.content)
        }
        self._names = frozenset(self._tokenizer.special_tokens_map)
        # Every added token that is not white space, a few more than the template's own control tokens.
        self._forbidden = tuple(
            text for text in (*self._tokenizer.added_tokens_encoder, *MARKERS) if not text.isspace()
        )
        self._first_chars = frozenset(token[0] for token in self._forbidden)
        # Encoding sets a switch of the tokenizer for a moment, so it is used by one thread at a time.
        self._lock = threading.Lock()
        # With tools a checkpoint may have another template.
        chosen = {has_tools: self._chosen(has_tools=has_tools) for has_tools in (False, True)}
        shapes = {template: self._probed(template) for template in dict.fromkeys(chosen.values())}
        self._shapes = {has_tools: shapes[template] for has_tools, template in chosen.items()}

    def shape(self, *, has_tools: bool) -> Shape:
        """What the template of chats with or without tools takes."""
        return self._shapes[has_tools]

    def render(self, conversation: Conversation, max_chars: int) -> Rendered:
        """Raises Refusal if the template refuses the chat, or makes more than `max_chars` characters of it."""
        for name in conversation.template_args:
            if name in self._names:
                raise wrong("chat.template_args_json", f"has {name!r}, which the server sets itself")
        self._check_keys(conversation)
        shape = self.shape(has_tools=bool(conversation.tools))
        for idx, message in enumerate(conversation.messages):
            if (most := shape.most_calls) is not None and len(message.calls) > most:
                many = numbered(len(message.calls), "call")
                what = f"has {many}; the model's chat template shows {most or 'none'}"
                raise wrong(f"chat.messages[{idx}].tool_calls", what)
        with self._lock:
            self._tokenizer.max_chars = max_chars
            try:
                token_ids = self._applied(
                    conversation, shape, conversation.messages, sanitize_control_tokens=True, return_dict=False
                )
            except status.Refusal:
                raise
            except Exception as error:  # Any error of a template: of jinja2, or of Python for wrong types.
                lines = str(error).strip().splitlines()
                first = without_markers((lines[0] if lines else type(error).__name__)[:MAX_ERROR_CHARS])
                raise status.invalid("chat", f"the model's chat template refuses the chat: {first}") from error
            rendered = Rendered(token_ids=list(token_ids), marked=self._tokenizer.marked)
            self._refuse_lost(conversation, shape)
        return rendered

    def _applied(self, conversation: Conversation, shape: Shape, messages: Sequence[Message], **how: bool) -> Any:
        return self._tokenizer.apply_chat_template(
            shape.messages(messages),
            tools=conversation.tools or None,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continues,
            **how,
            **conversation.template_args,
        )

    def _refuse_lost(self, conversation: Conversation, shape: Shape) -> None:
        """Refuses a chat with a message that the template leaves out. Content beside calls may be left out.

        It renders the chat once more, with a word of its own in place of each message's content: templates may change
        content, so the text itself proves nothing.
        """
        words = {
            idx: f"zqmessage{idx}zq"
            for idx, message in enumerate(conversation.messages)
            if not message.calls and any(part.strip() for part in message.parts)
        }
        marked = [
            dataclasses.replace(message, parts=(words[idx],)) if idx in words else message
            for idx, message in enumerate(conversation.messages)
        ]
        try:
            text: str = self._applied(conversation, shape, marked, tokenize=False).lower()
        except Exception:  # The template looks at what stands in a message.
            return
        for idx, word in words.items():
            if word not in text:
                role, field = conversation.messages[idx].role, f"chat.messages[{idx}].content"
                raise wrong(field, f"would be lost: the model's chat template leaves this message of {role} out")

    def _chosen(self, *, has_tools: bool) -> str:
        """The template of chats with or without tools; empty if the checkpoint has none for them."""
        try:
            return self._tokenizer.get_chat_template(None, [{}] if has_tools else None)
        except ValueError:
            return ""

    def _probed(self, template: str) -> Shape:
        """Raises jinja2's TemplateSyntaxError."""

        def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, add_generation_prompt=True, tokenize=False
            )

        shape = probe(render) if template else Shape()
        logger.info("shape of the chat template: %s", shape)
        return shape

    def _check_keys(self, conversation: Conversation) -> None:
        for field, value in conversation.with_keys():
            objects = [
                cast(dict[str, object], one) for one in chain.from_iterable(levels(value)) if isinstance(one, dict)
            ]
            for key in chain.from_iterable(objects):
                if self._first_chars.isdisjoint(key):
                    continue
                if mark := next((token for token in self._forbidden if token in key), None):
                    shown = f"U+{ord(mark):X}" if mark in MARKERS else repr(mark)
                    what = f"has {shown} in the key {key[:64]!r}; tokens of the model are not allowed in keys"
                    raise wrong(field, what)


def _make_tokenizer(backend: "tokenizers.Tokenizer", template: str, files: worker_pb2.ChatFiles) -> Any:
    # Says that PyTorch is missing, which is as it should be here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import PreTrainedTokenizerFast

    base: Any = PreTrainedTokenizerFast

    class ChatTokenizer(base):
        """Keeps the text that the template made, and refuses one that is too long before it is tokenized."""

        max_chars = 0
        marked = ""

        def __call__(self, text: str, *args: Any, **kwargs: Any) -> Any:
            num_chars = len(without_markers(text))
            if num_chars > self.max_chars:
                refuse("chat", f"becomes {numbered(num_chars, 'character')} with the model's template", self.max_chars)
            if _ESCAPED_MARKER in text.lower():
                what = "has control tokens of the model where its template writes JSON in ASCII; leave them out"
                raise wrong("chat", what)
            self.marked = text
            return base.__call__(self, text, *args, **kwargs)

    settings: dict[str, Any] = json.loads(files.tokenizer_config_json or "{}")
    named = dict(files.named_templates)
    settings["chat_template"] = {**({"default": template} if template else {}), **named} if named else template
    return ChatTokenizer(tokenizer_object=backend, **settings)
