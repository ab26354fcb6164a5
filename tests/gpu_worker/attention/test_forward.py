"""The worker's forward against Transformers' eager one: the results do not depend on how a sequence is computed."""

from collections.abc import Callable

import pytest

from tests.gpu_worker.rig import Recording, Rig, RigSpec
from tests.gpu_worker.rig_specs import SPECS

# It imports the compiler, which takes seconds.
pytestmark = pytest.mark.together("compiled here")


@pytest.fixture(params=SPECS, ids=str, scope="module")
def rig(request: pytest.FixtureRequest, rig_of: Callable[[RigSpec], Rig]) -> Rig:
    return rig_of(request.param)


def test_prefill_and_decode_match_eager_attention_over_a_page_edge(rig: Rig) -> None:
    page = rig.spec.page_size
    for i, length in enumerate([1, page - 1, page, page + 1, 2 * page, 2 * page + 1]):
        core, recording = rig.core(), Recording()
        core.add(1, rig.prompt(length, seed=i))
        rig.step(core, recording, chunks={1: length})
        for _ in range(3):
            rig.step(core, recording, decode=[1])
        rig.check(core, recording)


def test_chunked_prefill_matches_eager_attention(rig: Rig) -> None:
    page_size = rig.spec.page_size
    for i, size in enumerate([page_size // 2 - 1, page_size, page_size + 5]):
        core, recording = rig.core(), Recording()
        length = 2 * page_size + 3
        core.add(2, rig.prompt(length, seed=10 + i))
        for start in range(0, length, size):
            rig.step(core, recording, chunks={2: min(size, length - start)})
        rig.step(core, recording, decode=[2])
        rig.check(core, recording)


def test_mixed_steps_match_eager_attention(rig: Rig) -> None:
    """Decode rows and chunks of other rows share steps; pages are allocated in random order."""
    page_size = rig.spec.page_size
    pages = list(range(1, rig.geometry.num_pages))
    core = rig.core(page_order=[*pages[1::2], *pages[::2]])
    recording = Recording()
    core.add(3, rig.prompt(page_size - 2, seed=20))
    core.add(1, rig.prompt(page_size + 9, seed=21))
    core.add(2, rig.prompt(2 * page_size - 1, seed=22))
    rig.step(core, recording, chunks={3: page_size - 2})
    rig.step(core, recording, chunks={1: 7}, decode=[3])
    rig.step(core, recording, chunks={2: page_size, 1: page_size + 2}, decode=[3])
    rig.step(core, recording, chunks={2: page_size - 1}, decode=[1, 3])
    for _ in range(3):
        rig.step(core, recording, decode=[3, 1, 2])
    rig.check(core, recording)


def test_a_resumed_sequence_matches_on_other_pages_and_another_row(rig: Rig) -> None:
    """As after preemption and a lane reset, the known tokens, generated ones included, are computed again elsewhere."""
    page_size = rig.spec.page_size
    core = rig.core()
    first = core.add(1, rig.prompt(page_size, seed=30))
    rig.step(core, chunks={1: page_size})
    for _ in range(2):
        rig.step(core, decode=[1])
    core.free(first)
    core.add(3, rig.prompt(page_size + 1, seed=31))
    recording = Recording()
    core.add(2, first.tokens)
    rig.step(core, recording, chunks={3: page_size + 1, 2: 5})
    rig.step(core, recording, chunks={2: len(first.tokens) - 5}, decode=[3])
    rig.step(core, recording, decode=[2, 3])
    rig.check(core, recording)
