"""Hostile bytes on the core's sockets: a typed error or a sound event, never anything else."""

import random
from typing import Any

import numpy as np
import pytest
from tandem.internal.v1 import frontend_pb2, worker_pb2
from tandem.v1 import inference_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.effects import WeightsSpan
from scheduler_svc.core.messages.events import MAX_SAMPLING_BYTES
from scheduler_svc.core.messages.reports import HeldPoolsLoad, Incidents, Load
from scheduler_svc.core.scheduler import CoreConfig, Scheduler
from scheduler_svc.shell.dispatch import ServedModel
from scheduler_svc.wire import frontend as frontend_wire
from scheduler_svc.wire import worker as worker_wire
from tandem_contract.bounds import WireError
from tandem_contract.codec import array, packed, parsed

JOIN = worker_pb2.Join(
    protocol=9, identity="i", model="m", vocab_size=100, page_size=4, num_pages=9, max_rows=3, max_length=32,
    token_budget=12, chunk_align=2, logit_rows=8, eos_token_ids=[0], max_frame_bytes=64 << 20,
)  # fmt: skip


def a_join(**changes: Any) -> worker_pb2.Join:
    """JOIN with these fields instead."""
    join = worker_pb2.Join.FromString(JOIN.SerializeToString())
    for name in changes:
        join.ClearField(name)  # type: ignore[arg-type]
    join.MergeFrom(worker_pb2.Join(**changes))
    return join


def joined(join: worker_pb2.Join = JOIN) -> ev.WorkerJoined:
    event = worker_wire.event_of(worker_pb2.WorkerToCore(join=join), "w")
    assert isinstance(event, ev.WorkerJoined)
    return event


TOLD = worker_pb2.StepResult(
    generation=1, step=1, status=worker_pb2.STEP_STATUS_OK, tokens=b"\1\0\0\0",
    logprobs=worker_pb2.Logprobs(
        logprobs=b"\0\0\0\xc0", top_k=1, top_token_ids=b"\5\0\0\0", top_logprobs=b"\0\0\x80\xbf"
    ),
    prompt_logprobs=worker_pb2.Logprobs(logprobs=b"\0\0\0\xc0"),
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
        worker_pb2.WorkerToCore(result=TOLD),
        worker_pb2.WorkerToCore(leave=worker_pb2.Leave()),
    ]
    prompt = b"\1\0\0\0\2\0\0\0"
    featured = {"sampling": b"sampling", "num_logprobs": 2, "prompt_logprobs_from": 1, "num_samples": 2}
    sharing = {"prefix_root": bytes(32), "page_hashes": bytes(2 * 32), "bypass_write": True}
    frontends = [
        a_submit(stream=19, request_id="s", prompt=bytes(4 * 9), **sharing),
        frontend_pb2.FrontendToCore(flush_cache=frontend_pb2.FlushCache(query=2)),
        a_submit(stream=9, request_id="f", prompt=prompt, **featured),
        frontend_pb2.FrontendToCore(hello=frontend_pb2.Hello()),
        a_submit(prompt=prompt),
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
                event = worker_wire.event_of(parsed(worker_pb2.WorkerToCore, frame), "w")
            else:
                event = frontend_wire.event_of(parsed(frontend_pb2.FrontendToCore, frame), "f")
        except WireError:
            refused += 1
            continue
        for effect in [*core.handle(event, float(i)), *core.handle(ev.Tick(), float(i))]:
            if isinstance(effect, fx.SendPlan):
                worker_wire.plan_frame(effect.plan)
    assert refused > 500


def test_a_heartbeat_says_which_plan_was_answered_last() -> None:
    beat = worker_pb2.Heartbeat(phase="stepping", num_in_flight=2, generation=3, last_step=7)
    event = worker_wire.event_of(worker_pb2.WorkerToCore(heartbeat=beat), "w")
    assert event == ev.WorkerAlive(worker="w", num_in_flight=2, done=(3, 7))


def test_no_message_between_hosts_has_the_time_of_a_clock() -> None:
    """Clocks of two hosts differ, so messages have durations only."""
    named = [
        f"{message.name}.{field.name}"
        for message in worker_pb2.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
        if field.name.endswith(("_at", "_time", "time", "_until", "deadline", "timestamp"))
    ]
    # A number of tokens.
    assert named == ["StartedRows.banned_until"]


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("protocol", 1, "it speaks protocol 1; this scheduler speaks 9"),
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
def test_the_refusal_of_a_join_names_the_field_and_the_limit(field: str, value: object, sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        joined(a_join(**{field: value}))


@pytest.mark.parametrize("token", [100, 2**32 - 1])
def test_an_end_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(WireError, match=f"eos_token_ids contains {token}; the vocabulary has 100 tokens"):
        joined(a_join(eos_token_ids=[token]))


# What few ask for -------------------------------------------------------------------------------------------------


def a_submit(**fields: object) -> frontend_pb2.FrontendToCore:
    plain = {"stream": 1, "request_id": "r", "prompt": b"\1\0\0\0", "max_new_tokens": 3, "num_samples": 1}
    return frontend_pb2.FrontendToCore(submit=frontend_pb2.Submit(**plain | fields))  # type: ignore[arg-type]


def submitted(**fields: object) -> ev.Submit:
    event = frontend_wire.event_of(a_submit(**fields), "f")
    assert isinstance(event, ev.Submit)
    return event


def test_a_submit_without_options_is_one_sample_without_logprobs() -> None:
    event = submitted()
    assert (event.num_samples, event.num_logprobs, event.prompt_logprobs_from) == (1, 0, 0)
    assert list(event.streams) == [1]


def test_the_sampling_fields_of_a_submit_round_trip() -> None:
    # The core only checks that the bytes can be parsed. One byte for each id, a tag and three bytes of length.
    num_overhead = len(inference_pb2.SamplingParams(banned_token_ids=[0] * 50_000).SerializeToString()) - 50_000
    ids = [0] * (MAX_SAMPLING_BYTES - num_overhead)
    sampling = inference_pb2.SamplingParams(banned_token_ids=ids).SerializeToString()
    assert len(sampling) == MAX_SAMPLING_BYTES
    event = submitted(stream=2**64 - 3, sampling=sampling, num_samples=3, num_logprobs=21, prompt_logprobs_from=5)
    assert event.sampling == sampling
    assert (event.num_logprobs, event.num_samples, event.prompt_logprobs_from) == (21, 3, 5)
    assert event.streams[-1] == 2**64 - 1


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_samples": 0}, "num_samples is 0"),
        ({"num_samples": 1025}, "num_samples is 1025"),
        ({"stream": 2**64 - 1, "num_samples": 2}, f"the last stream is {2**64}; it must be 0 to {2**64 - 1}"),
        ({"sampling": bytes(98305)}, "sampling has 98305 bytes; the limit is 98304"),
        ({"num_logprobs": 22}, "num_logprobs is 22; it must be 0 to 21"),
        ({"prompt_logprobs_from": 1 << 30}, "prompt_logprobs_from is 1073741824"),
        ({"prefix_root": bytes(31)}, "prefix_root has 31 bytes; it must have none or 32"),
        ({"prefix_root": bytes(33)}, "prefix_root has 33 bytes"),
        ({"prefix_root": bytes(32), "page_hashes": bytes(31)}, "page_hashes has 31 bytes, which is not a"),
        ({"prefix_root": bytes(32), "page_hashes": bytes(64)}, "page_hashes has 2 hashes; the limit is 1"),
        ({"page_hashes": bytes(32)}, "page_hashes has 1 hashes; the limit is 0"),
    ],
)
def test_a_submit_with_an_invalid_field_is_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        submitted(**fields)


