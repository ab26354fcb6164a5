"""The lengths and windows that are compared, and their costs."""

from scheduler_svc.simulator.cost.hardware import MODELS
from scheduler_svc.simulator.memory.comparison import compare
from scheduler_svc.simulator.memory.geometry import Geometry
from scheduler_svc.simulator.memory.recompute import generate, next_token
from scheduler_svc.simulator.memory.workload import Workload
from tests.scheduler_svc.simulator.memory.asking import sequence, settings

GEOMETRY = Geometry(model=MODELS["qwen-3-0.6b"])
# Three tokens are generated. They attend to 3 + 4 + 5 keys, or to 3 + 3 + 3 with a window of three.
WORKLOAD = Workload(clients=(((sequence(0, [0] * 5, prompt=2),),),), arrivals=(0,))


def test_compared_lengths_are_powers_of_two_and_the_longest_sequence():
    comparison = compare(settings(max_length=300), WORKLOAD, GEOMETRY)
    assert [(at.length, at.prompt) for at in comparison.lengths] == [(128, 64), (256, 128), (300, 150)]
    last = comparison.lengths[-1]
    # The last token is generated behind 299 others.
    assert last.token_cached == next_token(GEOMETRY, 299, cached=True)
    assert last.token_recomputed == next_token(GEOMETRY, 299, cached=False)
    assert last.total_cached == generate(GEOMETRY, 150, 300, cached=True)
    assert last.total_recomputed == generate(GEOMETRY, 150, 300, cached=False)
    # Without a cache the forwards compute 150, 151, … 299 tokens, with one they compute 299 in all. The logits, which
    # are a quarter of this model's products, are computed 150 times either way.
    tokens = sum(range(150, 300)) / 299
    assert 0.8 * tokens < last.flops_ratio < tokens


def test_compared_windows_are_the_window_of_the_run_or_common_ones():
    of_its_own = compare(settings(max_length=300, window=3), WORKLOAD, GEOMETRY).windows
    assert [window.window for window in of_its_own] == [3]
    assert of_its_own[0].full_bytes == 4 * GEOMETRY.token_bytes
    assert of_its_own[0].bytes == 3 * GEOMETRY.token_bytes
    assert of_its_own[0].saved == 0.25
    usual = compare(settings(max_length=600), WORKLOAD, GEOMETRY).windows
    assert [(window.window, window.saved) for window in usual] == [(256, 0), (512, 0)]
