"""The event log: a replay gives the same effects, and a changed log or a core that differs is detected."""

import io
import json
import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from tandem.internal.v1 import frontend_pb2, record_pb2, worker_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import Admission, CoreConfig, Policy
from scheduler_svc.core.messages.page_hash import hash_pages
from scheduler_svc.core.messages.reports import StepKind, StepReport
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording import event_log
from scheduler_svc.recording.replay import replay
from scheduler_svc.wire import framing
from scheduler_svc.wire import frontend as frontend_wire
from scheduler_svc.wire import worker as worker_wire
from scheduler_svc.wire.framing import Frames, frame
from tandem_contract import private_file
from tandem_contract.bounds import WireError
from tandem_contract.codec import parsed
from tests.rigs.executor import Executor, Shape
from tests.rigs.processes import Child
from tests.rigs.sampling import Settings

SHAPE = Shape(page_size=4, num_pages=10, max_rows=3, token_budget=12, chunk_align=2)


TICK = {"tick": record_pb2.Tick()}


def join_message() -> worker_pb2.WorkerToCore:
    join = worker_pb2.Join(
        protocol=9, identity="i", model="m", vocab_size=SHAPE.vocab_size, page_size=SHAPE.page_size,
        num_pages=SHAPE.num_pages, max_rows=SHAPE.max_rows, max_length=SHAPE.max_length,
        token_budget=SHAPE.token_budget, chunk_align=SHAPE.chunk_align, logit_rows=SHAPE.logit_rows,
        eos_token_ids=SHAPE.eos_token_ids, max_frame_bytes=64 << 20,
    )  # fmt: skip
    return worker_pb2.WorkerToCore(join=join)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


class Session:
    """A recorded session of the real core and an executor."""

    def __init__(self, path: Path, *, report_steps: bool = False) -> None:
        config = CoreConfig(max_waiting=20, report_steps=report_steps)
        self.core = Scheduler(config)
        self.recorder = event_log.Recorder(path, config)
        self.executor = Executor(SHAPE)
        self.plans: list[worker_pb2.StepPlan] = []
        self.now = 0.0
        self.tokens = 0
        self.cached_tokens = 0
        self.flushed = 0
        self.reports: list[StepReport] = []

    def put(self, **event: object) -> None:
        frames = {name: event[name].SerializeToString() for name in event.keys() & {"frontend", "worker"}}  # type: ignore[attr-defined]
        entry = {"peer": "w-1" if "worker" in event else "f-1", **event, **frames}
        given = event_log.event_of(record_pb2.RecordedEvent(now=self.now, **entry))  # type: ignore[arg-type]
        self.recorder.arrived(self.now, given, entry)
        effects = self.core.handle(given, self.now)
        self.recorder.handled(self.now, given, effects)
        for effect in effects:
            if isinstance(effect, fx.WorkerAccepted):
                self.executor.begin(effect.generation)
            elif isinstance(effect, fx.SendPlan):
                self.plans.append(worker_pb2.CoreToWorker.FromString(worker_wire.plan_frame(effect.plan)).plan)
            elif isinstance(effect, fx.StepOutput):
                self.tokens += len(effect.tokens)
                self.cached_tokens += sum(end.stats.cached_prompt_tokens for end in effect.ends)
            elif isinstance(effect, StepReport):
                self.reports.append(effect)
            elif isinstance(effect, fx.FlushReply):
                self.flushed += effect.pages

    def run(self, seed: int) -> None:
        draw = random.Random(seed)
        self.put(frontend=frontend_pb2.FrontendToCore(hello=frontend_pb2.Hello()))
        self.put(worker=join_message())
        for stream in range(1, 37, 3):
            self.now += draw.random()
            # Some prompts share a prefix, so the core finds cached pages; requests without a root share none.
            prompt = [draw.randrange(2) for _ in range(draw.randint(1, 20))]
            root = draw.choice([b"", b"a" * 32, b"a" * 32, b"b" * 32])
            hashes = hash_pages(root, np.array(prompt, np.int32), SHAPE.page_size) if root else b""
            submit = frontend_pb2.Submit(
                stream=stream, request_id=f"r{stream}", prompt=b"".join(t.to_bytes(4, "little") for t in prompt),
                max_new_tokens=draw.randint(1, 9), sampling=self.sampling(draw, stream),
                priority=draw.randint(-1, 1), num_samples=draw.choice([1, 1, 3]),
                num_logprobs=draw.choice([0, 0, 1, 3]), prompt_logprobs_from=draw.choice([0, 1]),
                prefix_root=root, page_hashes=hashes, bypass_read=draw.random() < 0.2,
                bypass_write=draw.random() < 0.2,
            )  # fmt: skip
            self.put(frontend=frontend_pb2.FrontendToCore(submit=submit))
            for _ in range(draw.randint(0, 5)):
                self.step()
            if stream in (13, 28):
                self.put(frontend=frontend_pb2.FrontendToCore(flush_cache=frontend_pb2.FlushCache(query=stream)))
                self.put(frontend=frontend_pb2.FrontendToCore(load_query=frontend_pb2.LoadQuery(query=stream)))
            if stream == 19:
                self.put(worker_lost=record_pb2.PeerLost(reason="killed"))
                self.plans.clear()
                self.put(worker=join_message())
        while self.core.queue or self.plans:
            self.step()
        self.recorder.close()

    @staticmethod
    def sampling(draw: random.Random, seed: int) -> bytes:
        temperature, repetition, presence = draw.choice([0.0, 1.0]), draw.choice([1.0, 1.5]), draw.choice([0.0, 0.5])
        penalties = {"repetition_penalty": repetition, "presence_penalty": presence}
        return Settings(temperature=temperature, seed=seed, **penalties).encoded()

    def step(self) -> None:
        self.now += 0.01
        self.put(tick=record_pb2.Tick())
        if self.plans:
            result = self.executor.apply(self.plans.pop(0))
            result.compute_us = 1000 + result.step
            self.put(worker=worker_pb2.WorkerToCore(result=result))


