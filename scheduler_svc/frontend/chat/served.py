"""Owns what the served model can do with chats: its templates, the form of its answers, or why chats are refused.

Made with the model, in a thread. Chats are an extra: without the libraries that they need a service runs too. Knows
nothing of requests that wait or of streams.
"""

import functools
import hashlib
import json
import logging
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, cast

from tandem.internal.v1 import frontend_pb2, worker_pb2

from scheduler_svc.frontend.chat.answer import AnswerParser
from scheduler_svc.frontend.chat.bodies import mark_all
from scheduler_svc.frontend.chat.calls import argument_types, compact
from scheduler_svc.frontend.chat.conversation import Calls, Conversation
from scheduler_svc.frontend.chat.forms import AnswerForm, ReasoningFormat, choose_form
from scheduler_svc.frontend.chat.rendering import Rendered, Renderer, without_markers
from tandem_contract.version import how_to_install

if TYPE_CHECKING:
    import tokenizers

# Transformers has sanitize_control_tokens from this version on; older versions of jinja2 have holes in the sandbox.
LEAST = {"transformers": (5, 23), "jinja2": (3, 1, 6)}
logger = logging.getLogger(__name__)

NO_TOKENIZER = "chats need a tokenizer, and the served model has none"
NO_TEMPLATE = "chats need a chat template, and the served model has none"
# The longest message that the model continues; only its last region matters.
MAX_PREFIX_CHARS = 8192


def missing_libraries() -> str:
    """Why chats cannot be served here, in one sentence; empty if they can. Imports neither library."""
    for name, least in LEAST.items():
        said = f"chats need {name} {'.'.join(map(str, least))} or newer on the scheduler's machine, and"
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            return f"{said} it is not installed: {how_to_install('chat')}"
        if tuple(int(part) for part in re.findall(r"\d+", installed)[:3]) < least:
            return f"{said} {installed} is installed: {how_to_install('chat')}"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedChat:
    """The chats of one model. Either `refusal` says why there are none, or there is a renderer."""

    refusal: str
    renderer: Renderer | None = None
    # None: answers are not parsed.
    form: AnswerForm | None = None
    digest: bytes = field(default=b"", repr=False)

    def prefix(self, rendered: Rendered) -> str:
        """What the prompt has of the message that the model writes."""
        if self.form is None:
            return ""
        anchor = spec_of(compact(self.form.template)).start_anchor_re
        ends = [match.end() for match in anchor.finditer(rendered.marked)]
        text = without_markers(rendered.marked[ends[-1] :]) if ends else ""
        half = MAX_PREFIX_CHARS // 2
        return text if len(text) <= MAX_PREFIX_CHARS else text[:half] + text[-half:]

    def reasoning(self, conversation: Conversation) -> ReasoningFormat | None:
        """How the model writes reasoning in the answer of this chat; None if that is unknown."""
        if self.form is None or self.form.reasoning is None or self.renderer is None:
            return None
        shape = self.renderer.shape(has_tools=bool(conversation.tools))
        return self.form.reasoning.as_written(shape.reasoning_to_content)

    def parsing(self, rendered: Rendered, conversation: Conversation) -> frontend_pb2.ChatParsing | None:
        """How the answer of this chat is parsed; None if it is not."""
        if self.form is None:
            return None
        ignores_calls = conversation.choice.calls is Calls.NONE
        fields: Mapping[str, Any] = self.form.template["fields"]
        # Values in JSON have their types.
        is_tagged = fields.get("tool_calls", {}).get("content") not in (None, "json")
        types = argument_types(conversation.tools) if is_tagged and not ignores_calls else {}
        reasoning = self.reasoning(conversation)
        return frontend_pb2.ChatParsing(
            response_template_json=compact(self.form.template),
            prefix=self.prefix(rendered),
            argument_types_json=compact(types) if types else "",
            ignore_tools=ignores_calls,
            tool_names=[tool.name for tool in conversation.choice.tools],
            after_reasoning="" if reasoning is None else reasoning.after,
        )


def settings_of(state: frontend_pb2.ModelState) -> dict[str, Any]:
    """The settings of the tokenizer that its serialized form does not have."""
    return json.loads(worker_pb2.ChatFiles.FromString(state.chat_files).tokenizer_config_json or "{}")


def load_chat(
    state: frontend_pb2.ModelState,
    backend: "tokenizers.Tokenizer | None",
    override: AnswerForm | None,
    before: ServedChat | None,
) -> ServedChat:
    """The chats of a model. Takes a second with the first chat template, so call it outside the event loop.

    `backend`: the tokenizer; None without one.
    """
    files = worker_pb2.ChatFiles.FromString(state.chat_files)
    parts = (state.tokenizer_json, state.chat_template.encode(), state.chat_files)
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
    if before is not None and before.digest == digest:
        return before
    templates = [state.chat_template, *files.named_templates.values()]
    why = NO_TOKENIZER if backend is None else "" if any(templates) else NO_TEMPLATE
    if backend is None or why or (why := missing_libraries()):
        return ServedChat(refusal=why, digest=digest)
    try:
        renderer = Renderer(backend, state.chat_template, files)
    except Exception as error:  # Any error of Transformers.
        logger.exception("chats are refused: the worker's tokenizer or its settings cannot be used")
        return ServedChat(refusal=f"the served model's chat files cannot be used: {str(error)[:200]}", digest=digest)
    return ServedChat(refusal="", renderer=renderer, form=_form(templates, files, override), digest=digest)


def _form(templates: list[str], files: worker_pb2.ChatFiles, override: AnswerForm | None) -> AnswerForm | None:
    try:
        form = choose_form(templates, files.response_template_json, override)
        if form is not None:
            spec_of(compact(form.template))
    except (ValueError, RecursionError) as error:
        logger.error("answers of chats are not parsed: the response template cannot be used: %s", error)
        return None
    logger.info("answers of chats %s", "are not parsed" if form is None else f"are parsed as {form.family}")
    return form


@functools.lru_cache(maxsize=16)
def spec_of(template_json: str) -> Any:
    """Transformers' ResponseTemplate. Raises ValueError if the template cannot be used."""
    from transformers.utils.chat_parsing import response_templates

    return cast(Any, response_templates).load_response_template(json.loads(template_json))


def make_parser(
    parsing: frontend_pb2.ChatParsing, request_id: str, sample_idx: int, controls: Set[str] = frozenset()
) -> AnswerParser:
    """The parser of one sample of a chat. `controls`: control tokens of the template that its text has marked."""
    return AnswerParser(
        spec_of(_marked_template(parsing.response_template_json, controls)),
        mark_all(parsing.prefix, controls),
        argument_types=json.loads(parsing.argument_types_json or "{}"),
        ignores_calls=parsing.ignore_tools,
        has_constraint=parsing.has_constraint,
        after_reasoning=parsing.after_reasoning,
        tool_names=frozenset(parsing.tool_names),
        request_id=request_id,
        sample_idx=sample_idx,
    )


def _marked_template(template_json: str, controls: Set[str]) -> str:
    def changed(value: object) -> object:
        if isinstance(value, str):
            return mark_all(value, controls)
        if isinstance(value, dict):
            return {key: changed(item) for key, item in cast(dict[str, object], value).items()}
        return [changed(item) for item in cast(list[object], value)] if isinstance(value, list) else value

    return json.dumps(changed(json.loads(template_json))) if controls else template_json
