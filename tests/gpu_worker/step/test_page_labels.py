"""Which labels a worker has of its pages, and that a session that keeps them leaves their content as it is."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.geometry import Geometry
from gpu_worker.step.page_labels import PageLabels
from gpu_worker.wire.frames import Plan
from gpu_worker.wire.page_orders import PageOrders
from tests.gpu_worker.rig import Rig, RigSpec
from tests.gpu_worker.rig_specs import SPECS

ROOT = b"r" * 16


@pytest.fixture
def rig(rig_of: Callable[[RigSpec], Rig]) -> Iterator[Rig]:
    rig = rig_of(next(spec for spec in SPECS if spec.dtype == torch.float32 and spec.page_size < 128))
    yield rig
    rig.forget()


def labels_of(geometry: Geometry, pages: list[int], *, forget: bool = False) -> pb.PageLabels:
    return pb.PageLabels(
        forget=forget,
        pages=np.array(pages, "<i4").tobytes(),
        hashes=b"".join(bytes([page]) * 32 for page in pages),
        tokens=b"".join(bytes([page]) * 4 * geometry.page_size for page in pages),
    )


def reported(rig: Rig) -> list[int]:
    join = pb.Join()
    rig.runner.report_pages(join)
    return np.frombuffer(join.kept.labels.pages, "<i4").tolist()


def begun(rig: Rig, **flags: bool) -> None:
    rig.runner.join(pb.Joined(generation=rig.core().generation, page_root=ROOT, **flags))


def labelled(rig: Rig, pages: list[int], **flags: bool) -> None:
    """A step with labels; it computes a prompt on the core's first pages."""
    core = rig.core()
    core.add(1, rig.prompt(20, seed=3))
    plan = core.plan(chunks={1: 20})
    plan.labels.CopyFrom(labels_of(rig.runner.geometry, pages, **flags))
    assert rig.submit(plan).status == pb.STEP_STATUS_OK


def test_a_session_that_keeps_pages_leaves_the_pool_as_it_is(rig: Rig) -> None:
    begun(rig)
    labelled(rig, [7, 9])
    before = [pool.clone() for pool in rig.pools]
    assert any(pool.any() for pool in before)
    begun(rig, keeps_pages=True)
    assert all(map(torch.equal, before, rig.pools))
    assert reported(rig) == [7, 9]


def test_a_session_that_keeps_no_page_zeroes_the_pool_and_forgets(rig: Rig) -> None:
    begun(rig)
    labelled(rig, [7, 9])
    begun(rig)
    assert not any(pool.any() for pool in rig.pools)
    assert reported(rig) == []


def test_a_page_that_a_row_gets_loses_its_label_in_the_same_plan(rig: Rig) -> None:
    begun(rig)
    core = rig.core()
    core.add(1, rig.prompt(20, seed=3))
    own = core.plan(chunks={1: 20})
    first = int(np.frombuffer(own.started.pages, "<i4")[0])
    own.labels.CopyFrom(labels_of(rig.runner.geometry, [first, first + 20]))
    assert rig.submit(own).status == pb.STEP_STATUS_OK
    assert reported(rig) == [first + 20]


def test_forget_drops_earlier_labels_only(rig: Rig) -> None:
    begun(rig)
    labelled(rig, [7, 9])
    labelled(rig, [8], forget=True)
    assert reported(rig) == [8]


def test_a_worker_reports_nothing_without_a_root(rig: Rig) -> None:
    rig.forget()
    labelled(rig, [7, 9])
    assert reported(rig) == []


@pytest.mark.parametrize("field", ["appended", "zeroed", "copied_to", "loaded_pages"])
def test_any_change_of_a_page_ends_its_label(rig: Rig, field: str) -> None:
    geometry = rig.runner.geometry
    labels = PageLabels(geometry)
    labels.begin_session(pb.Joined(page_root=ROOT))
    quiet = Plan(generation=1, step=1, checksum=0)
    labels.follow(labels_of(geometry, [3, 4, 5]), quiet)
    page = np.array([4], np.int64)
    if field == "appended":
        plan = Plan(generation=1, step=2, checksum=0, append_rows=np.ones(1, np.int32), append_pages=page)
    else:
        plan = Plan(generation=1, step=2, checksum=0, page_orders=PageOrders(**{field: page}))
    labels.follow(pb.PageLabels(), plan)
    join = pb.Join()
    labels.report(join, 5)
    assert np.frombuffer(join.kept.labels.pages, "<i4").tolist() == [3, 5]
    assert (join.kept.page_root, join.kept.generation) == (ROOT, 5)
    assert join.kept.labels.hashes == bytes([3]) * 32 + bytes([5]) * 32


@pytest.mark.parametrize("field", ["hashes", "tokens"])
def test_labels_of_a_wrong_length_fail_the_step(rig: Rig, field: str) -> None:
    begun(rig)
    core = rig.core()
    core.add(1, rig.prompt(20, seed=3))
    plan = core.plan(chunks={1: 20})
    plan.labels.CopyFrom(labels_of(rig.runner.geometry, [7]))
    setattr(plan.labels, field, b"123")
    outcome = rig.submit(plan)
    assert outcome.status == pb.STEP_STATUS_FAILED
    assert f"labels.{field} has 3 bytes; 1 page needs" in outcome.detail
