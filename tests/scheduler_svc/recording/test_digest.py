"""The digest of effects depends on every value and on no name of a class; version 5's is as old programs made it."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, make_dataclass, replace
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from tandem.internal.v1 import record_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.effects import Replaced
from scheduler_svc.core.messages.plan import Plan, TakeOver
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording import event_log
from scheduler_svc.recording.event_log import NAMES_OF_VERSION_5, TAGS, DigestOfVersion5, EffectsDigest
from scheduler_svc.recording.replay import replay
from tests.scheduler_svc.recording.test_event_log import Session

NONE = np.zeros(0, np.int32)
PLAN = Plan(
    generation=3, step=1, checksum=7, zero_pages=NONE, starts=(), append_rows=NONE, append_pages=NONE,
    chunk_rows=np.array([1], np.int32), chunk_starts=NONE, chunk_counts=NONE, chunk_samples=np.array([1], np.uint8),
    decode_rows=NONE, take_over=TakeOver(pool_id=b"pool", generation=2),
)  # fmt: skip
STATS = fx.Stats(
    prompt_tokens=1, output_tokens=2, discarded_tokens=0, recomputed_tokens=0, cached_prompt_tokens=0, preemptions=0,
    queue_seconds=0.25, prefill_seconds=0.5, first_token_seconds=0.0, decode_seconds=0.0, total_seconds=1e-9,
    worker_changes=1,
)  # fmt: skip
FAILURE = fx.Failure(code=fx.FailureCode.DEADLINE, message="m")
FAILED = fx.End(stream=1, reason=None, failure=FAILURE, stop_token_id=None, stats=STATS)
EFFECTS: list[fx.Effect] = [
    fx.Rejected(frontend="f", stream=1, code=fx.RejectCode.QUEUE_FULL, message="full", field=""),
    fx.SendPlan(worker="w", plan=PLAN),
    fx.StepOutput(
        frontend="f", streams=np.array([2**63], np.uint64), offsets=NONE, tokens=NONE, logprobs=None,
        prompt_logprobs=(), ends=(FAILED, replace(FAILED, failure=None, reason=fx.EndReason.EOS)),
    ),
    fx.AbortReply(frontend="f", query=4, outcomes=(("r", True), ("s", False))),
]  # fmt: skip


def value(*effects: Any, made_by: type[EffectsDigest] = EffectsDigest) -> int:
    made = made_by()
    made.add(list(effects))
    return made.value()


def test_each_effect_has_one_tag_of_its_own() -> None:
    assert set(TAGS) == set(get_args(fx.Effect))
    assert len(set(TAGS.values())) == len(TAGS)


def test_other_names_of_classes_and_enums_give_the_same_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    class Code(StrEnum):
        TOO_MANY = "queue full"

    refused = make_dataclass("Refused", [field.name for field in fields(fx.Rejected)])
    monkeypatch.setattr(event_log, "TAGS", TAGS | {refused: TAGS[fx.Rejected]})
    assert value(refused("f", 1, Code.TOO_MANY, "full", "", 0.0, False)) == value(EFFECTS[0])
    pool = make_dataclass("Pool", ["id", "newest"])
    moved: Any = replace(PLAN, take_over=pool(b"pool", 2))
    assert value(fx.SendPlan(worker="w", plan=moved)) == value(EFFECTS[1])


def test_a_later_field_counts_only_where_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = make_dataclass("PrepareConstraint", ["worker", "hash", "source"])
    monkeypatch.setattr(event_log, "TAGS", TAGS | {earlier: TAGS[fx.PrepareResource]})
    order = fx.PrepareResource(worker="w", hash=b"h", source=b"s")
    same = earlier("w", b"h", b"s")
    assert value(order) == value(same)
    assert value(order, made_by=DigestOfVersion5) == value(same, made_by=DigestOfVersion5)
    assert value(replace(order, kind="adapter")) != value(order)


def variants(value: Any) -> Iterator[Any]:
    """Copies of a value, each with another value in one place."""
    match value:
        case np.ndarray():
            yield np.append(value, value.dtype.type(9))
        case tuple():
            yield (*value, "more")
            for i, item in enumerate(value):
                yield from ((*value[:i], other, *value[i + 1 :]) for other in variants(item))
        case Enum():
            yield from (other for other in type(value) if other is not value)
        case str() | bytes():
            yield value + value[:1] + type(value)(1)
        case None:
            yield "something"
        case int() | float():
            yield value + 1
        case _:
            for field in fields(value):
                for other in variants(getattr(value, field.name)):
                    yield replace(value, **{field.name: other})


def test_every_value_counts_and_the_order_of_effects() -> None:
    others = [[*EFFECTS[:i], other, *EFFECTS[i + 1 :]] for i in range(len(EFFECTS)) for other in variants(EFFECTS[i])]
    assert len(others) > 80
    assert len({value(*effects) for effects in (EFFECTS, EFFECTS[::-1], *others)}) == len(others) + 2


def test_effects_of_equal_fields_differ() -> None:
    kinds = fx.AskRejoin, fx.DismissWorker, fx.KillWorker
    assert len({value(kind(worker="w")) for kind in kinds}) == len(kinds)
    assert value(Replaced(frontend="f", stream=1)) != value(fx.Admitted(frontend="f", stream=1, requests_ahead=0))


def test_a_number_counts_as_itself_whether_python_or_numpy_holds_it() -> None:
    reply, other = (fx.FlushReply(frontend="f", query=1, pages=pages) for pages in (7, np.int64(7)))
    assert value(reply) == value(other)  # type: ignore[arg-type]


# Version 5 ------------------------------------------------------------------------------------------------------------


def test_the_digest_of_version_5_is_the_one_that_old_programs_made() -> None:
    """The number was computed by the last program that wrote version 5."""
    assert value(*EFFECTS, made_by=DigestOfVersion5) == 0x87E79C7B34F809F


def _classes(hint: Any) -> set[type]:
    """The dataclasses and enums that a value of this type may contain."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {hint}
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint)
        return {hint}.union(*(_classes(hints[field.name]) for field in fields(hint)))
    return set[type]().union(*(_classes(one) for one in get_args(hint)))