def test_the_hashes_and_bypasses_of_a_submit_round_trip() -> None:
    plain = submitted()
    assert (plain.prefix_root, plain.page_hashes, plain.cache_read, plain.cache_write) == (b"", b"", True, True)
    named = {"prefix_root": b"r" * 32, "page_hashes": b"h" * 32}
    for read, write in [(True, False), (False, True)]:
        event = submitted(**named, bypass_read=not read, bypass_write=not write)
        assert (event.prefix_root, event.page_hashes) == (b"r" * 32, b"h" * 32)
        assert (event.cache_read, event.cache_write) == (read, write)


def plan_of(*submits: ev.Submit) -> worker_pb2.StartedRows:
    core = Scheduler(CoreConfig())
    core.handle(ev.FrontendJoined(frontend="f"), 0.0)
    core.handle(joined(), 0.0)
    for submit in submits:
        [admitted] = core.handle(submit, 0.0)
        assert isinstance(admitted, fx.Admitted)
    [plan, *_] = [effect.plan for effect in core.handle(ev.Tick(), 0.0) if isinstance(effect, fx.SendPlan)]
    return worker_pb2.CoreToWorker.FromString(worker_wire.plan_frame(plan)).plan.started


def test_started_rows_contain_the_sampling_bytes_of_their_requests() -> None:
    asked = [
        inference_pb2.SamplingParams(seed=1).SerializeToString(),
        b"",
        inference_pb2.SamplingParams(seed=1, top_p=0.5).SerializeToString(),
    ]
    started = plan_of(*(submitted(stream=i + 1, request_id=f"r{i}", sampling=own) for i, own in enumerate(asked)))
    assert started.sampling == b"".join(asked)
    assert array(started.num_sampling_bytes, np.int32, "x").tolist() == [len(own) for own in asked]
    assert array(started.num_prompt_tokens, np.int32, "x").tolist() == [1, 1, 1]
    assert (started.num_logprobs, started.prompt_logprobs_from) == (b"", b"")


