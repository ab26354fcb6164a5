"""Owns the conversion of a request's prompt to token ids: text, token ids or a chat. Every refusal is a Refusal.

Texts and chats are limited before any work on them. A chat is checked, rendered and tokenized in the threads of texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.internal.v1 import frontend_pb2
from tandem.v1 import chat_pb2, inference_pb2

from scheduler_svc.frontend.chat import conversation as chats
from scheduler_svc.frontend.chat.conversation import Conversation
from scheduler_svc.frontend.chat.rendering import Rendered
from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.sizes import wrong
from scheduler_svc.frontend.validate import check_token_ids
from tandem_contract.plural import numbered


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt's token ids; of a chat also the chat, as it came and rendered, and if its answer is parsed, how."""

    token_ids: Sequence[int]
    chat: tuple[Conversation, Rendered] | None = None
    parsing: frontend_pb2.ChatParsing | None = None


async def read_prompt(request: inference_pb2.GenerateRequest, model: Model, tenant: str) -> Prompt:
    """Returns the prompt of a request. Raises Refusal."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise wrong("prompt", "is missing; give text, token_ids or chat")
    if kind == "text":
        return Prompt(token_ids=await text_ids(request, model, tenant))
    if kind == "chat":
        conversation, rendered = chat = await render_chat(request.chat, model, tenant)
        parsing = None if request.chat.unparsed else model.chat.parsing(rendered, conversation)
        return Prompt(token_ids=rendered.token_ids, chat=chat, parsing=parsing)
    check_token_ids("token_ids.ids", request.token_ids.ids, model)
    return Prompt(token_ids=request.token_ids.ids)


async def text_ids(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, model: Model, tenant: str
) -> list[int]:
    """Returns a text's token ids. Raises Refusal if the model has no tokenizer, or the text is empty or too long."""
    text, adds = request.text, not request.HasField("add_special_tokens") or request.add_special_tokens
    if model.tokenizer is None:
        raise wrong("text", "needs a tokenizer, and the served model has none")
    await model.tokenizer.check(text, model.sizes, tenant)
    token_ids = await model.tokenizer.encode(text, tenant, add_special_tokens=adds)
    if not token_ids:
        raise wrong("text", f"has {numbered(len(text), 'character')} but 0 tokens; at least 1 token is needed")
    # A tokenizer may have more tokens than the model has embeddings.
    check_token_ids("text", token_ids, model)
    return token_ids


async def render_chat(chat: chat_pb2.Chat, model: Model, tenant: str) -> tuple[Conversation, Rendered]:
    """Returns the chat, and it rendered. Raises Refusal if the model serves none, or it is invalid or too long."""
    renderer, tokenizer = model.chat.renderer, model.tokenizer
    if renderer is None or tokenizer is None:
        raise status.invalid("chat", model.chat.refusal)
    max_chars = model.sizes.text_chars
    chats.check_size(chat, max_chars)

    def read_and_render() -> tuple[Conversation, Rendered]:
        conversation = chats.read(chat)
        return conversation, renderer.render(conversation, max_chars)

    conversation, rendered = await tokenizer.threads.run(tenant, read_and_render)
    if not rendered.token_ids:
        raise wrong("chat", "becomes 0 tokens with the model's template; at least 1 token is needed")
    check_token_ids("chat", rendered.token_ids, model)
    return conversation, rendered