@pytest.mark.parametrize("seed", range(5))
def test_a_replay_gives_the_same_effects(path: Path, seed: int) -> None:
    session = Session(path)
    session.run(seed)
    assert session.tokens > 20
    assert session.cached_tokens > 0
    assert session.flushed > 0
    assert replay(path, audited=True) > 40


def test_the_log_has_every_setting_of_the_core(path: Path) -> None:
    """No setting is at its default, so the test fails if one is left out."""
    policy = Policy(mixed_steps=False, admission=Admission.KNOWN, cache_aware=False, fair_share=False)
    config = CoreConfig(
        max_waiting=1, max_waiting_tokens=2, plans_in_flight=3, step_timeout_seconds=4.0, silence_timeout_seconds=5.0,
        max_worker_wait_seconds=6.0, max_plan_bytes=7, prove_workers=True, report_steps=True, policy=policy,
        predict_steps=True, quarantine_seconds=11.0,
        max_kept_requests=8, max_kept_bytes=9, report_detached=True, first_generation=10, page_root="ab",
        weights_folders=("/weights",),
    )  # fmt: skip
    for value, plain in ((config, CoreConfig()), (policy, Policy())):
        assert not [f.name for f in fields(value) if getattr(value, f.name) == getattr(plain, f.name)]
    event_log.Recorder(path, config).close()
    read = event_log.read(path).config
    assert read == config
    assert isinstance(read.policy.admission, Admission)


def with_header(path: Path, version: int, settings: dict[str, object] | str) -> Path:
    text = settings if isinstance(settings, str) else json.dumps(settings)
    data = record_pb2.RecordedHeader(version=version, core_config=text).SerializeToString()
    path.write_bytes(len(data).to_bytes(4, "little") + data)
    return path


