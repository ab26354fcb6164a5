"""What the ring keeps of a core's events: everything that explains a death, bounded, without tokens unless asked."""

import json
import random
import tracemalloc
from collections import Counter
from dataclasses import fields, replace
from itertools import chain
from typing import Any

import numpy as np
import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.operators import Weights
from scheduler_svc.recording.flight_ring import EFFECTS, EVENTS, MAX_TEXT, MAX_TOKENS, NAMES, Ring, members
from tests.scheduler_svc.core.world import World

NOTHING: list[fx.Effect] = []


class Watched(World):
    """A core with events that go into a ring."""

    def __init__(self, *, keep_tokens: bool = False, num_steps: int = 4096) -> None:
        self.ring = Ring(keep_tokens=keep_tokens, num_steps=num_steps)
        super().__init__()

    def handle(self, event: ev.Event) -> list[fx.Effect]:
        effects = super().handle(event)
        self.ring.add(self.now, event, effects)
        return effects

    def kinds(self) -> Counter[str]:
        return Counter(entry["kind"] for entry in shown(self.ring))


def shown(ring: Ring) -> list[dict[str, Any]]:
    """The entries as a file has them."""
    return [json.loads(json.dumps(dict(members(entry)))) for entry in ring.entries()]


def rejected(code: fx.RejectCode = fx.RejectCode.QUEUE_FULL, field: str = "") -> list[fx.Effect]:
    return [fx.Rejected(frontend="f", stream=1, code=code, message="message", field=field)]


def submit(world: World) -> ev.Submit:
    world.submit([3, 4, 5])
    return next(event for _, event in reversed(world.log) if isinstance(event, ev.Submit))


def test_a_life_of_a_core_is_kept_in_order() -> None:
    world = Watched()
    world.submit([3, 4, 5, 6, 7], max_new_tokens=3, request_id="mine", num_samples=2)
    world.run()
    world.kill()
    entries = shown(world.ring)
    assert [entry["at"] for entry in entries] == sorted(entry["at"] for entry in entries)
    kinds = world.kinds()
    assert kinds["plan"] >= kinds["result"] >= 3 and kinds["end"] == 2
    assert {"frontend_joined", "worker_joined", "accepted", "submit", "worker_lost", "note"} <= set(kinds)
    [one] = [entry for entry in entries if entry["kind"] == "submit"]
    assert (one["request_id"], one["prompt_tokens"], one["samples"]) == ("mine", 5, 2)
    plans = [entry for entry in entries if entry["kind"] == "plan"]
    sent = [(plan.step, int(plan.chunk_counts.sum()), len(plan.decode_rows)) for plan in world.sent]
    assert [(entry["step"], entry["prefill_tokens"], entry["decode_rows"]) for entry in plans] == sent
    assert sum(entry["prefill_tokens"] for entry in plans) >= 5
    assert {entry["outcome"] for entry in entries if entry["kind"] == "end"} == {"length"}


def test_no_entry_has_tokens_unless_asked() -> None:
    world = Watched()
    world.submit(list(range(2, 12)), max_new_tokens=5)
    world.run()
    for entry in world.ring.entries():
        # The bytes are the sizes of a plan's chunks.
        assert all(isinstance(value, str | int | float | bool | bytes) for value in entry), entry
        assert not any(isinstance(value, list) for value in dict(members(entry)).values())
    asked = Watched(keep_tokens=True)
    asked.submit(list(range(2, 12)), max_new_tokens=5)
    asked.run()
    [prompt] = [entry for entry in shown(asked.ring) if entry["kind"] == "prompt"]
    outputs = [entry["token_ids"] for entry in shown(asked.ring) if entry["kind"] == "output"]
    assert prompt["token_ids"] == list(range(2, 12))
    assert list(chain.from_iterable(outputs)) == asked.streams[1].tokens


def test_asked_for_tokens_are_bounded() -> None:
    ring, event = Ring(keep_tokens=True), submit(World())
    long = ev.Submit(**{name: getattr(event, name) for name in event.__slots__} | {"prompt": np.zeros(10**6, np.int32)})
    ring.add(0.0, long, NOTHING)
    [entry] = [entry for entry in shown(ring) if entry["kind"] == "prompt"]
    assert len(entry["token_ids"]) == MAX_TOKENS


