"""Generated kernels, interpreted, against softmax in float64: for each visibility, in float32 and float16.

The error may be twice that of the same attention by torch in the same dtype, which is the rule of tests/gpu_worker too.
"""

from typing import Any

import pytest

from tests.kernels.processes import interpreted
from tests.kernels.table import Line

# Each with what differs from two heads of 64 dimensions for K and V, which two query heads share.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pages of 16": {},
    "group of 3, head dimension 48": {"head_dim": 48, "group": 3},
    "group of 7": {"group": 7},
    "window": {"window": 100},
    "window of one block": {"window": 64},
    "window, sink tokens": {"window": 90, "sink_tokens": 70},
    "window, sink tokens, pages of 16": {"window": 20, "sink_tokens": 7},
    "learned sinks": {"group": 4, "has_learned_sinks": True},
    "learned sinks, window": {"group": 4, "window": 100, "has_learned_sinks": True},
    "soft-capped": {"softcap": 2.0},
    "soft-capped, window, head dimension 256": {"head_dim": 256, "group": 1, "window": 100, "softcap": 2.0},
}
ERROR_RATIO = 2.0
# Errors that torch's own attention avoids by chance, for results of order 1.
ERROR_FLOOR = {"float32": 1e-6, "float16": 1.25e-3}
NAMES = [f"{kind}: {dtype}" for kind in KINDS for dtype in ERROR_FLOOR]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, list[Line]]:
    """The calls of each case that this run has selected."""
    selected = {item.callspec.params["name"] for item in request.session.items if "name" in _parameters(item)}
    by_case: dict[str, list[Line]] = {name: [] for name in sorted(selected)}
    for line in interpreted(list(by_case)):
        by_case[line["case"]].append(line)
    return by_case


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


@pytest.mark.parametrize("name", NAMES)
def test_results_are_those_of_softmax(name: str, results: dict[str, list[Line]]) -> None:
    calls = results[name]
    # Whole prompts, a second chunk beside decode rows, decode rows alone.
    assert [line["call"] for line in calls] == ["prefill", "decode", "prefill", "decode"]
    floor = ERROR_FLOOR[name.rsplit(": ", 1)[1]]
    for line in calls:
        assert line["error"] <= ERROR_RATIO * max(line["eager_error"], floor), line
    idle = [line for line in calls if line["call"] == "decode"]
    assert all(line["idle"] == 1 and line["largest_idle"] == 0.0 for line in idle)
