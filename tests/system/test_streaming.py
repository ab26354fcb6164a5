"""The output of the whole service equals the oracle: prompts and outputs of each kind, alone and together."""

import pytest

from tests.rigs import byte_tokenizer
from tests.rigs.processes import Rig
from tests.system.asks import Ask, answer, send
from tests.system.conftest import Served

PROMPT = tuple(b"Once upon a time")


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_one_stream_equals_the_oracle(served: Served, temperature: float) -> None:
    ask = Ask(prompt=PROMPT, max_new_tokens=100, temperature=temperature, seed=2**64 - 1, request_id="one")
    transcript = answer(served.caller, ask)
    accepted = transcript.accepted
    assert accepted.request_id == "one"
    assert accepted.max_new_tokens == 100
    assert accepted.sampling.seed == 2**64 - 1
    assert accepted.sampling.temperature == pytest.approx(temperature)
    for name in ("top_p", "top_k", "min_p"):
        assert accepted.sampling.HasField(name)
    timing = transcript.summary.timing
    assert 0 <= timing.queue_seconds <= timing.first_token_seconds <= timing.total_seconds
    assert timing.first_token_seconds + timing.decode_seconds <= timing.total_seconds + 1e-6


def test_a_drawn_seed_is_reported_and_reproduces_the_output(served: Served) -> None:
    ask = Ask(prompt=PROMPT, max_new_tokens=20, temperature=1.0)
    request = ask.request()
    request.sampling.ClearField("seed")
    first = served.caller.generate(request).result()
    second = served.caller.generate(request).result()
    assert first.accepted.sampling.seed != second.accepted.sampling.seed
    for transcript in (first, second):
        drawn = Ask(prompt=PROMPT, max_new_tokens=20, temperature=1.0, seed=transcript.accepted.sampling.seed)
        drawn.check(transcript)


def test_a_text_prompt_equals_its_tokens(served: Served) -> None:
    text = "é and 日本: <eos> is one token"
    tokens = served.caller.tokenize(text)
    assert byte_tokenizer.EOS_ID in tokens
    assert served.caller.detokenize(tokens, skip_special_tokens=False) == text
    assert served.caller.detokenize(tokens) == text.replace("<eos>", "")
    ask = Ask(prompt=tuple(tokens), max_new_tokens=12)
    request = ask.request()
    request.text = text
    ask.check(served.caller.generate(request).result())


def test_prompts_and_outputs_at_edges_equal_the_oracle(served: Served) -> None:
    """The edges are those of pages of 4 tokens, steps of 64, a sequence of 512, and a single new token."""
    lengths = (1, 3, 4, 5, 8, 15, 16, 17, 64, 65, 128)
    asks = [Ask(prompt=tuple(b"x" * length), max_new_tokens=9) for length in lengths]
    asks += [Ask(prompt=PROMPT[:length], max_new_tokens=1) for length in (1, 4, 7)]
    asks += [Ask(prompt=PROMPT, max_new_tokens=512 - len(PROMPT)), Ask(prompt=tuple(b"y" * 511), max_new_tokens=1)]
    send(served.caller, asks).check()


def _ends_by_eos() -> Ask:
    asks = (Ask(prompt=(first, ord("a")), max_new_tokens=400, ignore_eos=False) for first in range(256))
    return next(ask for ask in asks if 5 < len(ask.completion().tokens) < 40)


def test_eos_ends_the_stream_unless_it_is_ignored(served: Served) -> None:
    ask = _ends_by_eos()
    assert ask.expected().reason == "EOS"
    transcript = answer(served.caller, ask)
    assert transcript.finished.stop_token_id == byte_tokenizer.EOS_ID
    on = Ask(prompt=ask.prompt, max_new_tokens=60, ignore_eos=True)
    assert byte_tokenizer.EOS_ID in on.expected().tokens[:-1]
    answer(served.caller, on)
    kept = Ask(prompt=ask.prompt, max_new_tokens=60, min_new_tokens=50, ignore_eos=False)
    assert len(kept.expected().tokens) >= 50
    answer(served.caller, kept)


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_token_ends_the_stream(served: Served, include_stop: bool) -> None:
    free = Ask(prompt=PROMPT, max_new_tokens=40).expected().tokens
    stop = next(token for i, token in enumerate(free) if i > 8 and token not in free[:i] and 32 < token < 127)
    ask = Ask(prompt=PROMPT, max_new_tokens=40, stop_token_ids=(stop, 99), include_stop=include_stop)
    assert ask.expected().reason == "STOP_TOKEN"
    transcript = answer(served.caller, ask)
    assert transcript.finished.stop_token_id == stop
    late = Ask(prompt=PROMPT, max_new_tokens=40, stop_token_ids=(stop,), min_new_tokens=30)
    assert len(late.expected().tokens) >= 30
    answer(served.caller, late)


def test_unrequested_text_or_ids_are_not_sent(served: Served) -> None:
    ask = Ask(prompt=PROMPT, max_new_tokens=30)
    request = ask.request()
    request.output.want_text = False
    transcript = served.caller.generate(request).result()
    assert (transcript.tokens, transcript.text) == (ask.expected().tokens, "")
    request = ask.request()
    request.output.want_token_ids = False
    transcript = served.caller.generate(request).result()
    assert (transcript.tokens, transcript.text) == ([], ask.expected().text)
    assert transcript.finished.output_tokens == 30


def test_a_request_as_large_as_the_pool_finishes(rig: Rig) -> None:
    # 6 usable pages of 4 hold 24 positions; the last token is sampled, and its position is never computed.
    _, _, caller = rig.serve("--num-pages", "7", "--max-rows", "4", "--max-length", "64")
    asks = [Ask(prompt=tuple(b"prompt!"), max_new_tokens=18), Ask(prompt=tuple(b"p" * 24), max_new_tokens=1)]
    send(caller, asks * 3).check()
    caller.wait_idle()


def test_higher_priority_runs_first(rig: Rig) -> None:
    _, _, caller = rig.serve("--max-rows", "1", "--step-ms", "2", late=False)
    blocker = caller.generate(Ask(prompt=PROMPT, max_new_tokens=200).request())
    blocker.wait_tokens(1)
    asks = [Ask(prompt=PROMPT, max_new_tokens=20, priority=priority) for priority in (-5, 0, 1000)]
    streams = send(caller, [])
    for number, ask in enumerate(asks):
        streams.send([ask])
        assert streams[-1].wait_accepted().accepted.requests_ahead == number
    streams.check()
    queued = [stream.transcript.summary.timing.queue_seconds for stream in streams]
    assert queued[2] < queued[1] < queued[0]
