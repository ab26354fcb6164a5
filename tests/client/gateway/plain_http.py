"""Requests without TLS: a context that reads this machine's authorities takes longer to make than a request."""

import ssl
from functools import partial

import httpx2 as httpx

_NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

get = partial(httpx.get, verify=_NO_AUTHORITIES)
head = partial(httpx.head, verify=_NO_AUTHORITIES)
post = partial(httpx.post, verify=_NO_AUTHORITIES)
stream = partial(httpx.stream, verify=_NO_AUTHORITIES)
