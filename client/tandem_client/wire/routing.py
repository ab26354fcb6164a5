"""What a call tells a proxy in front of several services, in metadata, and what its answer tells.

Owns the names, and the affinity of a request: a hash of the salt and of a prompt's beginning, by which requests that
begin alike reach one service.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator

from tandem.v1 import chat_pb2, inference_pb2

AFFINITY_KEY = "tandem-affinity"
# A proxy names the service of a request so, in the metadata of its answer; calls with that metadata go there.
SERVICE_KEY = "tandem-cell"
# The beginning of a prompt: as much as system prompts have in common, and no more than the first turn of most chats.
_CHARACTERS, _TOKEN_IDS = 1024, 256
_KEY_BYTES = 8
_NAME = re.compile(r"[!-~]+")


def affinity_of(request: inference_pb2.GenerateRequest) -> str:
    """16 hexadecimal digits, equal for requests of equal salt and beginning. It does not reveal the salt."""
    hashed = hashlib.blake2b(digest_size=_KEY_BYTES, person=b"tandem-affinity")
    if request.HasField("chat"):
        start = "".join(_beginning(request.chat))[:_CHARACTERS].encode()
    elif request.HasField("token_ids"):
        start = ",".join(map(str, request.token_ids.ids[:_TOKEN_IDS])).encode()
    else:
        start = request.text[:_CHARACTERS].encode()
    for part in (request.cache.salt.encode(), start):
        hashed.update(len(part).to_bytes(8, "big") + part)
    return hashed.hexdigest()


def to_service(service: str | None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata by which a proxy sends a call to this service. Raises ValueError for what names none."""
    if service is None:
        return ()
    if _NAME.fullmatch(service) is None:
        raise ValueError(f"service is {service!r:.60}; it must be a stream's `service`: printable ASCII without blanks")
    return ((SERVICE_KEY, service),)


def service_in(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Returns the service that a proxy names in the metadata of an answer; None without one."""
    return next((value for name, value in metadata if name == SERVICE_KEY and isinstance(value, str)), None)


def _beginning(chat: chat_pb2.Chat) -> Iterator[str]:
    """What all turns of a conversation begin with: tools, and the messages up to the first one of the user."""
    yield from chat.tools_json
    for message in chat.messages:
        yield from (message.role, *message.content)
        if message.role == "user":
            return
