"""Page orders and missing pages on the wire: valid ones are parsed as sent, others raise a typed error."""

import re
from dataclasses import replace

import pytest
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.wire.fields import PlanError
from gpu_worker.wire.frames import parse_frame, read_plan
from tests.gpu_worker.plans import TinyCore, int32
from tests.gpu_worker.wire.test_frames import GEOMETRY, good_plan, moving_plan


def test_parsed_page_orders_equal_the_sent_ones() -> None:
    frame = pb.CoreToWorker(plan=moving_plan()).SerializeToString()
    orders = read_plan(parse_frame(frame).plan, GEOMETRY).page_orders
    assert (orders.saved_pages.tolist(), orders.saved_slots.tolist()) == ([6, 7], [7, 0])
    assert orders.zeroed.tolist() == [6, 7]
    assert (orders.copied_from.tolist(), orders.copied_to.tolist()) == ([9, 9], [10, 11])
    assert orders.copied_tokens.tolist() == [1, 16]
    assert (orders.loaded_pages.tolist(), orders.loaded_slots.tolist()) == ([6, 12], [3, 0])
    assert orders
    assert not read_plan(good_plan(), GEOMETRY).page_orders


@pytest.mark.parametrize(
    ("field", "values", "problem"),
    [
        ("saves.pages", [6, 0], "saves.pages contains 0; it must be 1 to 19"),
        ("saves.pages", [6, 20], "saves.pages contains 20; it must be 1 to 19"),
        ("saves.pages", [6], "saves.slots has 8 bytes; 1 entry needs 4"),
        ("saves.slots", [7, 8], "saves.slots contains 8; it must be 0 to 7"),
        ("saves.slots", [-1, 0], "saves.slots contains -1; it must be 0 to 7"),
        ("saves.slots", [3, 3], "saves.slots contains 3 twice"),
        ("loads.pages", [12, 12], "loads.pages contains 12 twice"),
        ("loads.pages", [12, 99], "loads.pages contains 99; it must be 1 to 19"),
        ("loads.pages", [12, 9], "page 9 is in copies.sources and in loads.pages"),
        ("loads.slots", [0], "loads.slots has 4 bytes; 2 entries need 8"),
        ("loads.slots", [0, 8], "loads.slots contains 8; it must be 0 to 7"),
        ("zero_pages", [20], "zero_pages contains 20; it must be 1 to 19"),
        ("zero_pages", [9], "page 9 is in copies.sources and in zero_pages"),
        ("copies.sources", [9, 0], "copies.sources contains 0; it must be 1 to 19"),
        ("copies.sources", [9, 10], "page 10 is in copies.sources and in copies.targets"),
        ("copies.sources", [9], "copies.targets has 8 bytes; 1 entry needs 4"),
        ("copies.targets", [11, 11], "copies.targets contains 11 twice"),
        ("copies.targets", [11, 20], "copies.targets contains 20; it must be 1 to 19"),
        ("copies.counts", [0, 16], "copies.counts contains 0; it must be 1 to 16"),
        ("copies.counts", [1, 17], "copies.counts contains 17; it must be 1 to 16"),
        ("copies.counts", [1], "copies.counts has 4 bytes; 2 entries need 8"),
    ],
)
def test_invalid_page_orders_are_refused_with_the_field(field: str, values: list[int], problem: str) -> None:
    message = moving_plan()
    *path, name = field.split(".")
    setattr(getattr(message, path[0]) if path else message, name, int32(values))
    with pytest.raises(PlanError, match=f"^{re.escape(problem)}$"):
        read_plan(message, GEOMETRY)


def test_saves_and_loads_need_host_memory() -> None:
    for field in ("saves", "loads"):
        message = pb.StepPlan()
        getattr(message, field).pages = int32([1])
        getattr(message, field).slots = int32([0])
        with pytest.raises(PlanError, match=rf"^{field} contains host pages; this worker has none \(host_pages 0\)"):
            read_plan(message, replace(GEOMETRY, host_pages=0))


@pytest.mark.parametrize(
    ("window", "sinks", "first_position", "pages", "wrong"),
    [
        # Position 60 sees 31 and on, or 29 and on, and the first page where there are sinks.
        (30, 0, 60, [0, 2, 3, 4], None),
        (32, 0, 60, [0, 2, 3, 4], None),
        (29, 0, 60, [0, 0, 3, 4], None),
        (30, 0, 60, [0, 0, 3, 4], 1),
        (29, 0, 60, [0, 0, 0, 4], 2),
        (29, 1, 60, [1, 0, 3, 4], None),
        (29, 16, 60, [1, 0, 3, 4], None),
        (29, 17, 60, [1, 0, 3, 4], 1),
        (29, 1, 60, [0, 0, 3, 4], 0),
        (29, 0, 60, [0, 0, 3, 0], 3),
        (29, 0, 59, [0, 0, 3, 4], 1),
        (1, 0, 0, [0, 2, 3, 4], 0),
        (1, 0, 48, [0, 0, 0, 4], None),
    ],
)
def test_only_pages_before_the_window_may_be_missing(
    window: int, sinks: int, first_position: int, pages: list[int], wrong: int | None
) -> None:
    geometry = replace(GEOMETRY, window=window, sink_tokens=sinks)
    core = TinyCore(geometry)
    core.add(2, [5], position=0)
    core.add(1, [1] * 61, shared=pages, position=first_position)
    message = core.plan(chunks={2: 1}, decode=[1] if first_position == 60 else [])
    if first_position != 60:
        message = core.plan(chunks={1: 16})
    if wrong is None:
        started = read_plan(message, geometry).started
        assert started is not None and pages in [part.tolist() for part in started.pages]
        return
    problem = f"started.pages holds 0 for page {wrong} of row 1, but position {first_position} sees it: the window "
    with pytest.raises(PlanError, match=f"^{problem}is {window}, sink_tokens {sinks}$"):
        read_plan(message, geometry)