SETTINGS = json.loads(event_log.encode_config(CoreConfig()))
POLICY = SETTINGS["policy"]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("{", "Invalid JSON: "),
        ("[]", "Input should be an object"),
        (SETTINGS | {"speed": 1, "colour": 2}, "colour, speed unknown; another version wrote this record"),
        ({"policy": POLICY}, "first_generation, .* missing; another version wrote this record"),
        (SETTINGS | {"policy": 1}, "policy: Input should be an object"),
        (SETTINGS | {"policy": POLICY | {"lifo": True}}, "lifo unknown; another version wrote this record"),
        (SETTINGS | {"policy": POLICY | {"admission": "x"}}, "policy: admission: Input should be 'horizon', "),
        (SETTINGS | {"max_waiting": True}, "max_waiting: Input should be a valid integer$"),
        (SETTINGS | {"step_timeout_seconds": "1"}, "step_timeout_seconds: Input should be a valid number$"),
    ],
    ids=["text", "list", "unknown", "missing", "policy-number", "policy-unknown", "admission", "bool", "string"],
)
def test_a_log_with_other_settings_is_refused(path: Path, settings: dict[str, object] | str, problem: str) -> None:
    with pytest.raises(WireError, match=f"^the core's settings: {problem}"):
        event_log.read(with_header(path, 6, settings))


def test_a_whole_number_of_seconds_is_read_as_a_float(path: Path) -> None:
    config, _, _ = event_log.read(with_header(path, 6, SETTINGS | {"step_timeout_seconds": 3}))
    assert config == CoreConfig(step_timeout_seconds=3.0)
    assert isinstance(config.step_timeout_seconds, float)


def test_a_log_of_version_4_is_refused(path: Path) -> None:
    """Version 4 had max_waiting as field 2, plans_in_flight as field 5 and the admission policy as field 10."""
    data = b"\x08\x04\x10\x80\x08\x28\x02\x52\x07horizon"
    path.write_bytes(len(data).to_bytes(4, "little") + data)
    with pytest.raises(WireError, match=r"^it has version 4; this program reads versions 5 and 6$"):
        event_log.read(path)


def test_a_replay_gives_the_same_step_reports(path: Path) -> None:
    session = Session(path, report_steps=True)
    session.run(1)
    assert {report.kind for report in session.reports} == set(StepKind)
    assert any(report.compute_us > 1000 for report in session.reports)
    assert replay(path, audited=False) > 40


def test_the_same_events_give_the_same_log(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Session(tmp_path / name).run(3)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def entries_of(path: Path) -> list[bytes]:
    data = path.read_bytes()
    assert event_log.FORMAT.begins(data)
    return list(Frames(data, event_log.FORMAT))


def file_of(entries: list[bytes]) -> bytes:
    return event_log.FORMAT.first_line + b"".join(map(frame, entries))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "the entry at byte .* does not fit its checksum"),
        (lambda data: data.replace(b"record 6", b"record 7"), "it has format 7; this program reads format 6 only"),
    ],
)
def test_a_damaged_or_newer_log_is_refused(path: Path, damage: Callable[[bytes], bytes], problem: str) -> None:
    Session(path).run(1)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(WireError, match=problem):
        replay(path)


@pytest.mark.parametrize("version", [5, 6])
def test_a_log_without_checksums_is_still_read(path: Path, version: int) -> None:
    """Version 5, and the first logs of version 6, had messages where frames are now: the same bytes."""
    Session(path).run(1)
    header, *entries = entries_of(path)
    old = record_pb2.RecordedHeader.FromString(header)
    old.version = version
    entries = [old.SerializeToString(), *entries]
    path.write_bytes(b"".join(len(data).to_bytes(4, "little") + data for data in entries))
    assert len(list(event_log.read(path).entries)) == len(entries) - 1
    if version == 6:
        assert replay(path) == len(entries) - 2


