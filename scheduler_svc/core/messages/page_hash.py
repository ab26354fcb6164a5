"""The chain of hashes that names a page by all that stands before its end.

Owns its definition, which the front end and the core share, and nothing else. A hash covers everything up to the page's
last token, so two pages of one hash have the same logical index and the same past.
"""

from hashlib import sha256

from scheduler_svc.core.messages.arrays import Int32Array

HASH_BYTES = 32
_TAG = b"tandem prefix 1"


def prefix_root(cache_root: bytes, salt: str) -> bytes:
    """What the first page's hash is chained to: the service's root, drawn at start, and the caller's salt."""
    text = salt.encode()
    return sha256(_TAG + len(cache_root).to_bytes(4, "little") + cache_root + text).digest()


def next_hash(parent: bytes, tokens: bytes) -> bytes:
    """Of a page whose tokens are these, little-endian int32, behind a past of hash `parent`."""
    return sha256(parent + tokens).digest()


def hash_pages(parent: bytes, tokens: Int32Array, page_size: int) -> bytes:
    """Hashes of the full pages in `tokens` int32[n], 32 bytes each, one after another."""
    data = tokens.astype("<i4", copy=False).tobytes()
    size, hashes = 4 * page_size, list[bytes]()
    for end in range(size, len(data) + 1, size):
        parent = sha256(parent + data[end - size : end]).digest()
        hashes.append(parent)
    return b"".join(hashes)