NAMES = """
    AbortReply Admitted AnnounceDrain AskRejoin CoreStatus Detached DismissWorker DrainRefused DrainReport
    DrainState DropConstraint End EndReason Failure FailureCode FlushReply Forgotten GenerationDefaults
    HeldPoolsLoad Incidents KillWorker Load LoadReply LoadWeights Logprobs ModelServed Note PageLabels PageMoves
    Plan PrepareConstraint PromptLogprobs QuarantineEntry QuarantineReply RejectCode Rejected Replaced RequestEntry
    RequestsMark RequestsReply RequestState ResetCause
    Resumed RowStart SendPlan Stats StepKind StepOutput StepReport TakeOver TokenLogprobs UpdateRefused UpdateState
    Wait WaitReason Waits Weights WeightsChanged WeightsReport WeightsSpan WorkerAccepted WorkerInfo WorkerLoad
    WorkerProven WorkerRefused WorkerState
"""


def test_renamed_classes_keep_their_names_of_version_5() -> None:
    names = {NAMES_OF_VERSION_5.get(one, one.__name__) for one in _classes(fx.Effect)}
    assert names == set(NAMES.split())


def as_version_5(log: Path, path: Path) -> None:
    """Writes a log of today as version 5 has it."""
    config, _, entries = event_log.read(log)
    core, digest_of_5 = Scheduler(config), DigestOfVersion5()
    frames = [record_pb2.RecordedHeader(version=5, core_config=event_log.encode_config(config)).SerializeToString()]
    for entry in entries:
        entry.effects_digest = digest_of_5.value()
        frames.append(entry.SerializeToString())
        if entry.WhichOneof("event") is not None:
            digest_of_5.add(core.handle(event_log.event_of(entry), entry.now))
    path.write_bytes(b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames))


def test_a_log_of_version_5_is_replayed_and_converted_and_other_effects_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    today, old, new = (tmp_path / name for name in ("today", "old", "new"))
    Session(today).run(1)
    as_version_5(today, old)
    assert replay(old, converted=new) == replay(new) > 40
    assert new.read_bytes() == today.read_bytes()
    with pytest.raises(FileExistsError):
        replay(old, converted=new)
    monkeypatch.setitem(NAMES_OF_VERSION_5, fx.SendPlan, "Plan")
    with pytest.raises(SystemExit, match="the effects differ"):
        replay(old)