def test_a_flood_of_refusals_is_one_entry_and_pushes_out_nothing() -> None:
    ring, event = Ring(num_events=4), submit(World())
    ring.add(0.0, ev.FrontendJoined(frontend="f"), NOTHING)
    for idx in range(10_000):
        ring.add(float(idx), event, rejected())
    ring.add(10_000.0, event, rejected(fx.RejectCode.INVALID, "prompt"))
    ring.add(10_001.0, ev.Cancel(frontend="f", stream=1), NOTHING)
    joined, full, invalid, cancel = shown(ring)
    assert (joined["kind"], cancel["kind"]) == ("frontend_joined", "cancel")
    assert full == {"at": 0.0, "kind": "rejected", "code": "queue full", "field": "", "count": 10_000, "until": 9999.0}
    assert (invalid["field"], invalid["count"]) == ("prompt", 1)


def test_steps_push_out_steps_only_and_memory_is_bounded() -> None:
    draw, ring = random.Random(0), Ring(num_steps=512, num_events=256)
    ring.add(0.0, ev.WorkerJoined(worker="w", info=World().core.lanes["w-1"].info), NOTHING)
    done = ev.StepDone(
        worker="w-1-abcdefgh", generation=1, step=1, status=ev.StepStatus.FAILED, detail="x" * 10**6,
        tokens=np.zeros(256, np.int32), nonfinite=np.zeros(0, np.int32), compute_us=5,
    )  # fmt: skip
    tracemalloc.start()
    for _ in range(2000):
        ring.add(draw.random(), done, NOTHING)
    for idx in range(255):
        ring.add(0.0, ev.WorkerLost(worker=f"w-{idx}", reason="y" * 10**5), NOTHING)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1_000_000
    kinds = Counter(entry["kind"] for entry in shown(ring))
    assert kinds == {"worker_joined": 1, "result": 512, "worker_lost": 255}
    assert max(len(value) for entry in ring.entries() for value in entry if isinstance(value, str)) == MAX_TEXT


def test_every_kind_of_event_and_effect_has_names_for_its_values() -> None:
    ring, world = Ring(), World()
    info = world.core.lanes["w-1"].info
    event = submit(world)
    texts = {"frontend": "f", "worker": "w", "reason": "r", "message": "m", "request_id": "i", "error": ""}
    values: dict[str, Any] = {
        **texts, "stream": 1, "query": 1, "detach": False, "output_tokens": 1, "request_ids": (), "keys": (),
        "info": info, "seconds": 1.0, "max_seconds": 1.0, "limits": {}, "generation": 1, "retry": False,
        "secret_hash": b"", "submit": event, "outputs": (), "ends": (), "linger_seconds": 1.0, "description": b"",
        "weights": Weights(version="v", folder="/f"), "version": "v", "ok": True, "roots": (),
        "hash": bytes(32), "source": b"",
    }  # fmt: skip
    for kind in (*EVENTS, *EFFECTS):
        names = {each.name for each in fields(kind)} & values.keys()
        one = event if kind is ev.Submit else kind(**{name: values[name] for name in names})
        if kind in EVENTS:
            ring.add(0.0, one, NOTHING)
        else:
            ring.add(0.0, ev.Tick(), [one])
    assert len(shown(ring)) == len(EVENTS) + len(EFFECTS)
    assert {entry["kind"] for entry in shown(ring)} | {"plan", "result", "rejected", "end", "prompt", "output"} == set(
        NAMES
    )


@pytest.mark.parametrize(
    ("event", "effects", "deaths"),
    [
        (ev.WorkerLost(worker="w", reason="r"), NOTHING, ["worker w was lost"]),
        (ev.WorkerLost(worker="w", reason="r", is_orderly=True), NOTHING, []),
        (ev.FrontendLost(frontend="f"), NOTHING, ["front end f was lost"]),
        (ev.FrontendLost(frontend="f", is_orderly=True), NOTHING, []),
        (ev.Tick(), [fx.KillWorker(worker="w")], ["worker w hangs"]),
        (ev.Cancel(frontend="f", stream=1), NOTHING, []),
    ],
)
def test_deaths_are_found(event: ev.Event, effects: list[fx.Effect], deaths: list[str]) -> None:
    ring = Ring()
    ring.add(0.0, event, effects)
    assert ring.deaths == deaths


@pytest.mark.parametrize(("code", "count"), [(fx.FailureCode.INTERNAL, 1), (fx.FailureCode.DEADLINE, 0)])
def test_a_request_that_fails_by_the_services_fault_is_a_death(code: fx.FailureCode, count: int) -> None:
    world = Watched()
    world.submit([3, 4], max_new_tokens=2)
    world.run()
    [output] = [each for each in world.effects if isinstance(each, fx.StepOutput) and each.ends]
    failed = replace(output.ends[0], reason=None, failure=fx.Failure(code=code, message="m"))
    assert world.ring.deaths == []
    world.ring.add(1.0, ev.Tick(), [replace(output, ends=(failed,))])
    assert len(world.ring.deaths) == count
