"""Logprobs of outputs and prompts, through the runner, against float64 log-softmax of the eager model."""

import numpy as np
import pytest
import torch
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.cuda.graphs import waits_raise
from gpu_worker.sampling import logits as logits_module
from gpu_worker.sampling.logits import logprobs_of
from gpu_worker.wire.frames import Outcome, TokenLogprobs
from tests.gpu_worker.plans import TinyCore
from tests.gpu_worker.reference import hidden_and_logits
from tests.gpu_worker.rig import Rig

# The runner's logprobs and the eager model's in float32 round in different orders.
TOLERANCE = 1e-4


def exact_logprobs(rig: Rig, tokens: list[int]) -> np.ndarray:
    """float64 [n, V]: eager logprobs after each of `tokens`."""
    return hidden_and_logits(rig.eager, tokens)[1].log_softmax(-1).numpy()


def check(got: TokenLogprobs | None, exact: np.ndarray, tokens: list[int], top_k: int) -> None:
    """Checks that `got` are the logprobs of `tokens` under the rows of `exact`."""
    assert got is not None
    assert got.logprobs.shape == (len(tokens),) and got.top_token_ids.shape == (len(tokens), top_k)
    places = np.arange(len(tokens))
    np.testing.assert_allclose(got.logprobs, exact[places, tokens], atol=TOLERANCE)
    np.testing.assert_allclose(got.top_logprobs, -np.sort(-exact)[:, :top_k], atol=TOLERANCE)
    np.testing.assert_allclose(exact[places[:, None], got.top_token_ids], got.top_logprobs, atol=TOLERANCE)
    assert (np.diff(got.top_logprobs) <= 0).all()


def run(rig: Rig, core: TinyCore, **running: object) -> Outcome:
    outcome = rig.submit(core.plan(**running))
    assert outcome.status == pb.STEP_STATUS_OK, outcome.detail
    core.learn(outcome.tokens)
    return outcome


def test_logprobs_of_outputs_match_float64(rig: Rig) -> None:
    """Logprobs are of the model's own logits, before sampling changes them; in the order of the sampled rows."""
    core = rig.core()
    core.add(1, rig.prompt(20, seed=1), num_logprobs=3, biases={7: 50.0}, repetition_penalty=2.0)
    core.add(2, rig.prompt(11, seed=2))
    core.add(3, rig.prompt(15, seed=3), num_logprobs=6, temperature=1.5, seed=3, top_k=4)
    outcomes = [run(rig, core, chunks={1: 20, 2: 11, 3: 15})]
    outcomes += [run(rig, core, decode=order) for order in ([3, 1, 2], [2, 1, 3], [2])]
    for i, order in enumerate(([1, 3], [3, 1], [1, 3])):
        ends = [{1: 20, 3: 15}[row] + i for row in order]
        exact = [exact_logprobs(rig, core.rows[row].tokens[:end])[-1] for row, end in zip(order, ends, strict=True)]
        tokens = [core.rows[row].tokens[end] for row, end in zip(order, ends, strict=True)]
        check(outcomes[i].logprobs, np.stack(exact), tokens, 5)
    assert outcomes[3].logprobs is None
    assert core.rows[1].tokens[20] == 7


def test_top_k_0_returns_only_the_tokens_logprob(rig: Rig) -> None:
    core = rig.core()
    prompt = rig.prompt(9, seed=4)
    core.add(2, prompt, num_logprobs=1)
    outcome = run(rig, core, chunks={2: 9})
    check(outcome.logprobs, exact_logprobs(rig, prompt)[-1:], outcome.tokens.tolist(), 0)


@pytest.mark.parametrize("sizes", [[40], [1, 1, 2, 13, 23], [16, 16, 8], [39, 1]])
@pytest.mark.parametrize("first", [1, 2, 17, 39])
def test_logprobs_of_prompts_match_over_chunk_edges(rig: Rig, first: int, sizes: list[int]) -> None:
    """With any chunks, each position from the first requested one on appears once, and no sampled token."""
    core = rig.core()
    prompt, other = rig.prompt(40, seed=5), rig.prompt(12, seed=6)
    core.add(1, prompt, prompt_logprobs_from=first, num_logprobs=3)
    core.add(2, other)
    run(rig, core, chunks={2: 12})
    told: list[TokenLogprobs] = []
    for size in sizes:
        outcome = run(rig, core, decode=[2], chunks={1: size})
        if outcome.prompt_logprobs is not None:
            told.append(outcome.prompt_logprobs)
    together = TokenLogprobs(
        logprobs=np.concatenate([part.logprobs for part in told]),
        top_token_ids=np.concatenate([part.top_token_ids for part in told]),
        top_logprobs=np.concatenate([part.top_logprobs for part in told]),
    )
    check(together, exact_logprobs(rig, prompt)[first - 1 : 39], prompt[first:], 2)
    # The row's own token, and its neighbour, are unchanged.
    plain = rig.core()
    plain.add(1, prompt)
    plain.add(2, other)
    rig.step(plain, chunks={2: 12})
    rig.step(plain, decode=[2], chunks={1: 40})
    assert plain.rows[1].tokens[40] == core.rows[1].tokens[40]
    assert plain.rows[2].tokens[12:14] == core.rows[2].tokens[12:14]


