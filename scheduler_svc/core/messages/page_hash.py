"""The hash of a full page of tokens, its key in the prefix cache. Front ends and the core share this definition.

A page's hash is SHA-256 of the hash of the page before it and the page's own tokens. It therefore covers every token up
to the end of the page: if two pages have equal hashes, their sequences are equal up to the end of these pages. The
chain begins at `prefix_root`, so requests with different roots never share a page.
"""

from hashlib import sha256

from scheduler_svc.core.messages.arrays import Int32Array

HASH_BYTES = 32
_TAG = b"tandem prefix 1"
_TENANT_TAG = b"tandem prefix 2"


def prefix_root(cache_root: bytes, salt: str, tenant: str = "") -> bytes:
    """Returns the start of a request's hash chain: 32 bytes from the service's root, tenant and salt."""
    root = _sized(cache_root)
    if tenant:
        return sha256(_TENANT_TAG + root + _sized(tenant.encode()) + salt.encode()).digest()
    return sha256(_TAG + root + salt.encode()).digest()


def _sized(data: bytes) -> bytes:
    """Returns the data after its length, so that two values joined can be read in one way only."""
    return len(data).to_bytes(4, "little") + data


def root_name(cache_root: bytes) -> str:
    """Returns 32 hexadecimal digits that name the root of page hashes without telling it."""
    return sha256(b"tandem page root 1" + cache_root).hexdigest()[:32]


def next_hash(parent: bytes, tokens: bytes) -> bytes:
    """Returns a page's hash. `tokens` are its little-endian int32 tokens, `parent` is the hash of the page before."""
    return sha256(parent + tokens).digest()


def hash_pages(parent: bytes, tokens: Int32Array, page_size: int) -> bytes:
    """Returns the hashes of the full pages in `tokens` int32[n], concatenated, 32 bytes each."""
    data = tokens.astype("<i4", copy=False).tobytes()
    size, hashes = 4 * page_size, list[bytes]()
    for end in range(size, len(data) + 1, size):
        parent = sha256(parent + data[end - size : end]).digest()
        hashes.append(parent)
    return b"".join(hashes)
