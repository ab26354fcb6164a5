"""What a call tells a proxy in front of several services, in metadata, and what its answer tells.

Owns the names, and the affinity of a request: a hash of the salt and of a prompt's beginning, by which requests that
begin alike reach one service.
"""

import hashlib
from collections.abc import Iterator

from tandem.v1 import chat_pb2, inference_pb2

AFFINITY_KEY = "tandem-affinity"
# A proxy names the service of a request so, in the metadata of its answer; calls with that metadata go there.
SERVICE_KEY = "tandem-cell"
# The beginning of a prompt: as much as system prompts have in common, and no more than the first turn of most chats.
_CHARACTERS, _TOKEN_IDS = 1024, 256
_KEY_BYTES = 8


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


def _beginning(chat: chat_pb2.Chat) -> Iterator[str]:
    """What all turns of a conversation begin with: tools, and the messages up to the first one of the user."""
    yield from chat.tools_json
    for message in chat.messages:
        yield from (message.role, *message.content)
        if message.role == "user":
            return