# Fields that are empty if no row asks for them.
RARE = ("num_logprobs", "prompt_logprobs_from")


@pytest.mark.parametrize("name", RARE)
def test_a_field_that_one_row_uses_has_a_value_for_every_row(name: str) -> None:
    asking = submitted(stream=2, request_id="s", prompt=bytes(8), **{name: 1})
    started = plan_of(submitted(), asking, submitted(stream=3, request_id="t"))
    values = {field: array(getattr(started, field), np.int32, field).tolist() for field in RARE}
    assert values == {field: [0, 1, 0] if field == name else [] for field in RARE}


def test_the_logprobs_of_results_and_outputs_round_trip() -> None:
    event = worker_wire.event_of(worker_pb2.WorkerToCore(result=TOLD), "w")
    assert isinstance(event, ev.StepDone)
    told = event.logprobs
    assert (told.logprobs.tolist(), told.top_k) == ([-2.0], 1)
    assert (told.top_token_ids.tolist(), told.top_logprobs.tolist()) == ([5], [-1.0])
    assert (event.prompt_logprobs.logprobs.tolist(), event.prompt_logprobs.top_k) == ([-2.0], 0)
    values = fx.Logprobs(
        logprobs=np.array([-1.0, -2.0], np.float32),
        top_token_ids=np.array([[1, 2, 3], [4, 5, 6]], np.int32),
        top_logprobs=np.array([[-1, -2, -3], [-4, -5, -6]], np.float32),
    )
    one = fx.Logprobs(
        logprobs=values.logprobs, top_token_ids=values.top_token_ids[:, :1], top_logprobs=values.top_logprobs[:, :1]
    )
    zeros = np.zeros(2, np.int32)
    output = fx.StepOutput(
        frontend="f", streams=np.array([1, 2], np.uint64), offsets=zeros, tokens=zeros, ends=(),
        logprobs=fx.TokenLogprobs(entries=np.array([0, 1], np.int32), values=values),
        prompt_logprobs=(fx.PromptLogprobs(frontend="f", stream=2**64 - 1, start=4, values=one),),
    )  # fmt: skip
    message = frontend_pb2.CoreToFrontend.FromString(frontend_wire.frame_of(output)).step_output
    assert array(message.logprobs.entries, np.int32, "x").tolist() == [0, 1]
    assert message.logprobs.top_k == 3
    assert array(message.logprobs.top_token_ids, np.int32, "x").tolist() == [1, 2, 3, 4, 5, 6]
    assert array(message.logprobs.top_logprobs, np.float32, "x").tolist() == [-1, -2, -3, -4, -5, -6]
    [piece] = message.prompt_logprobs
    assert (piece.stream, piece.start, piece.top_k) == (2**64 - 1, 4, 1)
    # Of a table with three columns only the first.
    assert array(piece.top_token_ids, np.int32, "x").tolist() == [1, 4]
    assert array(piece.logprobs, np.float32, "x").tolist() == [-1.0, -2.0]


def test_model_info_contains_the_limits_of_one_request() -> None:
    join = a_join()
    join.defaults.repetition_penalty = 1.25
    for vocab_size, max_waiting, limits in [(100, 1000, (64, 20)), (7, 10, (10, 7))]:
        join.vocab_size = vocab_size
        info = state_of(join, join, max_waiting=max_waiting).info
        assert (info.max_num_samples, info.max_logprobs) == limits
        assert info.sampling_defaults.repetition_penalty == 1.25


def state_of(join: worker_pb2.Join, served: worker_pb2.Join, *, max_waiting: int = 8) -> frontend_pb2.ModelState:
    """What a front end gets where the first proven worker joined with `join` and the core serves `served`."""
    card = ServedModel(default_max_new_tokens=8, max_waiting=max_waiting, cache_root=b"c" * 32)
    card.joined("w", join, {"w"})
    card.proven("w")
    return card.state(fx.ModelServed(frontend="f", info=joined(served).info, recent_max_length=99))


def test_model_state_takes_sizes_and_defaults_from_the_core_and_the_tokenizer_from_the_join() -> None:
    sizes = {"num_pages": 17, "max_rows": 5, "max_length": 64, "window": 16, "sink_tokens": 4}
    served = a_join(**sizes, token_budget=20, logit_rows=10)
    served.defaults.top_k = 7
    state = state_of(a_join(tokenizer_json=b"{}", chat_template="t"), served)
    assert (state.tokenizer_json, state.chat_template, state.cache_root) == (b"{}", "t", b"c" * 32)
    assert state.recent_max_length == 99
    info = state.info
    assert (info.num_pages, info.max_rows, info.max_length, info.token_budget) == (16, 5, 64, 20)
    assert (info.window, info.sink_tokens, info.sampling_defaults.top_k) == (16, 4, 7)


