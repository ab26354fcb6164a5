"""The scheduler dies: with a journal, streams that resume go on in the next one, and miss and repeat nothing."""

import os
import random
import signal
from collections import Counter
from itertools import islice

import pytest

from scheduler_svc.journal import reader
from scheduler_svc.journal.file import JournalFolder
from tandem_client import Client
from tests.rigs.processes import Rig, SchedulerProcess
from tests.rigs.waiting import TIMEOUT_SECONDS, until
from tests.system.asks import Ask, random_asks
from tests.system.featured import Reading

SHAPE = ("--num-pages", "2048", "--max-rows", "32", "--max-length", "1024", "--page-size", "16", "--step-ms", "2")


def journal_flags(rig: Rig, *more: str) -> tuple[str, ...]:
    return ("--journal", str(rig.runtime_dir / "journal"), *more)


def restarted(rig: Rig, scheduler: SchedulerProcess, *flags: str) -> SchedulerProcess:
    """Kills the scheduler and starts another at the same address."""
    address = scheduler.address
    scheduler.kill_with_frontends()
    return rig.scheduler(*journal_flags(rig, *flags), listen=address)


def stop_asks(count: int, seed: int) -> list[Ask]:
    """Requests of one to three samples, some with a stop string."""
    asks = random_asks(count, seed=seed, prompts=(1, 60), outputs=(100, 160))
    return [
        Ask(
            prompt=ask.prompt, max_new_tokens=ask.max_new_tokens, temperature=ask.temperature, seed=ask.seed,
            num_samples=1 + i % 3, stop_strings=("q",) if i % 4 == 0 else (), request_id=f"lost-{seed}-{i}",
        )
        for i, ask in enumerate(asks)
    ]  # fmt: skip


def test_streams_survive_three_deaths_of_the_scheduler(rig: Rig) -> None:
    flags = journal_flags(rig, "--record", str(rig.runtime_dir / "record-0"))
    scheduler, _, caller = rig.serve(*SHAPE, scheduler_flags=flags)
    rig.worker(*SHAPE)
    with Client(scheduler.address) as client:
        reading = Reading(client, stop_asks(12, seed=31), resume=True)
        for number in range(1, 4):
            reading.wait_more(200)
            scheduler = restarted(rig, scheduler, "--record", str(rig.runtime_dir / f"record-{number}"))
        reading.wait_more(200)
        # A front end's death beside it.
        os.kill(scheduler.frontend_pid(), signal.SIGKILL)
        reading.check()
    assert len(reading.streams) == 12
    caller = rig.ready_caller(scheduler)
    caller.wait_idle()
    assert caller.load().journal_bytes > 0
    assert scheduler.terminate() == 0
    rig.check_record(rig.runtime_dir / "record-3", audited=True)


@pytest.mark.long
def test_streams_survive_100_random_deaths(rig: Rig) -> None:
    """Schedulers, front ends and workers die. Streams follow each other, so that there are always 12."""
    seed = int(os.environ.get("TANDEM_TEST_SEED", "1"))
    rng, count = random.Random(seed), Counter[str]()
    scheduler, worker, _ = rig.serve(*SHAPE, scheduler_flags=journal_flags(rig, "--frontends", "2"))
    workers = [worker, rig.worker(*SHAPE)]
    asks = iter(stop_asks(2000, seed=seed))
    interrupted = 0
    with Client(scheduler.address) as client:
        reading = Reading(client, [], resume=True, timeout=600.0)
        while count.total() < 100:
            missing = 12 - len(reading.running)
            if missing:
                # A service that is not ready keeps no request, and neither does one that dies before it accepts it.
                client.wait_ready(TIMEOUT_SECONDS)
                reading.start(islice(asks, missing))
                reading.wait_accepted()
            reading.wait_more(rng.randint(1, 400))
            kind = rng.choices(["scheduler", "front end", "worker"], [1, 1, 2])[0]
            count[kind] += 1
            if kind == "scheduler":
                interrupted += len(reading.running)
                scheduler = restarted(rig, scheduler, "--frontends", "2")
            elif kind == "front end":
                both = until(
                    lambda scheduler=scheduler: len(found := scheduler.frontends()) == 2 and found, "two front ends"
                )
                rng.choice(both).kill()
            else:
                workers.pop(rng.randrange(2)).kill()
                workers.append(rig.worker(*SHAPE))
        reading.check()
    print(
        f"seed {seed}: {', '.join(f'{number} {kind} deaths' for kind, number in sorted(count.items()))};"
        f" {len(reading.streams)} streams equal the oracle; schedulers died under {interrupted} of them in all"
    )


def test_a_stopped_service_leaves_a_journal_of_the_ended_requests(rig: Rig) -> None:
    scheduler, _, _ = rig.serve(*SHAPE, scheduler_flags=journal_flags(rig))
    with Client(scheduler.address) as client:
        Reading(client, stop_asks(3, seed=32), resume=True).check()
    assert scheduler.terminate() == 0
    path = rig.runtime_dir / "journal"
    assert path.stat().st_mode & 0o777 == 0o700
    assert {(file.name, file.stat().st_mode & 0o777) for file in path.iterdir()} == {
        ("journal", 0o600),
        ("lock", 0o600),
    }
    folder = JournalFolder(path)
    saved = reader.read(folder)
    folder.close()
    ids = {request.submit.request_id for request in saved.requests}
    assert ids == {f"lost-32-{i}" for i in range(3)}
    assert all(sample.end for request in saved.requests for sample in request.samples)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"tandem journal 9\n", "has format 9; this program reads format 1 only; remove it or choose another folder"),
        (b"PNG", "is not a journal; remove it or choose another folder with --journal"),
    ],
)
def test_a_file_of_another_kind_ends_the_start_with_a_sentence(rig: Rig, content: bytes, sentence: str) -> None:
    folder = rig.runtime_dir / "journal"
    folder.mkdir(mode=0o700)
    (folder / "journal").touch(0o600)
    (folder / "journal").write_bytes(content)
    scheduler = rig.launch_scheduler(*journal_flags(rig))
    assert scheduler.wait() == 2
    scheduler.join_output()
    assert (
        scheduler.lines == [f"scheduler_svc: journal: {folder / 'journal'} {sentence}"]
        or sentence in scheduler.output()
    )
    rig.children.remove(scheduler)


def test_a_second_scheduler_does_not_get_the_same_journal(rig: Rig) -> None:
    first = rig.scheduler(*journal_flags(rig))
    with Rig() as other:
        second = other.launch_scheduler("--journal", str(rig.runtime_dir / "journal"))
        assert second.wait() == 2
        second.join_output()
        assert (
            f"journal: another scheduler (process {first.pid}) holds {rig.runtime_dir / 'journal'}" in second.output()
        )
        other.children.remove(second)
