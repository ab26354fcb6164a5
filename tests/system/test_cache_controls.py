"""What a caller says of the cache, over real gRPC: whose pages it finds, what it leaves, and forgetting all of them."""

import pytest
from tandem.v1 import inference_pb2 as pb

from tests.rigs.streams import Caller
from tests.system.asks import Ask
from tests.system.conftest import Served

PAGE_SIZE = 4
# Ten full pages and a token.
PROMPT = tuple(range(40, 81))
WHOLE = len(PROMPT) - len(PROMPT) % PAGE_SIZE


@pytest.fixture
def caller(served: Served) -> Caller:
    served.caller.flush_cache()
    return served.caller


def ask(num_samples: int = 1, **cache: object) -> Ask:
    extra = pb.GenerateRequest(cache=pb.CacheParams(**cache))  # type: ignore[arg-type]
    return Ask(prompt=PROMPT, max_new_tokens=3, num_samples=num_samples, extra=extra)


def cached(caller: Caller, asked: Ask) -> int:
    """Prompt tokens that were not computed; what came is right in any case."""
    transcript = caller.generate(asked.request()).result()
    asked.check(transcript)
    assert transcript.summary.usage.prompt_tokens == len(PROMPT)
    return transcript.summary.usage.cached_prompt_tokens


def test_a_prompt_is_found_again(caller: Caller) -> None:
    before = caller.load()
    assert [cached(caller, ask()) for _ in range(2)] == [0, WHOLE]
    after = caller.load()
    assert after.prompt_tokens - before.prompt_tokens == 2 * len(PROMPT)
    assert after.cached_prompt_tokens - before.cached_prompt_tokens == WHOLE
    assert after.pages_cached == sum(worker.pages_cached for worker in after.per_worker) >= WHOLE // PAGE_SIZE


def test_a_salt_finds_its_own_and_no_others(caller: Caller) -> None:
    salts = ["", "a", "b", "a", "", "b"]
    assert [cached(caller, ask(salt=salt)) for salt in salts] == [0, 0, 0, WHOLE, WHOLE, WHOLE]


def test_who_bypasses_reading_finds_nothing_and_is_found(caller: Caller) -> None:
    cached(caller, ask())
    assert cached(caller, ask(bypass_read=True)) == 0
    caller.flush_cache()
    assert cached(caller, ask(bypass_read=True)) == 0
    assert cached(caller, ask()) == WHOLE


def test_who_bypasses_writing_leaves_nothing_and_finds(caller: Caller) -> None:
    assert cached(caller, ask(bypass_write=True)) == 0
    assert caller.load().pages_cached == 0
    assert cached(caller, ask()) == 0
    assert cached(caller, ask(bypass_write=True)) == WHOLE


def test_a_flush_forgets_everything_and_counts_it(caller: Caller) -> None:
    cached(caller, ask())
    kept = caller.load().pages_cached
    assert caller.flush_cache() == kept > 0
    assert caller.load().pages_cached == 0
    assert caller.flush_cache() == 0
    assert cached(caller, ask()) == 0


def test_samples_tell_what_the_first_one_found(caller: Caller) -> None:
    cached(caller, ask())
    assert cached(caller, ask(num_samples=3)) == WHOLE
