"""Owns who may read the page: everybody without a token file, otherwise callers with the right `metrics`.

The rules of gRPC callers (`frontend/door/entrance.py`): a bearer token, or a client's certificate if there is no token.
All failed proofs have the same answer. No token is logged.
"""

import time
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

from scheduler_svc.door.tenant import Right
from scheduler_svc.door.watch import TokenFile

_SCHEME = b"bearer "
# `tandem_` and 32 bytes in base64 are 50 characters.
_MAX_HEADER_BYTES = 512


def refusal(
    tokens: TokenFile | None, authorizations: Sequence[bytes], certificate: dict[str, Any] | None
) -> HTTPStatus | None:
    """Returns UNAUTHORIZED or FORBIDDEN, or None if the caller may read the page.

    `authorizations` are the values of the request's Authorization headers, `certificate` is the client's as the ssl
    module returns it, verified.
    """
    if tokens is None:
        return None
    if authorizations:
        token = _token(authorizations)
        caller = None if token is None else tokens.table.of_token(token, time.time())
    else:
        caller = tokens.table.of_certificate(_names(certificate or {}))
    if caller is None:
        return HTTPStatus.UNAUTHORIZED
    return None if Right.METRICS in caller.rights else HTTPStatus.FORBIDDEN


def _token(authorizations: Sequence[bytes]) -> bytes | None:
    value = authorizations[0]
    # One of several headers could be meant for a proxy, so none is believed.
    if len(authorizations) > 1 or len(value) > _MAX_HEADER_BYTES or value[: len(_SCHEME)].lower() != _SCHEME:
        return None
    return value[len(_SCHEME) :].strip()


def _names(certificate: dict[str, Any]) -> Iterable[str]:
    """Yields the alternative names, then the common name."""
    for kind, name in certificate.get("subjectAltName", ()):
        if kind in ("DNS", "URI"):
            yield name
    for pairs in certificate.get("subject", ()):
        yield from (value for name, value in pairs if name == "commonName")
