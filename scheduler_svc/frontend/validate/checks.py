"""Owns the checks that several fields share. Each refusal names the field, the number and the limit.

Knows nothing of what a request means. Every refusal is INVALID_ARGUMENT.
"""

import math
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from scheduler_svc.frontend.model import Model
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.sizes.limits import MAX_REQUEST_ID_CHARS


def check_token_ids(field: str, token_ids: Sequence[int], model: Model) -> None:
    """Refuses an empty list, and ids outside the vocabulary."""
    if not token_ids:
        raise status.invalid(field, f"{field} is empty; at least 1 token is needed")
    # 0.2 ms for a million ids, while max() would block the event loop for 35 ms.
    is_beyond = np.asarray(token_ids) >= model.info.vocab_size
    if is_beyond.any():
        idx = int(is_beyond.argmax())
        message = f"{field}[{idx}] is {token_ids[idx]}; the vocabulary has {model.info.vocab_size} tokens"
        raise status.invalid(f"{field}[{idx}]", message)


def check_request_id(field: str, request_id: str) -> None:
    """Refuses ids with more than 128 characters or with characters that are not printable."""
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        refuse(field, f"{len(request_id)} characters long", MAX_REQUEST_ID_CHARS)
    if not request_id.isprintable():
        idx = next(i for i, char in enumerate(request_id) if not char.isprintable())
        code = f"U+{ord(request_id[idx]):04X}"
        raise status.invalid(field, f"{field} has {code} at character {idx}; only printable characters are allowed")


def check_count(field: str, count: int, limit: int) -> None:
    """Refuses a list with more than `limit` entries."""
    if count > limit:
        refuse(field, f"{count} long", limit)


def check_range(field: str, value: float, low: float, high: float) -> None:
    """Refuses a value below `low`, above `high`, or NaN."""
    if math.isnan(value) or not low <= value <= high:
        raise status.invalid(
            field, f"{field} is {_as_given(value, low, high)}; it must be between {low:.7g} and {high}"
        )


def check_above_zero(field: str, value: float, high: float) -> None:
    """Refuses a value of 0 or less, above `high`, or NaN."""
    # The comparison is false for NaN.
    if not 0 < value <= high:
        raise status.invalid(field, f"{field} is {_as_given(value, 0, high)}; it must be above 0, and at most {high}")


def _as_given(value: float, low: float, high: float) -> str:
    """The value with 7 digits, as a float32 of 2.1 is 2.0999999046325684; in full if the short value is allowed."""
    if isinstance(value, int) or value.is_integer():
        return str(value)
    short = float(f"{value:.7g}")
    return str(value if low <= short <= high else short)


def refuse(field: str, number: object, limit: object) -> NoReturn:
    """Raises the Refusal of a number beyond a limit."""
    raise status.invalid(field, f"{field} is {number}; the limit is {limit}")