def test_replay_detects_a_changed_event(path: Path) -> None:
    Session(path).run(1)
    entries = entries_of(path)
    for i, data in enumerate(entries[1:], 1):
        entry = record_pb2.RecordedEvent.FromString(data)
        message = frontend_pb2.FrontendToCore.FromString(entry.frontend)
        if message.submit.stream == 4:
            message.submit.max_new_tokens += 1
            entry.frontend = message.SerializeToString()
            entries[i] = entry.SerializeToString()
    path.write_bytes(file_of(entries))
    with pytest.raises(SystemExit, match="the effects differ"):
        replay(path, audited=False)


def test_replay_compares_the_last_effects(path: Path) -> None:
    Session(path).run(1)
    entries = entries_of(path)
    last = record_pb2.RecordedEvent.FromString(entries[-1])
    assert last.WhichOneof("event") is None
    last.effects_digest ^= 1
    entries[-1] = last.SerializeToString()
    path.write_bytes(file_of(entries))
    with pytest.raises(SystemExit, match="the effects differ"):
        replay(path, audited=False)


def test_an_event_is_on_disk_before_it_is_handled(path: Path) -> None:
    recorder = event_log.Recorder(path, CoreConfig())
    recorder.arrived(1.0, ev.Tick(), TICK)
    recorder.flush()
    assert len(entries_of(path)) == 2
    recorder.close()


def test_a_full_disk_ends_the_recording_and_not_the_service(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = io.FileIO("/dev/full", "wb")
    monkeypatch.setattr(private_file, "create", lambda *_, **__: full)
    recorder = event_log.Recorder(path, CoreConfig())
    for _ in range(3):
        recorder.arrived(1.0, ev.Tick(), TICK)
        recorder.handled(1.0, ev.Tick(), [])
        recorder.sending(1.0)
    recorder.close()
    assert sum("the recording ends with the entry before" in line for line in caplog.messages) == 1


def test_an_entry_that_no_replay_reads_ends_the_recording(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = event_log.Recorder(path, CoreConfig())
    monkeypatch.setattr(framing, "MAX_PAYLOAD", 100)
    for length in (50, 101, 50):
        recorder.arrived(1.0, ev.Tick(), TICK | {"peer": "p" * length})
    recorder.close()
    assert [line for line in caplog.messages if "bytes; the limit is 100" in line] == caplog.messages
    monkeypatch.undo()
    assert len(entries_of(path)) == 2


def test_an_entry_that_was_cut_short_is_skipped(path: Path) -> None:
    Session(path).run(2)
    whole = replay(path, audited=False)
    end_mark = framing.HEADER_BYTES + len(entries_of(path)[-1])
    path.write_bytes(path.read_bytes()[: -end_mark - 3])
    assert replay(path, audited=False) == whole - 1


def test_only_this_user_may_read_the_log_and_no_file_is_overwritten(path: Path) -> None:
    event_log.Recorder(path, CoreConfig()).close()
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("another file")
    with pytest.raises(FileExistsError):
        event_log.Recorder(path, CoreConfig())
    assert path.read_text() == "another file"


def test_a_file_that_is_not_a_log_is_refused(path: Path) -> None:
    path.write_bytes(b"\xff\xff\xff\x7f")
    with pytest.raises(WireError, match="the limit is"):
        event_log.read(path)


def test_the_replay_command_names_the_file_that_it_cannot_read(path: Path) -> None:
    path.write_text("not a log")
    command = Child("replay", ["scheduler_svc.recording.replay", str(path)])
    assert command.wait() == 1
    command.join_output()
    assert command.lines[0].startswith(f"replay: {path} cannot be read as an event log")


def test_malformed_frames_of_front_ends_are_refused() -> None:
    with pytest.raises(WireError, match="not a FrontendToCore"):
        parsed(frontend_pb2.FrontendToCore, b"\xff\xff")
    with pytest.raises(WireError, match="empty"):
        frontend_wire.event_of(frontend_pb2.FrontendToCore(), "f")
    submit = frontend_pb2.Submit(stream=1, request_id="r", prompt=b"123", max_new_tokens=1)
    with pytest.raises(WireError, match="prompt has 3 bytes, which is not a multiple of 4"):
        frontend_wire.event_of(frontend_pb2.FrontendToCore(submit=submit), "f")
