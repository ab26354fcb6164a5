"""A runtime folder on a disk that is really full: what is served goes on, and a program that cannot start names it."""

import os
import signal
from pathlib import Path

import pytest

from tandem_client import Client
from tandem_contract.files import KEY_NAME
from tests.rigs.processes import Rig, run
from tests.rigs.small_disk import fill, small_disk

SHAPE = ("--page-size", "4", "--num-pages", "256", "--max-rows", "8", "--max-length", "256")
FULL = "No space left on device"


def test_it_stops_nothing_that_is_served() -> None:
    """Workers and front ends are replaced; what cannot be written is said once."""
    with Rig() as rig, small_disk(rig.runtime_dir, "512k"):
        scheduler, worker, _ = rig.serve(*SHAPE)
        ballast = fill(rig.runtime_dir)
        with Client(scheduler.address, max_retries=20) as client:

            def ask() -> int:
                client.wait_ready(60)
                return sum(len(delta.token_ids) for delta in client.generate([1, 7], max_new_tokens=9, ignore_eos=True))

            assert ask() == 9
            worker.kill()
            worker = rig.worker(*SHAPE)
            os.kill(scheduler.frontend_pid(), signal.SIGKILL)
            scheduler.wait_line("the front end ended with code -9 and is restarted")
            assert ask() == 9
            # Another program takes the room that the key leaves.
            scheduler.signal(signal.SIGSTOP)
            key = rig.runtime_dir / KEY_NAME
            key.unlink()
            fill(rig.runtime_dir)
            scheduler.signal(signal.SIGCONT)
            scheduler.wait_line(f"{key} was removed or replaced, and cannot be made again: {FULL}; connected workers")
            assert ask() == 9
            ballast.unlink()
            scheduler.wait_line(f"{key} was removed or replaced, and was made again")
            worker.kill()
            worker = rig.worker(*SHAPE)
            assert ask() == 9
        assert [scheduler.terminate(), worker.terminate()] == [0, 0]
    said = [line for line in scheduler.lines if FULL in line]
    folder = f"the flight recorder's folder {rig.runtime_dir}/flight cannot be written: {FULL}"
    assert [folder in line or "cannot be made again" in line for line in said] == [True] * len(said)
    assert sum("cannot be made again" in line for line in said) == 1 and sum(folder in line for line in said) <= 1


@pytest.mark.parametrize(
    ("program", "lacks"),
    [
        (("scheduler_svc", "--listen=127.0.0.1:0"), "room"),
        (("scheduler_svc", "--listen=127.0.0.1:0"), "files"),
        (("gpu_worker.holder",), "files"),
        (("tandem_client.cli", "serve", "--listen=127.0.0.1:0", "--shared-pool=off"), "files"),
    ],
)
def test_a_program_that_cannot_start_names_it(tmp_path: Path, program: tuple[str, ...], lacks: str) -> None:
    with small_disk(tmp_path, "64k", num_files=1000 if lacks == "room" else 2):
        if lacks == "room":
            fill(tmp_path)
        else:
            # The folder itself is the other one.
            (tmp_path / "only").touch()
        done = run(*program, f"--runtime-dir={tmp_path}")
        found = sorted(path.name for path in tmp_path.iterdir())
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    [*_, last] = (done.stdout + done.stderr).splitlines()
    assert str(tmp_path) in last and last.endswith(f"cannot be used: {FULL}"), last
    assert found in (["fill"], ["fill", "scheduler.lock"], ["only"])
