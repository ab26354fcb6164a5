"""Whether a service serves chats."""

from tandem_client.errors import InvalidArgument
from tandem_client.types import ModelInfo


def check(model: ModelInfo) -> None:
    """Raises InvalidArgument with the reason, and with what to do, if the service serves no chats."""
    if model.chat_refusal:
        hint = "tandem generate continues a text without a template"
        raise InvalidArgument(f"the service refuses chats: {model.chat_refusal.rstrip('.')}; {hint}")
