"""What a request needs, on the wire: constraints as older programs have them, others by name, wrong ones refused."""

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from tandem.internal.v1 import frontend_pb2, worker_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.plan import RowStart
from scheduler_svc.core.messages.resources import CONSTRAINT, KINDS, Need, Resource
from scheduler_svc.wire.frontend import SUBMIT
from scheduler_svc.wire.worker import event_of, fill_needs, frame_of
from tandem_contract.bounds import WireError
from tandem_contract.codec import packed
from tests.rigs.resources import ADAPTER, adapters, resources_of

SOURCE = b"some bytes"
HASH = sha256(SOURCE).digest()
NONE = np.zeros(0, np.int32)
# Fields 9 and 10 of CoreToWorker, with fields 1 (hash) and 2 (source): as every scheduler has sent them.
OLD_PREPARE = b"\x4a\x2e" + b"\x0a\x20" + HASH + b"\x12\x0a" + SOURCE
OLD_DROP = b"\x52\x22" + b"\x0a\x20" + HASH
# Field 7 of WorkerToCore.
OLD_READY = b"\x3a\x22" + b"\x0a\x20" + HASH


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    with adapters():
        yield


def submitted(**wanted: object) -> frontend_pb2.Submit:
    plain = {"request_id": "r", "prompt": packed(np.array([1], np.int32)), "max_new_tokens": 1, "num_samples": 1}
    return frontend_pb2.Submit(**plain | wanted)  # type: ignore[arg-type]


def test_orders_and_answers_for_constraints_are_those_of_older_programs() -> None:
    assert frame_of(fx.PrepareResource(worker="w", hash=HASH, source=SOURCE)) == OLD_PREPARE
    assert frame_of(fx.DropResource(worker="w", hash=HASH)) == OLD_DROP
    ready = event_of(worker_pb2.WorkerToCore.FromString(OLD_READY), "w")
    assert ready == ev.ResourceReady(worker="w", hash=HASH, kind=CONSTRAINT)


def test_orders_and_answers_of_another_kind_name_it() -> None:
    prepare = frame_of(fx.PrepareResource(worker="w", hash=HASH, source=SOURCE, kind=ADAPTER))
    order = worker_pb2.CoreToWorker.FromString(prepare).prepare_constraint
    assert (order.kind, order.hash, order.source) == (ADAPTER, HASH, SOURCE)
    drop = frame_of(fx.DropResource(worker="w", hash=HASH, kind=ADAPTER))
    assert worker_pb2.CoreToWorker.FromString(drop).drop_constraint.kind == ADAPTER
    answer = worker_pb2.ConstraintReady(hash=HASH, kind=ADAPTER, error="no room")
    ready = event_of(worker_pb2.WorkerToCore(constraint_ready=answer), "w")
    assert ready == ev.ResourceReady(worker="w", hash=HASH, error="no room", kind=ADAPTER)


@pytest.mark.parametrize(
    "resources",
    [(), resources_of(SOURCE), resources_of(adapter=SOURCE), resources_of(SOURCE, SOURCE)],
    ids=["none", "constraint", "adapter", "both"],
)
def test_a_submit_keeps_its_resources_in_the_journal(resources: tuple[Resource, ...]) -> None:
    message = submitted()
    for one in resources:
        if one.kind == CONSTRAINT:
            message.constraint, message.constraint_hash = one.source, one.hash
        else:
            message.other_resources.add(kind=one.kind, hash=one.hash, source=one.source)
    submit = SUBMIT.decode(message, frontend="f")
    assert submit.resources == resources
    again = frontend_pb2.Submit.FromString(SUBMIT.to_message(submit).SerializeToString())
    assert SUBMIT.decode(again, frontend="f").resources == resources


def other(*changes: dict[str, Any]) -> dict[str, Any]:
    """Resources of another kind than a constraint, each with these changes."""
    plain = {"kind": ADAPTER, "hash": HASH, "source": SOURCE}
    return {"other_resources": [frontend_pb2.Resource(**plain | each) for each in changes]}


UNKNOWN = f"the kind of resource 'unheard of' is unknown; the known ones are {', '.join((*KINDS, ADAPTER))}"


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ({"constraint": b"x" * 65537, "constraint_hash": HASH}, "constraint has 65537 bytes; it must have 1 to 65536"),
        ({"constraint": SOURCE}, "constraint_hash has 0 bytes; it must have 32"),
        ({"constraint_hash": HASH}, "constraint has 0 bytes; it must have 1 to 65536"),
        (
            {"constraint": SOURCE, "constraint_hash": HASH, "min_new_tokens": 1},
            "min_new_tokens is 1; with a constraint it must be 0",
        ),
        (other({"source": b"x" * 101}), "adapter has 101 bytes; it must have 1 to 100"),
        (other({"hash": b"h"}), "adapter_hash has 1 byte; it must have 32"),
        (other({}, {}), "two resources of the request have the same kind; it may have one of each"),
        (other({"kind": "unheard of"}), UNKNOWN),
    ],
)
def test_a_submit_with_a_wrong_resource_is_refused(wanted: dict[str, object], error: str) -> None:
    with pytest.raises(WireError) as raised:
        SUBMIT.decode(submitted(**wanted), frontend="f")
    assert str(raised.value) == error


def test_an_answer_of_an_unknown_kind_is_refused() -> None:
    answer = worker_pb2.ConstraintReady(hash=HASH, kind="unheard of")
    with pytest.raises(WireError) as raised:
        event_of(worker_pb2.WorkerToCore(constraint_ready=answer), "w")
    assert str(raised.value) == UNKNOWN


def test_a_plan_names_the_other_needs_of_the_rows_that_it_starts() -> None:
    plain = RowStart(
        row=1, tokens=NONE, pages=NONE, first_position=0, num_prompt_tokens=0, sampling=b"", sample_idx=0,
        banned_until=0, banned=(), num_logprobs=0, prompt_logprobs_from=0,
    )  # fmt: skip
    both = replace(plain, row=2, constraint=HASH, other_needs=(Need(ADAPTER, HASH),))
    out = worker_pb2.StartedRows()
    fill_needs(out, [plain, both])
    assert out.constraints == bytes(32) + HASH
    assert [(need.start, need.kind, need.hash) for need in out.other_needs] == [(1, ADAPTER, HASH)]
    without = worker_pb2.StartedRows()
    fill_needs(without, [plain])
    assert without.SerializeToString() == b""
