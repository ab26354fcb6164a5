"""Random metadata of calls over TLS: valid, wrong, replayed, missing and oversized tokens among other headers.

Owns the token, its file and the certificates, in a folder. Header names and values are legal in HTTP/2, because gRPC's
client refuses to send others.
"""

import random
import string
from pathlib import Path

import grpc

from tests.rigs.door import Door

_TOKEN = "tandem_" + "f" * 43
_NAMES = string.ascii_lowercase + string.digits + "-_."
_VALUES = "".join(map(chr, range(32, 127)))
# Of the whole metadata; the service refuses more.
_MAX_BYTES = 16_384

# The deadline may pass in the client, for example while this process is stopped; it says nothing of the service.
_CLOSED = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.DEADLINE_EXCEEDED})

Metadata = tuple[tuple[str, str | bytes], ...]


class FuzzDoor(Door):
    """TLS and one token with every right."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _TOKEN, ("inference", "control", "metrics"))
        self.credentials = grpc.ssl_channel_credentials(self.authority.read_bytes())

    def metadata(self, rng: random.Random) -> tuple[Metadata, frozenset[grpc.StatusCode]]:
        """Headers of one call, and the only statuses that it may have; none means that the message decides."""
        right = ("authorization", f"{rng.choice(['Bearer', 'bearer', 'BEARER'])} {_TOKEN}")
        kind = rng.randrange(8)
        proofs = {
            0: [("authorization", f"Bearer {_value(rng, 60)}")],
            1: [("authorization", f"Bearer {_TOKEN[:-1]}")],
            2: [right, right],
            3: [right, ("authorization", _value(rng, 40))],
            4: [("authorization", _value(rng, 3000))],
            5: list[tuple[str, str | bytes]](),
        }.get(kind, [right])
        others: list[tuple[str, str | bytes]] = []
        for _ in range(rng.choice([0, 0, 1, 4, 40])):
            name = "x-" + "".join(rng.choices(_NAMES, k=rng.randint(1, 20)))
            is_binary = rng.random() < 0.2
            value = rng.randbytes(rng.randrange(60)) if is_binary else _value(rng, rng.choice([10, 100, 2000]))
            others.append((f"{name}-bin" if is_binary else name.removesuffix("-bin"), value))
        headers = (*proofs, *others)
        if kind >= 6:
            return headers, frozenset()
        # Headers above the limit are refused by gRPC. Its client adds some, so the limit is not met exactly here.
        is_large = sum(32 + len(name) + len(value) for name, value in headers) > _MAX_BYTES // 2
        return headers, _CLOSED | {grpc.StatusCode.RESOURCE_EXHAUSTED} if is_large else _CLOSED


def _value(rng: random.Random, most: int) -> str:
    return "".join(rng.choices(_VALUES, k=rng.randrange(most))).strip()
