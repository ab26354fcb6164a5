"""Windows, sink tokens and host memory in the whole service: outputs longer than the pool, prefix hits past a window,
and preempted requests that resume without computing again."""

from tests.rigs.processes import Rig
from tests.system.asks import Ask, answer, random_asks, send

# 23 pages of 4 tokens; a row with a window of 16 holds two pages of sink tokens and a few more.
WINDOW = ("--page-size", "4", "--num-pages", "24", "--max-rows", "4", "--max-length", "2000", "--token-budget", "64")
WINDOWED = ("--window", "16", "--sink-tokens", "5")


def test_outputs_far_longer_than_the_pool_run_side_by_side(rig: Rig) -> None:
    _, worker, caller = rig.serve(*WINDOW, *WINDOWED)
    info = caller.model_info()
    assert (info.window, info.sink_tokens, info.num_pages) == (16, 5, 23)
    with rig.slowed():
        streams = send(caller, random_asks(4, seed=1, prompts=(150, 200), outputs=(120, 160)))
        # The next worker computes all tokens again, with the same window.
        running = caller.wait_load(lambda load: load.running >= 2 and load.output_tokens >= 100).running
        worker.kill()
    rig.worker(*WINDOW, *WINDOWED)
    streams.check()
    assert 1 <= sum(streams.worker_changes()) <= running + 1
    caller.wait_idle()


def test_a_prefix_hit_needs_only_the_pages_inside_the_window(rig: Rig) -> None:
    _, _, caller = rig.serve(*WINDOW, *WINDOWED)
    prompt = tuple(range(81))
    for hit in (0, 80):
        ask = Ask(prompt=prompt, max_new_tokens=4, num_samples=1 + (hit > 0))
        assert answer(caller, ask).summary.usage.cached_prompt_tokens == hit
    # A hit needs the sink tokens' pages, too; without them the prompt is computed again.
    caller.flush_cache()
    assert answer(caller, Ask(prompt=prompt, max_new_tokens=4)).summary.usage.cached_prompt_tokens == 0
    caller.wait_idle()


def test_preempted_requests_resume_from_host_memory(rig: Rig) -> None:
    host = ("--host-pages", "1024", "--page-copy-us", "1", "--token-us", "50")
    shape = ("--page-size", "4", "--num-pages", "120", "--max-rows", "12", "--max-length", "400")
    _, _, caller = rig.serve(*shape, *host)
    assert (caller.load().host_pages_used, caller.load().host_pages_total) == (0, 1024)
    # Each request fills half of the pool in the end.
    streams = send(caller, random_asks(8, seed=2, prompts=(1, 60), outputs=(180, 220)))
    streams.check()
    load = caller.wait_idle()
    assert load.preemptions > 0
    assert load.host_pages_used > 0
    # Of each preempted request, only the last, partial page is computed again.
    recomputed = sum(stream.transcript.summary.usage.recomputed_tokens for stream in streams)
    assert recomputed <= 4 * load.preemptions
    assert caller.flush_cache() >= load.host_pages_used
    assert caller.load().host_pages_used == 0
