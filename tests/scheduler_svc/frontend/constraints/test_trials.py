"""The trial process and its callers: hostile grammars are refused in time, tenants take turns, results stay."""

import asyncio
import os
import re
import select
import signal
from pathlib import Path

import grpc
import pytest

from scheduler_svc.frontend.constraints import trials
from scheduler_svc.frontend.constraints.grammar import hash_of
from scheduler_svc.frontend.constraints.trials import MAX_WAITING, TrialProcess, Trials, TrialUnusable, Verdict
from scheduler_svc.frontend.rpc.status import Refusal
from tests.rigs import byte_tokenizer

# Compiles in a millisecond; its masks take many seconds.
EVIL = "start:" + " a" * 20 + "\na: /x{30000}/"


def process(cpu_seconds: float = 1e9) -> TrialProcess:
    return TrialProcess(
        byte_tokenizer.tokenizer_json(),
        vocab_size=byte_tokenizer.VOCAB_SIZE,
        eos_token_ids=[byte_tokenizer.EOS_ID],
        cpu_seconds=cpu_seconds,
        patience_seconds=1e9,
    )


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may be busy."""
    monkeypatch.setattr(trials, "START_SECONDS", 600.0)


async def test_grammars_are_judged_and_hostile_ones_killed_in_time() -> None:
    """In CPU time of the child, so other load of the machine does not count."""
    trial = process(cpu_seconds=0.1)
    try:
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
    finally:
        child = os.pidfd_open(trial._child) if trial._child else None
        trial.close()
    assert child is not None
    # Readable when it has ended, for which it needs its turn.
    assert select.select([child], [], [], 100.0)[0]
    os.close(child)


@pytest.mark.parametrize(("victim", "num_kills"), [("child", 1), ("child", 2), ("parent", 1)])
async def test_only_a_grammar_that_ends_its_process_twice_is_blamed(victim: str, num_kills: int) -> None:
    """The kernel may kill the child that tries it, or the process that forks children, when others take the memory."""
    trial = process()
    try:
        assert await trial.judge('start: "a"') == Verdict()
        judge, started = trial._judge, 0

        async def killed(grammar: str) -> Verdict:
            nonlocal started
            started += 1
            if started <= num_kills:
                kill(trial, victim)
            return await judge(grammar)

        trial._judge = killed
        verdict = await trial.judge('start: "b"')
        assert (verdict == Verdict()) == (num_kills == 1)
        assert verdict.was_killed == ("ended the process that tries it, 2 times" in verdict.refusal)
        assert await trial.judge('start: "c"') == Verdict()
    finally:
        trial.close()


def kill(trial: TrialProcess, victim: str) -> None:
    """Kills the child, or the process that forks it, and waits until it is gone."""
    pid = trial._forks.pid if victim == "parent" else trial._child
    process = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([process], [], [], 100.0)[0]
    os.close(process)


async def test_a_trial_that_gets_no_cpu_time_says_nothing_of_its_grammar() -> None:
    trial = process()
    try:
        assert await trial.judge('start: "a"') == Verdict()
        trial._patience = 0.2
        os.kill(trial._child, signal.SIGSTOP)
        verdict = await trial.judge('start: "b"')
        assert verdict.is_unknown and verdict.was_killed and "because the machine is busy" in verdict.refusal
        trial._patience = 1e9
        assert await trial.judge('start: "b"') == Verdict()
    finally:
        trial.close()


async def test_a_tokenizer_that_cannot_be_read_is_told() -> None:
    trial = TrialProcess(b"{}", vocab_size=10, eos_token_ids=[])
    try:
        with pytest.raises(TrialUnusable):
            await trial.judge('start: "a"')
    finally:
        trial.close()


class FakeProcess(TrialProcess):
    """Judges at a word of the test. `order` has the grammars in the order of their trials."""

    def __init__(self) -> None:
        super().__init__(b"", vocab_size=1, eos_token_ids=[])
        self.order: list[str] = []
        self.verdicts: asyncio.Queue[Verdict] = asyncio.Queue()

    async def judge(self, grammar: str) -> Verdict:
        self.order.append(grammar)
        return await self.verdicts.get()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def rig() -> tuple[FakeProcess, Clock, Trials]:
    fake, clock = FakeProcess(), Clock()
    return fake, clock, Trials(fake, clock=clock, on_end=lambda _: None)


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_equal_grammars_share_a_trial_and_results_are_kept() -> None:
    fake, _, of = rig()
    asked = [asyncio.create_task(of.judge(hash_of("g"), "g", tenant)) for tenant in ("a", "b")]
    await _settle()
    fake.verdicts.put_nowait(Verdict(refusal="no"))
    assert [await one for one in asked] == [Verdict(refusal="no")] * 2
    assert await of.judge(hash_of("g"), "g", "c") == Verdict(refusal="no")
    assert fake.order == ["g"]
    of.close()


async def test_what_is_unknown_is_tried_again() -> None:
    fake, _, of = rig()
    for verdict in (Verdict(is_unknown=True, was_killed=True), Verdict()):
        fake.verdicts.put_nowait(verdict)
        assert await of.judge(hash_of("g"), "g", "a") == verdict
    assert fake.order == ["g", "g"]
    of.close()


async def test_the_oldest_results_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MAX_KEPT", 2)
    fake, _, of = rig()
    for grammar in ("a", "b", "a", "c", "a", "b"):
        fake.verdicts.put_nowait(Verdict())
        await of.judge(hash_of(grammar), grammar, "t")
    assert fake.order == ["a", "b", "c", "b"]
    of.close()


async def test_a_tenant_has_eight_waiting_and_another_waits_for_one_of_them_at_most() -> None:
    fake, clock, of = rig()
    hostile = list[asyncio.Task[Verdict]]()
    for i in range(MAX_WAITING + 1):
        hostile.append(asyncio.create_task(of.judge(hash_of(f"h{i}"), f"h{i}", "hostile")))
        # The first one is being tried when the others come.
        await _settle()
    with pytest.raises(Refusal) as refused:
        await of.judge(hash_of("h9"), "h9", "hostile")
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "8 new constraints of the caller wait for their trial; the limit is 8" in refused.value.message
    polite = [asyncio.create_task(of.judge(hash_of(f"p{i}"), f"p{i}", "polite")) for i in range(2)]
    await _settle()
    for _ in range(MAX_WAITING + 3):
        clock.now += 2.0 if fake.order[-1].startswith("h") else 0.01
        fake.verdicts.put_nowait(Verdict())
        await _settle()
    assert fake.order[:3] == ["h0", "p0", "p1"]
    await asyncio.gather(*hostile, *polite)
    of.close()


async def test_a_grammar_whose_callers_have_all_gone_is_not_tried() -> None:
    fake, _, of = rig()
    asked = [asyncio.create_task(of.judge(hash_of(f"g{i}"), f"g{i}", "a")) for i in range(3)]
    await _settle()
    asked[1].cancel()
    await _settle()
    for _ in range(2):
        fake.verdicts.put_nowait(Verdict())
    await asyncio.gather(asked[0], asked[2])
    assert fake.order == ["g0", "g2"]
    of.close()


async def test_what_waits_is_refused_when_the_model_changes() -> None:
    _, _, of = rig()
    asked = asyncio.create_task(of.judge(hash_of("g"), "g", "a"))
    await _settle()
    of.close()
    with pytest.raises(Refusal, match="not served any more"):
        await asked