def test_logprobs_of_several_prompts_follow_the_order_of_chunks(rig: Rig) -> None:
    core = rig.core()
    prompts = {row: rig.prompt(10 + row, seed=row) for row in (1, 2, 3)}
    core.add(1, prompts[1], prompt_logprobs_from=4, num_logprobs=2)
    core.add(2, prompts[2])
    core.add(3, prompts[3], prompt_logprobs_from=1)
    outcome = run(rig, core, chunks={3: 13, 2: 12, 1: 11})
    exact = [exact_logprobs(rig, prompts[3])[:12], exact_logprobs(rig, prompts[1])[3:10]]
    check(outcome.prompt_logprobs, np.concatenate(exact), [*prompts[3][1:], *prompts[1][4:]], 1)
    assert outcome.logprobs is not None and outcome.logprobs.logprobs.size == 1


def test_a_resumed_row_returns_prompt_logprobs_from_the_requested_position(rig: Rig) -> None:
    """Output tokens have no prompt logprobs, so a row that resumes behind its prompt returns none."""
    core = rig.core()
    tokens = rig.prompt(30, seed=7)
    core.add(1, tokens, num_prompt=20, prompt_logprobs_from=11)
    first = run(rig, core, chunks={1: 15})
    second = run(rig, core, chunks={1: 10})
    assert first.tokens.size == second.tokens.size == 0
    exact = exact_logprobs(rig, tokens)
    check(first.prompt_logprobs, exact[10:15], tokens[11:16], 0)
    check(second.prompt_logprobs, exact[15:19], tokens[16:20], 0)
    assert run(rig, core, chunks={1: 5}).prompt_logprobs is None
    core.free(core.rows[1])
    core.add(1, tokens, num_prompt=20)
    assert run(rig, core, chunks={1: 30}).prompt_logprobs is None


def test_penalties_count_tokens_of_a_plan_in_flight(rig: Rig) -> None:
    """The second plan is submitted before the host has the token that it must count."""
    core = rig.core()
    prompt = rig.prompt(20, seed=9)
    core.add(2, prompt, frequency_penalty=8.0, repetition_penalty=1.3)
    rig.runner.submit(core.plan(chunks={2: 20}))
    got: list[int] = []
    for _ in range(7):
        rig.runner.submit(core.plan(decode=[2]))
        outcome = rig.runner.collect()
        assert outcome is not None
        got += outcome.tokens.tolist()
    assert rig.runner.collect() is not None
    known = list(prompt)
    for token in got:
        scores = hidden_and_logits(rig.eager, known)[1][-1].numpy().copy()
        seen = list(set(known))
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / 1.3, scores[seen] * 1.3)
        np.subtract.at(scores, known[20:], 8.0)
        assert token == scores.argmax()
        known.append(token)


def test_submit_never_waits_for_the_device(rig: Rig) -> None:
    """For all features together; CUDA's own check reports a synchronisation."""
    if rig.device.type != "cuda":
        pytest.skip("a CPU computes inside submit")
    core = rig.core()
    for row in (1, 2, 3):
        everything = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "num_logprobs": 4, "prompt_logprobs_from": 1}
        filters = {"temperature": row % 2, "top_p": 0.9, "min_p": 0.01, "banned_until": 99}
        core.add(
            row, rig.prompt(20, seed=row), biases={1: 2.0}, allowed=range(2, 90), banned=[5], **everything, **filters
        )
    plans = [core.plan(chunks={1: 20, 2: 20, 3: 20}), core.plan(decode=[1, 2, 3]), core.plan(decode=[3, 1])]
    # The first makes buffers.
    rig.submit(plans[0])
    with waits_raise():
        rig.runner.submit(plans[1])
        rig.runner.submit(plans[2])
    outcomes = [rig.runner.collect(), rig.runner.collect()]
    assert [outcome and outcome.status for outcome in outcomes] == [pb.STEP_STATUS_OK] * 2
    assert [outcome and outcome.detail for outcome in outcomes] == ["", ""]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_softmax_is_computed_in_float32_for_every_dtype(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts give the same result as all rows at once; a nonfinite row affects no other."""
    logits = (4 * torch.randn(9, 3000, generator=torch.Generator().manual_seed(1))).to(device=device, dtype=dtype)
    logits[4, 5] = torch.nan
    tokens, rows = torch.arange(7, device=device) * 400, torch.tensor([8, 1, 0, 5, 2, 7, 6], device=device)
    whole = logprobs_of(logits, tokens, 4, rows=rows)
    exact = logits[rows].double().log_softmax(-1)
    torch.testing.assert_close(whole.logprobs.double(), exact.gather(1, tokens[:, None])[:, 0], rtol=0, atol=5e-6)
    torch.testing.assert_close(whole.top_logprobs.double(), exact.topk(4).values, rtol=0, atol=5e-6)
    monkeypatch.setattr(logits_module, "MAX_SCRATCH", 2 * 3000)
    parts = logprobs_of(logits, tokens, 4, rows=rows)
    assert torch.equal(parts.logprobs, whole.logprobs) and torch.equal(parts.top_logprobs, whole.top_logprobs)
    all_rows = logprobs_of(logits, torch.arange(9, device=device), 1)
    assert all_rows.logprobs.isfinite().sum() == 8
