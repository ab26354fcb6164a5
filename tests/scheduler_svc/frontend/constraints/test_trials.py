"""The trial process and its callers: hostile grammars are refused in time, tenants take turns, results stay."""

import asyncio
import os
import re
import select
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from scheduler_svc.frontend.constraints import trials
from scheduler_svc.frontend.constraints.grammar import hash_of
from scheduler_svc.frontend.constraints.trials import MAX_WAITING, TrialProcess, Trials, TrialUnusable, Verdict
from scheduler_svc.frontend.rpc.status import Refusal
from tests.rigs import byte_tokenizer
from tests.scheduler_svc.frontend.virtual_loop import settle

# Compiles in a millisecond; its masks take many seconds.
EVIL = "start:" + " a" * 20 + "\na: /x{30000}/"


@pytest.fixture
def trial() -> Iterator[TrialProcess]:
    made = TrialProcess(
        byte_tokenizer.tokenizer_json(),
        vocab_size=byte_tokenizer.VOCAB_SIZE,
        eos_token_ids=[byte_tokenizer.EOS_ID],
        cpu_seconds=1e9,
        patience_seconds=1e9,
    )
    yield made
    made.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may be busy."""
    monkeypatch.setattr(trials, "START_SECONDS", 600.0)
    monkeypatch.setattr(trials, "IDLE_SECONDS", 1e9)


async def test_grammars_are_judged_and_hostile_ones_killed_in_time(trial: TrialProcess) -> None:
    """In CPU time of the child, so other load of the machine does not count."""
    trial._cpu_limit = 0.1
    assert await trial.judge('start: "a" | "b"') == Verdict()
    pid = trial._child
    assert os.sched_getscheduler(pid) == os.SCHED_IDLE
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert f"Max address space         {1 << 30}" in limits
    refused = await trial.judge("start: x")
    assert "unknown name" in refused.refusal and not refused.was_killed
    evil = await trial.judge(EVIL)
    words = r"the limit is \d+ ms of CPU time \(100 ms x [1-4][.\d]*, for the speed of this machine\)"
    assert evil.was_killed and not evil.is_unknown
    assert re.fullmatch(rf"its trial took [\d.]+ s of CPU time; {words}", evil.refusal)
    # The successor has the tokenizer, and the one before it has ended.
    assert await trial.judge('start: "c"') == Verdict()
    assert trial._child != pid and not Path(f"/proc/{pid}").exists()
    child = os.pidfd_open(trial._child)
    trial.close()
    wait_until_gone(child)


@pytest.mark.parametrize(("victim", "num_kills"), [("child", 1), ("child", 2), ("parent", 1)])
async def test_a_grammar_that_ends_its_process_twice_is_blamed(
    trial: TrialProcess, victim: str, num_kills: int
) -> None:
    """The kernel may kill the child that tries it, or the process that forks children, when others take the memory."""
    assert await trial.judge('start: "a"') == Verdict()
    judge, started = trial._judge, 0

    async def killed(grammar: str, mark: bytes) -> Verdict | None:
        nonlocal started
        started += 1
        if started <= num_kills:
            kill(trial, victim)
        return await judge(grammar, mark)

    trial._judge = killed
    verdict = await trial.judge('start: "b"')
    assert (verdict == Verdict()) == (num_kills == 1)
    assert verdict.was_killed == ("ended the process that tries it, 2 times" in verdict.refusal)
    assert await trial.judge('start: "c"') == Verdict()


async def test_a_trial_follows_one_that_was_cancelled_at_the_start_of_the_process(trial: TrialProcess) -> None:
    first = asyncio.ensure_future(trial.judge('start: "a"'))
    await asyncio.sleep(0)
    connection = trial._connection
    assert connection is not None and not trial._child
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await trial.judge('start: "b"') == Verdict()
    assert connection.fileno() == -1


def kill(trial: TrialProcess, victim: str) -> None:
    """Kills the child, or the process that forks it, and waits until it is gone."""
    pid = trial._forks.pid if victim == "parent" else trial._child
    process = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(process)


def wait_until_gone(process: int) -> None:
    """Its descriptor is readable when it has ended, for which it needs its turn."""
    assert select.select([process], [], [], 100.0)[0]
    os.close(process)


async def test_a_trial_that_gets_no_spare_cpu_time_begins_again_with_a_share(
    trial: TrialProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await trial.judge('start: "a"') == Verdict()
    monkeypatch.setattr(trials, "IDLE_SECONDS", 0.2)
    stopped = trial._child
    os.kill(stopped, signal.SIGSTOP)
    assert await trial.judge('start: "b"') == Verdict()
    assert trial._child != stopped and os.sched_getscheduler(trial._child) == os.SCHED_OTHER
    monkeypatch.setattr(trials, "IDLE_SECONDS", 1e9)
    # The next one gives way again.
    assert await trial.judge('start: "c"') == Verdict()
    assert os.sched_getscheduler(trial._child) == os.SCHED_IDLE


async def test_a_trial_that_gets_no_cpu_time_says_nothing_of_its_grammar(
    trial: TrialProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await trial.judge('start: "a"') == Verdict()
    begin = trial._begin

    async def begin_stopped() -> None:
        await begin()
        os.kill(trial._child, signal.SIGSTOP)

    trial._patience = 0.2
    os.kill(trial._child, signal.SIGSTOP)
    monkeypatch.setattr(trial, "_begin", begin_stopped)
    verdict = await trial.judge('start: "b"')
    assert verdict.is_unknown and verdict.was_killed and "because the machine is busy" in verdict.refusal
    monkeypatch.setattr(trial, "_begin", begin)
    trial._patience = 1e9
    assert await trial.judge('start: "b"') == Verdict()


async def test_a_tokenizer_that_cannot_be_read_is_told() -> None:
    broken = TrialProcess(b"{}", vocab_size=10, eos_token_ids=[])
    with closing(broken), pytest.raises(TrialUnusable):
        await broken.judge('start: "a"')


class FakeProcess(TrialProcess):
    """Judges at a word of the test. `order` has the grammars in the order of their trials."""

    def __init__(self) -> None:
        super().__init__(b"", vocab_size=1, eos_token_ids=[])
        self.order: list[str] = []
        self.verdicts: asyncio.Queue[Verdict] = asyncio.Queue()

    async def judge(self, grammar: str) -> Verdict:
        self.order.append(grammar)
        return await self.verdicts.get()


@dataclass
class Fakes:
    """Trials with a process and a clock of the test."""

    process: FakeProcess
    now: float = 0.0

    def __post_init__(self) -> None:
        self.trials = Trials(self.process, clock=lambda: self.now, on_end=lambda _: None)

    async def judge(self, grammar: str, tenant: str = "a") -> Verdict:
        return await self.trials.judge(hash_of(grammar), grammar, tenant)

    async def asked(self, *grammars: str, tenant: str = "a") -> list[asyncio.Task[Verdict]]:
        """Grammars that are asked for one after the other."""
        tasks = list[asyncio.Task[Verdict]]()
        for grammar in grammars:
            tasks.append(asyncio.create_task(self.judge(grammar, tenant)))
            await settle()
        return tasks


@pytest.fixture
def fakes() -> Iterator[Fakes]:
    made = Fakes(FakeProcess())
    yield made
    made.trials.close()


async def test_equal_grammars_share_a_trial_and_results_are_kept(fakes: Fakes) -> None:
    asked = [*await fakes.asked("g"), *await fakes.asked("g", tenant="b")]
    fakes.process.verdicts.put_nowait(Verdict(refusal="no"))
    assert [await one for one in asked] == [Verdict(refusal="no")] * 2
    assert await fakes.judge("g", "c") == Verdict(refusal="no")
    assert fakes.process.order == ["g"]


async def test_what_is_unknown_is_tried_again(fakes: Fakes) -> None:
    for verdict in (Verdict(is_unknown=True, was_killed=True), Verdict()):
        fakes.process.verdicts.put_nowait(verdict)
        assert await fakes.judge("g") == verdict
    assert fakes.process.order == ["g", "g"]


async def test_the_oldest_results_are_dropped(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MAX_KEPT", 2)
    for grammar in ("a", "b", "a", "c", "a", "b"):
        fakes.process.verdicts.put_nowait(Verdict())
        await fakes.judge(grammar)
    assert fakes.process.order == ["a", "b", "c", "b"]


async def test_a_tenant_has_eight_waiting_and_another_waits_for_one_of_them_at_most(fakes: Fakes) -> None:
    # The first one is being tried when the others come.
    hostile = await fakes.asked(*(f"h{i}" for i in range(MAX_WAITING + 1)), tenant="hostile")
    with pytest.raises(Refusal) as refused:
        await fakes.judge("h9", "hostile")
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "8 new constraints of the caller wait for their trial; the limit is 8" in refused.value.message
    polite = await fakes.asked("p0", "p1", tenant="polite")
    for _ in range(MAX_WAITING + 3):
        fakes.now += 2.0 if fakes.process.order[-1].startswith("h") else 0.01
        fakes.process.verdicts.put_nowait(Verdict())
        await settle()
    assert fakes.process.order[:3] == ["h0", "p0", "p1"]
    await asyncio.gather(*hostile, *polite)


async def test_a_grammar_whose_callers_have_all_gone_is_not_tried(fakes: Fakes) -> None:
    asked = await fakes.asked("g0", "g1", "g2")
    asked[1].cancel()
    await settle()
    for _ in range(2):
        fakes.process.verdicts.put_nowait(Verdict())
    await asyncio.gather(asked[0], asked[2])
    assert fakes.process.order == ["g0", "g2"]


async def test_what_waits_is_refused_when_the_model_changes() -> None:
    fakes = Fakes(FakeProcess())
    [asked] = await fakes.asked("g")
    fakes.trials.close()
    with pytest.raises(Refusal, match="not served any more"):
        await asked
