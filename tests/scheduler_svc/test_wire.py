"""Hostile bytes on the core's sockets: a typed error or a sound event, never anything else."""

import random

import numpy as np
import pytest
from tandem.internal.v1 import frontend_pb2, worker_pb2

from scheduler_svc import frontend_wire, worker_wire
from scheduler_svc.core import effects as fx
from scheduler_svc.core import events as ev
from scheduler_svc.core.scheduler import CoreConfig, Scheduler
from scheduler_svc.wire import WireError, array, packed

JOIN = worker_pb2.Join(
    protocol=2, identity="i", model="m", vocab_size=100, page_size=4, num_pages=9, max_rows=3, max_length=32,
    token_budget=12, chunk_align=2, logit_rows=8, eos_token_ids=[0],
)  # fmt: skip


def mutated(frame: bytes, draw: random.Random) -> bytes:
    data = bytearray(frame)
    for _ in range(draw.randint(1, 4)):
        what = draw.randrange(4)
        at = draw.randrange(len(data) + 1) if data else 0
        if what == 0 and data:
            data[at - 1] = draw.randrange(256)
        elif what == 1:
            data[at:at] = bytes(draw.randrange(256) for _ in range(draw.randint(1, 8)))
        elif what == 2:
            del data[at : at + draw.randint(1, 8)]
        elif data:
            data = data + data[:at]
    return bytes(data)


def sound_frames() -> tuple[list[bytes], list[bytes]]:
    workers = [
        worker_pb2.WorkerToCore(join=JOIN),
        worker_pb2.WorkerToCore(heartbeat=worker_pb2.Heartbeat(phase="ready")),
        worker_pb2.WorkerToCore(
            result=worker_pb2.StepResult(generation=1, step=1, status=worker_pb2.STEP_STATUS_OK, tokens=b"\1\0\0\0")
        ),
        worker_pb2.WorkerToCore(leave=worker_pb2.Leave()),
    ]
    submit = frontend_pb2.Submit(
        stream=1,
        request_id="r",
        prompt=b"\1\0\0\0\2\0\0\0",
        max_new_tokens=3,
        top_p=1.0,
        num_samples=1,
        repetition_penalty=1.0,
    )
    frontends = [
        frontend_pb2.FrontendToCore(hello=frontend_pb2.Hello()),
        frontend_pb2.FrontendToCore(submit=submit),
        frontend_pb2.FrontendToCore(cancel=frontend_pb2.Cancel(stream=1)),
        frontend_pb2.FrontendToCore(finish=frontend_pb2.Finish(stream=1, output_tokens=1)),
        frontend_pb2.FrontendToCore(abort=frontend_pb2.Abort(query=1, request_ids=["r"])),
        frontend_pb2.FrontendToCore(load_query=frontend_pb2.LoadQuery(query=1)),
    ]
    return [m.SerializeToString() for m in workers], [m.SerializeToString() for m in frontends]


@pytest.mark.parametrize("seed", range(4))
def test_mutated_frames_never_break_the_core(seed: int) -> None:
    """5,000 frames a seed, each handed to a living core wherever it parses."""
    draw = random.Random(seed)
    workers, frontends = sound_frames()
    core, refused = Scheduler(CoreConfig(max_waiting=50)), 0
    for i in range(5000):
        worker = draw.random() < 0.5
        frame = draw.choice(workers if worker else frontends)
        if i > 3 and draw.random() < 0.9:
            frame = mutated(frame, draw)
        try:
            if worker:
                event = worker_wire.event_of(worker_wire.parse(frame), "w")
            else:
                event = frontend_wire.event_of(frontend_wire.parse(frame), "f")
        except WireError:
            refused += 1
            continue
        for effect in core.handle(event, float(i)):
            if isinstance(effect, fx.SendPlan):
                worker_wire.plan_frame(effect.plan)
        for effect in core.handle(ev.Tick(), float(i)):
            if isinstance(effect, fx.SendPlan):
                worker_wire.plan_frame(effect.plan)
    assert refused > 500


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("protocol", 1, "it speaks protocol 1; this scheduler speaks 2"),
        ("vocab_size", 0, "vocab_size is 0; it must be 1 to 16777216"),
        ("num_pages", 1, "num_pages is 1; it must be 2 to 1048576"),
        ("token_budget", 4, "token_budget is 4; it must be 5 to 16777216"),
        ("logit_rows", 4, "logit_rows is 4; it must be 5 to 16777216"),
        ("max_rows", 0, "max_rows is 0"),
        ("max_length", 1, "max_length is 1"),
        ("page_size", 0, "page_size is 0"),
        ("identity", "", "identity has 0 characters; it must have 1 to 512"),
        ("model", "m" * 513, "model has 513 characters"),
    ],
)
def test_a_join_out_of_bounds_is_told_which_and_why(field: str, value: object, sentence: str) -> None:
    join = worker_pb2.Join.FromString(JOIN.SerializeToString())
    setattr(join, field, value)
    with pytest.raises(WireError, match=sentence):
        worker_wire.event_of(worker_pb2.WorkerToCore(join=join), "w")


@pytest.mark.parametrize("token", [100, 2**32 - 1])
def test_an_end_token_outside_the_vocabulary_is_refused(token: int) -> None:
    join = worker_pb2.Join.FromString(JOIN.SerializeToString())
    join.eos_token_ids.append(token)
    with pytest.raises(WireError, match=f"eos_token_ids has {token}; the vocabulary has 100 tokens"):
        worker_wire.event_of(worker_pb2.WorkerToCore(join=join), "w")


def test_arrays_keep_their_values_over_the_wire() -> None:
    values = np.array([1, -2, 2**31 - 1], np.int32)
    assert array(packed(values), np.int32, "x").tolist() == values.tolist()
    with pytest.raises(WireError, match="x has 5 bytes, no multiple of 4"):
        array(b"12345", np.int32, "x")
