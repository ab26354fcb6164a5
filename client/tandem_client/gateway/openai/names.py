"""The names of the service's fields in OpenAI's API, for errors."""

from collections.abc import Mapping

from tandem_client.gateway.openai.bodies import Chat, Completion
from tandem_client.gateway.openai.fields import Body
from tandem_client.wire.request import FIELD_KEYWORDS


def _names(body: type[Body], more: Mapping[str, str]) -> dict[str, str]:
    aliases = {name: field.alias or name for name, field in body.model_fields.items()} | {"chat": "messages"}
    return {path: aliases.get(word, word) for path, word in FIELD_KEYWORDS.items()} | {
        "request_id": "x-request-id", "constraint": "response_format", **more,
    }  # fmt: skip


COMPLETION: Mapping[str, str] = _names(Completion, {"output.logprobs": "logprobs"})
CHAT: Mapping[str, str] = _names(
    Chat,
    {
        "prompt": "messages",
        "chat.messages[].tool_calls[].name": "messages[].tool_calls[].function.name",
        "chat.messages[].tool_calls[].arguments_json": "messages[].tool_calls[].function.arguments",
        "chat.tool_choice.name": "tool_choice.function.name",
        "output.logprobs": "top_logprobs",
    },
)