def test_the_served_tokenizer_comes_from_the_first_proven_worker() -> None:
    card = ServedModel(default_max_new_tokens=8, max_waiting=8, cache_root=b"c" * 32)
    for name in ("w-1", "w-2", "w-3"):
        card.joined(name, worker_pb2.Join(tokenizer_json=name.encode()), {"w-1", "w-2", "w-3"})
    card.proven("w-2")
    card.proven("w-1")
    state = card.state(fx.ModelServed(frontend="f", info=joined().info, recent_max_length=99))
    assert state.tokenizer_json == b"w-2"


def told(effect: fx.Effect) -> frontend_pb2.CoreToFrontend:
    return frontend_pb2.CoreToFrontend.FromString(frontend_wire.frame_of(effect))


def test_a_load_without_a_lost_worker_leaves_its_seconds_unset() -> None:
    figures: dict[str, Any] = dict.fromkeys(Load.__slots__, 0) | {
        "per_worker": (), "incidents": Incidents(), "held_pools": HeldPoolsLoad(), "worker_lost_seconds": None,
        "worker_lost_reason": "", "journal_suspended": "", "weights_version": "",
    }  # fmt: skip
    load = told(fx.LoadReply(frontend="f", query=9, load=Load(**figures))).load_reply.load
    assert not load.HasField("worker_lost_seconds")


@pytest.mark.parametrize("reason", list(fx.EndReason))
def test_every_end_reason_is_sent_with_its_statistics(reason: fx.EndReason) -> None:
    figures: dict[str, Any] = {name: 1 + i for i, name in enumerate(fx.Stats.__slots__) if name != "weights"}
    spans = WeightsSpan(from_token=0, version=""), WeightsSpan(from_token=7, version="v2")
    stats = fx.Stats(**figures, weights=spans)
    end = fx.End(stream=3, reason=reason, failure=None, stop_token_id=None, stats=stats)
    none = np.zeros(0, np.int32)
    output = fx.StepOutput(
        frontend="f", streams=none.astype(np.uint64), offsets=none, tokens=none, logprobs=None, prompt_logprobs=(),
        ends=(end,),
    )  # fmt: skip
    [item] = told(output).step_output.ends
    assert inference_pb2.FinishReason.Name(item.reason) == f"FINISH_REASON_{reason.name}"
    account = {field.name: value for part in (item.usage, item.timing) for field, value in part.ListFields()}
    assert account == figures
    assert [(span.from_token, span.version) for span in item.weights] == [(0, ""), (7, "v2")]


def kept_join(**changes: Any) -> worker_pb2.Join:
    """A Join of a worker that has kept pages 3 and 2."""
    join = a_join()
    join.kept.page_root, join.kept.generation = b"r" * 16, 9
    labels = join.kept.labels
    labels.pages, labels.hashes = packed(np.array([3, 2], np.int32)), b"a" * 32 + b"b" * 32
    labels.tokens = packed(np.arange(2 * join.page_size, dtype=np.int32))
    for name, value in changes.items():
        setattr(join.kept if name == "page_root" else labels, name, value)
    return join


def test_a_join_reports_the_pages_that_the_worker_has_kept() -> None:
    kept = joined(kept_join()).kept
    assert kept is not None and (kept.page_root, kept.generation) == ((b"r" * 16).hex(), 9)
    assert kept.labels.pages.tolist() == [3, 2]
    assert kept.labels.hashes == (b"a" * 32, b"b" * 32)
    first = np.arange(JOIN.page_size, dtype=np.int32)
    assert kept.labels.tokens == (packed(first), packed(first + JOIN.page_size))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pages": packed(np.array([3, 3], np.int32))}, "has a page twice"),
        ({"pages": packed(np.array([3, 0], np.int32))}, "must be 1 to"),
        ({"pages": packed(np.array([3, 1 << 30], np.int32))}, "must be 1 to"),
        ({"pages": b"123"}, "not a multiple of 4"),
        ({"hashes": b"a" * 63}, "hashes has 63 bytes; 2 pages need 64"),
        ({"tokens": b""}, "tokens has 0 bytes; 2 pages need"),
        ({"page_root": b"r"}, "page_root has 1 byte; it must have 16"),
    ],
)
def test_kept_pages_out_of_bounds_are_refused(changes: dict[str, bytes], sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        joined(kept_join(**changes))
