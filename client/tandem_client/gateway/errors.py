"""What the gateway answers instead of a completion: a status, an error in OpenAI's shape, and headers for retries.

Owns the translation of the client's exceptions to HTTP. Knows nothing of ASGI.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

from tandem_client import errors

INVALID_REQUEST = "invalid_request_error"
SERVER = "server_error"
UNKNOWN_FIELD = "unknown_parameter"
# A statement about the length of a prompt, in the service's words.
_TOO_LONG = re.compile(r"\b(tokens|characters)\b.*; the limit is \d", re.DOTALL)
_PROMPTS = ("prompt", "messages")

# Status, type and code by class; an error has those of its nearest one.
_KINDS: Mapping[type, tuple[int, str, str | None]] = {
    errors.MessageTooLarge: (413, INVALID_REQUEST, "request_too_large"),
    errors.InvalidArgument: (400, INVALID_REQUEST, None),
    errors.NotFound: (404, INVALID_REQUEST, "model_not_found"),
    errors.Unauthenticated: (401, "authentication_error", "invalid_api_key"),
    errors.PermissionDenied: (403, "permission_error", "permission_denied"),
    errors.AlreadyExists: (409, INVALID_REQUEST, "request_id_taken"),
    errors.Replaced: (409, INVALID_REQUEST, "replaced"),
    errors.RateLimited: (429, "rate_limit_error", "rate_limit_exceeded"),
    errors.QueueFull: (429, "rate_limit_error", "queue_full"),
    errors.Quarantined: (400, INVALID_REQUEST, "request_quarantined"),
    errors.Unavailable: (503, "service_unavailable_error", "service_unavailable"),
    errors.Cancelled: (503, "service_unavailable_error", "service_unavailable"),
    errors.DeadlineExceeded: (408, "timeout_error", "deadline_exceeded"),
}


@dataclass(eq=False)
class HttpError(Exception):
    status: int
    message: str
    _: KW_ONLY
    kind: str = INVALID_REQUEST
    # The name of the wrong field in OpenAI's API.
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def invalid(param: str, message: str, *, code: str | None = None) -> HttpError:
    """A field is wrong; the message names it, its value and what it must be."""
    return HttpError(400, message, param=param, code=code)


def unauthenticated(message: str) -> HttpError:
    """The caller has not proved its identity in a form that the gateway knows."""
    return from_service(errors.Unauthenticated(message))


def unavailable(message: str) -> HttpError:
    """The gateway or the service cannot serve now; the caller may try again after a second."""
    return from_service(errors.Unavailable(message, retry_after_seconds=1.0))


def from_service(error: errors.TandemError) -> HttpError:
    """The answer for an error of the service with a message that already names fields as OpenAI's API does."""
    unknown = (
        (501, SERVER, "not_implemented") if error.code.name == "UNIMPLEMENTED" else (500, SERVER, "internal_error")
    )
    status, kind, code = next((_KINDS[cls] for cls in type(error).__mro__ if cls in _KINDS), unknown)
    param, message = error.keyword, error.message
    if isinstance(error, errors.InvalidArgument) and param in _PROMPTS and _TOO_LONG.search(error.message):
        code = "context_length_exceeded"
        # Several programs recognize the error by these words.
        message = f"This model's maximum context length is exceeded: {message}"
    headers = dict[str, str]()
    if error.retry_after_seconds is not None:
        headers |= retry_after(error.retry_after_seconds)
    if error.stream_began or error.request_ended or isinstance(error, errors.Quarantined):
        # OpenAI's clients send such a request again by themselves otherwise, though it was accepted and has run.
        headers["x-should-retry"] = "false"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return HttpError(status, message, kind=kind, param=param, code=code, headers=headers)


def retry_after(seconds: float) -> dict[str, str]:
    """The headers of an error after which the caller may try again."""
    # OpenAI's clients read the exact time first; others read whole seconds.
    return {"retry-after": str(max(1, math.ceil(seconds))), "retry-after-ms": str(math.ceil(seconds * 1000))}
