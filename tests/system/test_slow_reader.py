"""A caller that stops reading delays only its own stream and costs bounded memory."""

import grpc
import psutil

from tests.rigs.processes import Rig
from tests.rigs.streams import code_of
from tests.system.asks import Ask, random_asks, send

SHAPE = ("--num-pages=4096", "--page-size=16", "--max-rows=64", "--max-length=4096", "--token-budget=256")
# With a window this small the server's writes block after a few messages.
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]


def test_stalled_readers_delay_no_other_stream_and_lose_no_token(rig: Rig) -> None:
    scheduler, _, caller = rig.serve(*SHAPE, late=False)
    stalled_caller = rig.caller(scheduler, options=SMALL_WINDOW)
    frontend = psutil.Process(scheduler.frontend_pid())
    asks = random_asks(8, seed=13, prompts=(1, 30), outputs=(60, 80))

    def run_all() -> None:
        send(caller, asks).check()

    run_all()
    before = frontend.memory_info().rss
    slow_asks = [Ask(prompt=(i, ord("a")), max_new_tokens=800) for i in range(8)]
    stalled = [stalled_caller.generate(ask.request(), stalled=True) for ask in slow_asks]
    caller.wait_load(lambda load: load.running == 8)
    # They would wait for ever for the stalled readers.
    run_all()
    # All tokens of the stalled streams are computed without being read.
    caller.wait_idle()
    grown = frontend.memory_info().rss - before
    assert not any(stream.ended for stream in stalled)
    # 6,400 tokens wait in 8 pending deltas.
    assert grown < 8 << 20, f"the front end grew by {grown} bytes"
    for ask, stream in zip(slow_asks[:4], stalled, strict=False):
        stream.resume()
        ask.check(stream.result())
        # The tokens of the stall arrive merged, not as a message per token.
        assert stream.transcript.num_deltas < 500
    for stream in stalled[4:]:
        stream.cancel()
        assert code_of(stream.failed()) == grpc.StatusCode.CANCELLED
    caller.wait_idle()


def test_a_stalled_reader_can_be_cancelled_during_a_write(rig: Rig) -> None:
    scheduler, _, caller = rig.serve(*SHAPE, "--step-ms", "1", late=False)
    stalled_caller = rig.caller(scheduler, options=SMALL_WINDOW)
    ask = Ask(prompt=(1, ord("a")), max_new_tokens=4000)
    streams = [stalled_caller.generate(ask.request(), stalled=True) for _ in range(4)]
    # The output is far larger than the window, so the front end's write blocks.
    start = caller.wait_load(lambda load: load.running == 4).steps
    caller.wait_load(lambda load: load.steps > start + 400)
    for stream in streams:
        stream.cancel()
        assert code_of(stream.failed()) == grpc.StatusCode.CANCELLED
    assert caller.wait_idle().steps < start + 4000


def test_a_deadline_frees_the_request_of_a_stalled_reader(rig: Rig) -> None:
    scheduler, _, caller = rig.serve(*SHAPE, "--step-ms", "2", late=False)
    stalled_caller = rig.caller(scheduler, options=SMALL_WINDOW)
    ask = Ask(prompt=(1, ord("a")), max_new_tokens=4000)
    before = caller.load().steps
    stream = stalled_caller.generate(ask.request(), timeout=2.0, stalled=True)
    caller.wait_load(lambda load: load.steps > before)
    assert caller.wait_idle().steps < 3900
    stream.resume()
    assert code_of(stream.failed()) == grpc.StatusCode.DEADLINE_EXCEEDED
