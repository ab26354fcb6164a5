"""Which values of `traceparent` are believed; the cases of W3C Trace Context, level 1."""

import pytest

from scheduler_svc.frontend.request_log import find_traceparent

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{PARENT}-01"


def found(value: str) -> str | None:
    return find_traceparent([("traceparent", value)])


def test_a_valid_traceparent_is_read_and_passed_on() -> None:
    assert found(VALID) == VALID
    assert found(f"00-{TRACE}-{PARENT}-fe") == f"00-{TRACE}-{PARENT}-00"


@pytest.mark.parametrize("more", ["", "-", "-what-the-future-holds"])
def test_a_later_version_is_passed_on_as_version_00(more: str) -> None:
    assert found(f"cc-{TRACE}-{PARENT}-01{more}") == VALID


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}-01-",
        f"cc-{TRACE}-{PARENT}-01.more",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE}-{PARENT}-0x",
        f"00-{TRACE}-{PARENT}-01\n",
        f" {VALID}",
        f"{VALID}, {VALID}",
        f"00-{'٣' * 32}-{PARENT}-01",
        f"cc-{TRACE}-{PARENT}-01-{'x' * 1000}",
    ],
)
def test_a_malformed_traceparent_is_ignored(value: str) -> None:
    assert found(value) is None


def test_only_a_single_header_is_believed() -> None:
    assert find_traceparent([("other", "x"), ("traceparent", VALID)]) == VALID
    assert find_traceparent([("traceparent", VALID), ("traceparent", VALID)]) is None
    assert find_traceparent([("traceparent", VALID.encode())]) is None
    assert find_traceparent([("tracestate", VALID)]) is None
