"""The real worker on a busy machine, and hung: a healthy one is never given up, a hung one is killed and replaced."""

import random
import signal
import threading
import time
from itertools import pairwise

import psutil
import pytest

from tandem_client import Client
from tests.rigs.busy_loops import busy_loops
from tests.rigs.processes import Rig
from tests.rigs.waiting import TIMEOUT_SECONDS

_SECONDS, _CALLERS, _LOOPS = 60.0, 8, 4


def traffic(client: Client, seed: int, until: float, tokens: list[int]) -> None:
    """Short and long prompts with short and long answers, one after the other."""
    rng = random.Random(seed)
    while time.monotonic() < until:
        prompt = [rng.randrange(1, 200) for _ in range(rng.choice([5, 50, 400, 900]))]
        stream = client.generate(prompt, max_new_tokens=rng.choice([1, 20, 100]), ignore_eos=True, timeout=300.0)
        tokens.append(sum(len(delta.token_ids) for delta in stream))


@pytest.mark.long
def test_no_healthy_worker_is_given_up_beside_four_busy_loops(rig: Rig) -> None:
    where = ("--runtime-dir", str(rig.runtime_dir), "--device", "cpu", "--exit-with-parent")
    rig.start("real worker", "gpu_worker", *where)
    # The rig is the parent of both programs, so a worker that is given up would be killed.
    scheduler = rig.scheduler("--exit-with-parent")
    tokens: list[int] = []
    with busy_loops(_LOOPS), Client(scheduler.address) as client:
        client.wait_ready(TIMEOUT_SECONDS)
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


@pytest.mark.long
def test_tandem_serve_replaces_a_worker_that_hangs_in_a_step(rig: Rig) -> None:
    arguments = ["tandem_client.cli", "serve", "--listen", "127.0.0.1:0", "--device", "cpu"]
    serve = rig.start("serve", *arguments, "--runtime-dir", str(rig.runtime_dir))
    address = serve.wait_line(r"frontend listening on (\S+:\d+)", 120.0).group(1)
    prompt, options = [5, 6, 7], {"max_new_tokens": 300, "ignore_eos": True, "temperature": 0.0, "timeout": 300.0}
    with Client(address) as client:
        client.wait_ready(TIMEOUT_SECONDS)
        undisturbed = [token for delta in client.generate(prompt, **options) for token in delta.token_ids]
        hung, tokens, times = client.load().worker_pid, [], []
        for delta in client.generate(prompt, **options):
            tokens += delta.token_ids
            times.append(time.monotonic())
            if len(times) == 20:
                psutil.Process(hung).suspend()
        load = client.load()
    pause = max(after - before for before, after in pairwise(times))
    print(f"the longest pause of the stream was {pause:.2f} s: {load.worker_lost_reason}")
    assert tokens == undisturbed
    assert load.incidents.hung_workers == 1 and load.worker_pid not in (0, hung)
    serve.wait_line(f"killed the hung worker .*, process {hung}")
    serve.wait_line(f"the worker was ended by {signal.SIGKILL.name}; it starts again")
