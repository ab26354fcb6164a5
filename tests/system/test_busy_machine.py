"""No healthy worker is given up on a machine that has too much to do: four busy loops beside the real model."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tandem_client import Client
from tests.rigs.processes import Child, Rig

_SECONDS, _CALLERS, _LOOPS = 60.0, 8, 4


@pytest.fixture
def busy_loops() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(_LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def traffic(client: Client, seed: int, until: float, tokens: list[int]) -> None:
    """Short and long prompts with short and long answers, one after the other."""
    rng = random.Random(seed)
    while time.monotonic() < until:
        prompt = [rng.randrange(1, 200) for _ in range(rng.choice([5, 50, 400, 900]))]
        stream = client.generate(prompt, max_new_tokens=rng.choice([1, 20, 100]), ignore_eos=True, timeout=300.0)
        tokens.append(sum(len(delta.token_ids) for delta in stream))


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("busy_loops")
def test_no_healthy_worker_is_given_up_beside_four_busy_loops(rig: Rig) -> None:
    arguments = ["gpu_worker", "--runtime-dir", str(rig.runtime_dir), "--device", "cpu", "--exit-with-parent"]
    rig.children.append(Child("real worker", arguments))
    # The rig is the parent of both programs, so a worker that is given up would be killed.
    scheduler = rig.scheduler("--exit-with-parent")
    tokens: list[int] = []
    with Client(scheduler.address) as client:
        client.wait_ready(120.0)
        until = time.monotonic() + _SECONDS
        callers = [
            threading.Thread(target=traffic, args=(client, seed, until, tokens), daemon=True)
            for seed in range(_CALLERS)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(_SECONDS + 200)
        load = client.load()
    given_up = load.incidents.hung_workers
    print(
        f"{given_up} workers given up; {len(tokens)} requests, {sum(tokens)} tokens, {load.steps} steps, "
        f"median step {load.step_ms:.1f} ms, {_LOOPS} busy loops, {_SECONDS:g} s"
    )
    assert (given_up, load.lane_resets) == (0, 0), load.worker_lost_reason
    assert len(tokens) >= _CALLERS and sum(tokens) > 0
