"""Hostile peers on the internal sockets: their frames are dropped or refused, and running streams continue."""

import os
import random
import shutil
import signal
from collections.abc import Iterator

import pytest
import zmq
from tandem.internal.v1 import frontend_pb2, worker_pb2

from tests.rigs.processes import Rig
from tests.system.asks import answer, random_asks, send

NUM_FRAMES = 1500


def _good_frames() -> list[bytes]:
    """Valid messages with random or too large numbers."""
    to_core = worker_pb2.WorkerToCore
    result = worker_pb2.StepResult(generation=1, step=1, status=worker_pb2.STEP_STATUS_OK, tokens=b"\1\0\0\0" * 9)
    join = worker_pb2.Join(protocol=9, identity="x", vocab_size=1, page_size=0, num_pages=2**32 - 1, max_rows=2**32 - 1)
    submit = frontend_pb2.Submit(
        stream=1, request_id="r", prompt=b"\1\0\0\0", max_new_tokens=2**32 - 1, sampling=b"\xff"
    )
    fair = frontend_pb2.Submit(stream=2, request_id="fair", prompt=b"\1\0\0\0", max_new_tokens=50, num_samples=1)
    from_frontend = frontend_pb2.FrontendToCore
    return [
        message.SerializeToString()
        for message in (
            to_core(join=join),
            to_core(join=worker_pb2.Join(protocol=9, identity="x", pid=1)),
            to_core(result=result),
            to_core(heartbeat=worker_pb2.Heartbeat(phase="x" * 1000)),
            to_core(leave=worker_pb2.Leave()),
            to_core(),
            from_frontend(submit=submit),
            from_frontend(submit=fair),
            from_frontend(hello=frontend_pb2.Hello()),
            from_frontend(cancel=frontend_pb2.Cancel(stream=2**64 - 1)),
            from_frontend(finish=frontend_pb2.Finish(stream=1, output_tokens=2**32 - 1)),
            from_frontend(abort=frontend_pb2.Abort(query=1, request_ids=["unknown"])),
            from_frontend(load_query=frontend_pb2.LoadQuery(query=2**64 - 1)),
        )
    ]


def _frames(rng: random.Random) -> Iterator[list[bytes]]:
    good = _good_frames()
    for _ in range(NUM_FRAMES):
        frame = bytearray(rng.choice(good))
        for _ in range(rng.randrange(4)):
            if frame:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
        kind = rng.random()
        if kind < 0.1:
            yield [rng.randbytes(rng.randrange(200))]
        elif kind < 0.2:
            yield [bytes(frame), rng.randbytes(3), b""]
        else:
            yield [bytes(frame)]


@pytest.mark.parametrize("name", ["worker.sock", "frontend.sock"])
def test_hostile_frames_disturb_no_stream(rig: Rig, name: str) -> None:
    flags = ("--max-rows", "8", "--num-pages", "1200", "--max-length", "500")
    scheduler, worker, caller = rig.serve(*flags, scheduler_flags=("--log-level", "error"))
    streams = send(caller, random_asks(10, seed=20, prompts=(1, 30), outputs=(100, 120)))
    streams[0].wait_tokens(1)
    context = zmq.Context()
    try:
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 5000)
        stranger.setsockopt(zmq.SNDTIMEO, 20_000)
        stranger.connect(f"ipc://{rig.runtime_dir}/{name}")
        for parts in _frames(random.Random(name)):
            stranger.send_multipart(parts)
        stranger.close()
    finally:
        context.term()
    streams.check()
    assert caller.wait_idle().worker_pid == worker.pid
    assert scheduler.exit_code is None


def test_a_forged_hello_leaves_the_real_front_end_connected(rig: Rig) -> None:
    scheduler, _, caller = rig.serve("--max-rows", "4", "--max-length", "500", "--num-pages", "600")
    before = scheduler.frontend_pid()
    streams = send(caller, random_asks(4, seed=21, prompts=(1, 30), outputs=(100, 120)))
    streams[0].wait_tokens(1)
    hello = frontend_pb2.FrontendToCore(hello=frontend_pb2.Hello(secret=b"x" * 32))
    submit = frontend_pb2.Submit(stream=1, request_id="stray", prompt=b"\1\0\0\0", max_new_tokens=9, num_samples=1)
    context = zmq.Context()
    # The forged name holds the real process id; its disconnect must not count as the end of that process.
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.ROUTING_ID, f"f-{before}-\x1b[2J".encode())
    stranger.connect(f"ipc://{rig.runtime_dir}/frontend.sock")
    for message in (hello, frontend_pb2.FrontendToCore(submit=submit)):
        stranger.send(message.SerializeToString())
    line = scheduler.wait_line(r"front end f-\d+-.*dropped a frame: its Hello does not have the secret of this service")
    assert r"-\x1b[2J: dropped" in line.string
    stranger.close(0)
    context.term()
    streams.check()
    caller.wait_idle()
    assert scheduler.frontend_pid() == before


def test_a_worker_with_another_key_never_joins(rig: Rig) -> None:
    scheduler, worker, caller = rig.serve()
    stray = rig.worker("--without-key", "--max-length", "100000", "--model", "stray", late=False)
    stray.wait_line(r"stopped its key is not the one in .*/worker\.key: ")
    assert stray.wait() == 3
    assert caller.model_info().model == "checking"
    assert caller.load().worker_pid == worker.pid
    # A worker may start before the scheduler creates the key; both must read the same key.
    scheduler.terminate()
    (rig.runtime_dir / "worker.key").unlink()
    first = rig.worker()
    first.wait_line("waits for a scheduler")
    caller = rig.ready_caller(rig.scheduler())
    assert caller.load().worker_pid == first.pid
    assert (rig.runtime_dir / "worker.key").stat().st_mode & 0o777 == 0o600


def test_a_removed_runtime_folder_is_made_again_and_peers_join(rig: Rig) -> None:
    scheduler, worker, caller = rig.serve()
    shutil.rmtree(rig.runtime_dir)
    scheduler.wait_line(f"{rig.runtime_dir} was removed or replaced, and was made again: workers join")
    second = rig.worker()
    caller.wait_load(lambda load: {one.pid for one in load.per_worker} == {worker.pid, second.pid})
    for ask in random_asks(3, seed=22, prompts=(1, 30), outputs=(1, 20)):
        answer(caller, ask)
    number = len(scheduler.lines)
    os.kill(scheduler.frontend_pid(), signal.SIGKILL)
    scheduler.wait_line("frontend listening on " + scheduler.address, after=number)
    rig.caller(scheduler).wait_serving()
