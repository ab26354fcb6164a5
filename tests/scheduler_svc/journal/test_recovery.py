"""The core's death: a new core continues from the journal, and callers that resume miss and repeat nothing."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.operators import ClearQuarantine, Running
from scheduler_svc.core.messages.reports import Load
from scheduler_svc.core.requests.lingering import outputs_of
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.journal import reader
from scheduler_svc.journal.file import Sync
from scheduler_svc.journal.keeper import JournalKeeper, OpenedJournal
from tests.rigs.executor import Shape
from tests.simulation.deaths import Deaths
from tests.simulation.lives import FRONTEND, Caller, Died, Lives


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    lives = Lives(tmp_path / "journal")
    lives.begin()
    yield lives
    lives.check()
    lives.close()


def steps(lives: Lives, count: int) -> None:
    for _ in range(count):
        for name in lives.workers:
            lives.step(name)


def next_life(lives: Lives, *, workers: bool = True) -> None:
    """The core dies, and another one begins with its journal and its workers, or without workers."""
    lives.kill()
    lives.begin(workers=workers)


def test_requests_continue_where_they_were(lives: Lives) -> None:
    callers = [lives.submit([i, i + 1, i + 2], max_new_tokens=30, num_samples=1 + i % 3, seed=i) for i in range(6)]
    steps(lives, 12)
    before = [list(map(len, caller.received)) for caller in callers]
    assert any(sum(counts) for counts in before)
    next_life(lives)
    lives.resume_all()
    assert [list(map(len, caller.received)) for caller in callers] == before
    lives.run()
    assert all(caller.done and not caller.lost for caller in callers)


def test_versions_of_tokens_outlive_the_core(lives: Lives) -> None:
    """Every token is that of the version which the end names, whether the core died before, in or after an update."""
    for life in range(3):
        for i in range(2):
            lives.submit([i, life], max_new_tokens=60, num_samples=1 + i % 2, seed=i)
        steps(lives, 8)
        if life != 1:
            lives.update_weights(Running.RECOMPUTE)
        steps(lives, (24, 12, 3)[life])
        next_life(lives)
        lives.resume_all()
    lives.run()
    spans = [end.stats.weights for caller in lives.callers for end in caller.ends if end is not None]
    assert max(map(len, spans)) > 1, spans


@pytest.mark.parametrize("jump", [5 * 3600.0, -5 * 3600.0, 1e9])
def test_no_time_counts_that_the_system_clock_has_jumped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """A stamp from before a jump is as old as it is, for this process and for the next one of the same boot."""
    wall, since_boot = [1_000_000.0], [50.0]
    monkeypatch.setattr(reader.time, "time", lambda: wall[0])
    monkeypatch.setattr(reader.time, "clock_gettime", lambda _: since_boot[0])
    monkeypatch.setattr(reader, "_BOOT_ID", tmp_path / "boot")
    (tmp_path / "boot").write_text("one\n")
    first = reader.clock_after("", 0.0)
    stamp = first.now()
    assert stamp == wall[0]
    wall[0], since_boot[0] = wall[0] + 7.0 + jump, since_boot[0] + 7.0
    second = reader.clock_after(first.boot_id, first.booted_at)
    assert first.now() == second.now() == stamp + 7.0
    # The file of a process that died 2 s ago; a time in the future is now.
    assert second.written_at(wall[0] - 2.0) == stamp + 5.0 and second.written_at(wall[0] + 9.0) == stamp + 7.0
    (tmp_path / "boot").write_text("two\n")
    assert reader.clock_after(first.boot_id, first.booted_at).now() == wall[0]


def test_the_next_journal_has_the_clock_of_the_last_one(tmp_path: Path) -> None:
    found: list[reader.JournalClock] = []
    for _ in range(2):
        with ExitStack() as stack:
            journal = OpenedJournal(tmp_path / "journal", sync=Sync.OFF, max_bytes=1 << 24, stack=stack)
            keeper = JournalKeeper(journal, Scheduler(CoreConfig()))
            keeper.restore(lambda *_, **__: [], 0.0)
            found.append(journal.clock)
    assert found[0] == found[1]


def test_tokens_that_were_written_and_not_sent_come_on_resume(lives: Lives) -> None:
    caller = lives.submit([1, 2, 3], max_new_tokens=30)
    steps(lives, 9)
    count = len(caller.received[0])
    lives.die_unsent = True
    with pytest.raises(Died):
        steps(lives, 2)
    lives.die_unsent = False
    next_life(lives, workers=False)
    assert outputs_of(lives.core, caller.submit.request_id)[0].size > count
    for name in lives.workers:
        lives.join(name)
    lives.resume_all()
    assert len(caller.received[0]) > count
    lives.run()
    assert caller.done


def test_a_request_without_linger_is_not_written(lives: Lives) -> None:
    lives.submit([1, 2, 3], linger=0.0)
    steps(lives, 6)
    lives.kill()
    data = (lives.folder / "journal").read_bytes()
    assert b"r-1" not in data
    lives.begin()
    assert len(lives.core.queue) == 0


def test_nobody_resumes_before_the_linger_is_over(lives: Lives) -> None:
    lives.submit([1, 2, 3], max_new_tokens=30, linger=10.0)
    late = lives.submit([4, 5, 6], max_new_tokens=30, linger=30.0)
    steps(lives, 8)
    lives.kill()
    lives.now += 20.0
    lives.begin()
    lives.now += 5.0
    lives.turn(ev.Tick())
    assert [request.submit.request_id for request in lives.core.queue] == [late.submit.request_id]
    lives.now += 6.0
    lives.turn(ev.Tick())
    assert len(lives.core.queue) == 0
    for caller in lives.callers:
        lives.resume(caller)
        assert caller.lost


def test_an_end_that_was_sent_is_still_there_after_a_death(lives: Lives) -> None:
    caller = lives.submit([1, 2, 3], num_samples=2)
    lives.run()
    assert caller.done
    received, ends = [list(tokens) for tokens in caller.received], caller.ends
    caller.ends = [None, None]
    next_life(lives)
    lives.resume(caller)
    assert caller.received == received
    assert [(end.reason, end.stats) for end in caller.ends if end] == [(end.reason, end.stats) for end in ends if end]


def test_a_stop_string_ends_the_output_before_its_last_token(lives: Lives) -> None:
    caller = lives.submit([1, 2, 3], max_new_tokens=30)
    steps(lives, 12)
    assert len(caller.received[0]) > 3
    lives.turn(ev.Finish(frontend=FRONTEND, stream=caller.stream, output_tokens=3))
    assert caller.ends[0] is not None and caller.ends[0].reason is fx.EndReason.STOP_STRING
    next_life(lives)
    assert [len(tokens) for tokens in outputs_of(lives.core, caller.submit.request_id)] == [3]


def test_an_aborted_request_is_gone_and_its_content_is_erased(lives: Lives) -> None:
    caller = lives.submit([33] * 30, max_new_tokens=30)
    steps(lives, 8)
    lives.turn(ev.Abort(frontend=FRONTEND, query=1, request_ids=(caller.submit.request_id,)))
    caller.lost = True
    secret = caller.submit.prompt.tobytes()
    assert secret in (lives.folder / "journal").read_bytes()
    for _ in range(100):
        lives.now += 0.5
        lives.turn(ev.Tick())
    lives.settle()
    assert secret not in (lives.folder / "journal").read_bytes()
    next_life(lives)
    assert len(lives.core.kept) == 0


def test_the_load_has_the_size_of_the_journal_and_why_it_is_suspended(lives: Lives) -> None:
    def load() -> Load:
        [reply] = lives.keeper.described(lives.handle(ev.LoadQuery(frontend=FRONTEND, query=1)))
        assert isinstance(reply, fx.LoadReply)
        return reply.load

    lives.submit([1, 2, 3])
    assert (load().journal_bytes, load().journal_suspended) == ((lives.folder / "journal").stat().st_size, "")
    writer = lives.keeper._writer
    assert writer is not None
    writer._suspend("cannot be written: Input/output error", lives.now)
    assert load().journal_bytes == 0
    assert "Input/output error; streams would not survive the scheduler's death" in load().journal_suspended
    lives.turn(ev.Tick())
    assert load().journal_suspended == ""


def test_requests_of_another_model_fail(lives: Lives) -> None:
    caller = lives.submit([1, 2, 3], max_new_tokens=40)
    steps(lives, 8)
    lives.kill()
    lives.identity = "another"
    lives.begin()
    lives.resume(caller)
    assert caller.ends[0] is not None and caller.ends[0].failure is not None
    assert "another model is served after the restart" in caller.ends[0].failure.message
    caller.lost = True


# Of the context, and of a worker that comes back first. A prompt has 3 tokens.
LARGE, SMALL = Shape(page_size=4, num_pages=40, max_length=60), Shape(page_size=4, num_pages=10, max_length=24)
ASKED = {
    "set": ({"max_new_tokens": 50}, 50, fx.EndReason.LENGTH),
    "above the context": ({"max_new_tokens": 99}, 57, fx.EndReason.CONTEXT_FULL),
    "unset": ({"max_new_tokens": 57, "is_max_unset": True}, 57, fx.EndReason.CONTEXT_FULL),
}


def begun_anew(folder: Path, asked: str, num_tokens: int) -> tuple[Lives, Caller]:
    """A service that died with its large worker when the request had this many tokens, and a small one in the next."""
    lives = Lives(folder, shape=LARGE, num_workers=1)
    lives.begin()
    caller = lives.submit([1, 2, 3], ignore_eos=True, **ASKED[asked][0])
    while len(caller.received[0]) < num_tokens:
        steps(lives, 1)
    lives.kill()
    del lives.workers["w-0"]
    lives.begin()
    lives.join("small", SMALL)
    lives.resume(caller)
    steps(lives, 100)
    return lives, caller


@pytest.mark.parametrize("num_tokens", [5, 30])
@pytest.mark.parametrize("asked", ASKED)
def test_a_request_waits_for_a_worker_as_large_as_the_one_that_had_it(
    tmp_path: Path, asked: str, num_tokens: int
) -> None:
    lives, caller = begun_anew(tmp_path / "journal", asked, num_tokens)
    # Without a maximum that is in force, the small worker computes what it has room for.
    most = 21 if asked != "set" and num_tokens < 21 else num_tokens
    assert not caller.done and num_tokens <= len(caller.received[0]) <= most + 2
    lives.join("large", LARGE)
    lives.run()
    _, count, reason = ASKED[asked]
    assert caller.ends[0] is not None
    assert (caller.ends[0].reason, len(caller.received[0])) == (reason, count)
    lives.check()
    lives.close()


@pytest.mark.parametrize("asked", ASKED)
def test_a_request_that_no_larger_worker_takes_ends_as_any_other(tmp_path: Path, asked: str) -> None:
    lives, caller = begun_anew(tmp_path / "journal", asked, 30)
    lives.now += CoreConfig().max_worker_wait_seconds
    lives.turn(ev.Tick())
    assert caller.ends[0] is not None
    if asked != "set":
        assert caller.ends[0].reason is fx.EndReason.CONTEXT_FULL
    else:
        assert caller.ends[0].failure is not None and caller.ends[0].failure.code is fx.FailureCode.NO_WORKER
    lives.close()


def test_suspects_are_still_suspects_after_a_death(lives: Lives) -> None:
    callers = [lives.submit([i, 1, 2], max_new_tokens=30, num_samples=2, seed=i) for i in range(3)]
    steps(lives, 8)
    lives.turn(ev.WorkerLost(worker="w-0", reason="killed"))
    suspects = suspected(lives)
    assert 0 < len(suspects) < 6
    next_life(lives, workers=False)
    next_life(lives)
    assert suspected(lives) == suspects
    lives.resume_all()
    lives.run()
    assert all(caller.done for caller in callers)
    assert suspected(lives) == set()
    lives.submit([9, 9], max_new_tokens=30)
    next_life(lives)
    assert suspected(lives) == set()


def suspected(lives: Lives) -> set[tuple[str, int]]:
    """Request id and sample of each suspect."""
    requests = [lives.core.queue.by_handle(handle) for handle in lives.core.suspects.handles]
    return {(request.submit.request_id, request.sample_idx) for request in requests if request is not None}


def test_the_quarantine_outlives_the_core(lives: Lives) -> None:
    first = lives.submit([1, 2, 3], max_new_tokens=30, linger=0.0)
    [request] = lives.core.queue
    lives.core.quarantine.add(request, "it killed two workers", lives.now)
    lives.turn(ev.Tick())
    lives.kill()
    lives.now += 100.0
    lives.begin()
    [entry] = lives.core.quarantine.report(lives.now)
    assert (entry.request_id, entry.cause) == (first.submit.request_id, "it killed two workers")
    assert entry.age_seconds == pytest.approx(100.0)
    assert lives.submit([1, 2, 3], max_new_tokens=30).lost
    lives.turn(ClearQuarantine(frontend=FRONTEND, query=1, keys=()))
    next_life(lives)
    assert len(lives.core.quarantine) == 0


def test_a_detached_request_goes_on_and_is_kept_through_two_deaths(lives: Lives) -> None:
    caller = lives.submit([1, 2, 3], max_new_tokens=40)
    steps(lives, 8)
    lives.turn(ev.Cancel(frontend=FRONTEND, stream=caller.stream, detach=True))
    steps(lives, 8)
    next_life(lives)
    steps(lives, 8)
    next_life(lives, workers=False)
    next_life(lives)
    count = len(caller.received[0])
    lives.resume(caller)
    assert len(caller.received[0]) > count + 2
    lives.run()
    assert caller.done


def test_an_error_of_the_core_leaves_the_journal_as_it_was(lives: Lives) -> None:
    caller = lives.submit([1, 2, 3], max_new_tokens=30)
    steps(lives, 8)
    before = (lives.folder / "journal").read_bytes()
    with pytest.raises(AssertionError, match="broken"), lives.journal.closing(lives.keeper, lambda: lives.now):
        raise AssertionError("broken")
    assert (lives.folder / "journal").read_bytes() == before
    assert (lives.folder / "lock").read_bytes().count(b"x") == 1
    next_life(lives)
    lives.resume(caller)
    with lives.journal.closing(lives.keeper, lambda: lives.now):
        lives.run()
    assert caller.done
    assert (lives.folder / "lock").read_bytes().count(b"x") == 0


@pytest.mark.parametrize("seed", range(3))
def test_random_deaths_lose_and_repeat_nothing(seed: int) -> None:
    Deaths(seed, operations=200).run()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_random_deaths_lose_and_repeat_nothing(seed: int) -> None:
    Deaths(seed, operations=3000).run()


def test_a_constrained_request_keeps_its_constraint_over_two_deaths(lives: Lives) -> None:
    sources = [b"toy_complete=25", b"toy_complete=25", b"", b"toy_complete=30 another"]
    callers = [lives.submit([1, i], max_new_tokens=40, seed=i, constraint=source) for i, source in enumerate(sources)]
    ended = lives.submit([9], max_new_tokens=2, constraint=b"toy_complete=1")
    for _ in range(2):
        steps(lives, 14)
        assert not all(caller.done for caller in callers)
        next_life(lives)
        lives.resume_all()
    assert {one.users for one in lives.core.sources._sources.values()} == {2, 1}
    lives.run()
    reasons = [end.reason for caller in callers for end in caller.ends if end is not None]
    assert len(reasons) == 4 and fx.EndReason.CONSTRAINT_COMPLETE in reasons
    assert ended.done and len(lives.core.sources) == 0
    # The journal does not keep what is not needed any more.
    assert all(not kept.saved.submit.resources for kept in lives.keeper._by_id.values() if all(kept.ends))


@pytest.mark.parametrize("how", ["removed", "emptied", "cut"])
def test_a_journal_with_requests_that_is_gone_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    lives, path = Lives(tmp_path / "journal"), tmp_path / "journal" / "journal"

    def lose() -> list[str]:
        """Ends the core, loses the journal and begins again. Returns the errors in the log."""
        lives.kill()
        caplog.clear()
        if how == "removed":
            path.unlink()
        else:
            path.write_bytes(b"" if how == "emptied" else path.read_bytes()[:3])
        # The next core knows nothing of this one.
        lives.generations.clear()
        lives.roots.clear()
        lives.begin()
        return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]

    lives.begin()
    # A journal without requests loses nothing.
    assert lose() == []
    lives.submit([1, 2, 3], max_new_tokens=30, linger=0.0)
    steps(lives, 2)
    assert lose() == []
    lives.submit([1, 2, 3], max_new_tokens=30)
    steps(lives, 2)
    [said] = lose()
    assert said.startswith(f"the journal {path} ")
    assert "the last scheduler left one with requests" in said
    assert lose() == []
    # After the last request has ended and is forgotten.
    lives.submit([1, 2, 3], max_new_tokens=4, linger=5.0)
    lives.run()
    lives.now += 10.0
    lives.turn(ev.Tick())
    assert lose() == []
    lives.close()
