"""Sampling over many steps: token histories on the device, keys, batches, and the distribution of draws."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.sampling.inputs import FEW_RANKS
from gpu_worker.wire.fields import PlanError
from tests.gpu_worker.sampling_rig import SamplingRig, Wish, chi_square, logits_by_oracle, probabilities

VOCAB = 50
PLAIN = [Wish(sampling={}), Wish(sampling={"temperature": 0.9, "seed": 4}), Wish(sampling={"top_k": 5, "seed": 2})]
FEATURED = [
    Wish(sampling={"frequency_penalty": 1.5, "repetition_penalty": 1.2}),
    Wish(sampling={"temperature": 1.2, "seed": 8, "presence_penalty": 1.9, "top_p": 0.8}, biases={3: 4.0}),
    Wish(sampling={"temperature": 0.7, "seed": 9, "top_k": 9, "num_logprobs": 3}, allowed=[*range(0, 50, 3)]),
    Wish(sampling={"temperature": 2.0, "seed": 9, "banned_until": 9}, banned=[1, 2, 3, 4]),
    Wish(sampling={"temperature": 1.0, "seed": 3, "repetition_penalty": 0.7, "num_logprobs": 1, "sample_idx": 3}),
    Wish(mask=[*range(1, 50, 7), 48, 49]),
]
MASKED = [
    Wish(sampling={"temperature": 0.8, "seed": 5, "top_p": 0.9}, mask=[0, 7, 8, 9, 31, 32, 33]),
    Wish(sampling={"temperature": 1.1, "seed": 6, "repetition_penalty": 1.3}, mask=[*range(20)], biases={3: -2.0}),
]


def logits_of_sequence(key: int) -> Callable[[int], Tensor]:
    """Logits of a sequence by position; sequences of equal keys have equal ones."""

    def at(position: int) -> Tensor:
        return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(1000 * key + position))

    return at


def generate(
    device: torch.device, rows: dict[int, tuple[int, Wish]], num_new: int, *, padded: bool | None = None
) -> dict[int, list[int]]:
    """New tokens of {row: (key, wish)} run together, after prompts of 7."""
    rig = SamplingRig(vocab_size=VOCAB, max_rows=9, device=device, padded=padded)
    for row, (key, wish) in rows.items():
        rig.add(row, prompt(key), wish, num_prompt=7)

    def logits(row: int, position: int) -> Tensor:
        return logits_of_sequence(rows[row][0])(position)

    rig.step(logits, chunks=dict.fromkeys(rows, 7))
    for _ in range(num_new - 1):
        rig.step(logits, decode=list(rows))
    return {row: rig.core.rows[row].tokens[7:] for row in rows}


def prompt(key: int) -> list[int]:
    return np.random.default_rng(key).integers(0, VOCAB, 7).tolist()


def test_a_sequence_does_not_depend_on_the_rest_of_the_batch(device: torch.device) -> None:
    """Its tokens depend neither on its row nor on the features of other rows."""
    wishes = [*PLAIN, *FEATURED]
    together = generate(device, {row: (row, wish) for row, wish in enumerate(wishes, 1)}, 8)
    for row, wish in enumerate(wishes, 1):
        assert generate(device, {1 + (row + 4) % 9: (row, wish)}, 8)[1 + (row + 4) % 9] == together[row], wish
    plain = generate(device, {row: (row, wish) for row, wish in enumerate(PLAIN, 1)}, 8)
    assert plain == {row: together[row] for row in plain}
    # The other rows change nothing, but the sequence's own features do.
    assert together[4] != generate(device, {4: (4, Wish())}, 8)[4]


def test_padded_steps_sample_what_other_steps_sample() -> None:
    """With every feature, and for rows that are greedy alone."""
    typical = [Wish(sampling={"temperature": 1, "typical_p": 0.5})]
    for wishes in ([*PLAIN, *FEATURED], [Wish(), FEATURED[0]], typical, MASKED, [*PLAIN, *MASKED, FEATURED[-1]]):
        rows = {row: (row, wish) for row, wish in enumerate(wishes, 1)}
        padded, packed = (generate(torch.device("cpu"), rows, 8, padded=value) for value in (True, False))
        assert padded == packed


def test_penalties_count_what_was_sampled_on_the_device(device: torch.device) -> None:
    """Greedy, so that the oracle determines each token from the growing output."""
    wish = Wish(sampling={"frequency_penalty": 1.1, "presence_penalty": 0.3, "repetition_penalty": 1.4})
    tokens = generate(device, {3: (5, wish), 1: (6, Wish())}, 30)[3]
    known: list[int] = []
    for i, token in enumerate(tokens):
        scores = logits_by_oracle(logits_of_sequence(5)(7 + i), wish, prompt(5), known)
        assert token == scores.argmax()
        known.append(token)
    without = [int(logits_of_sequence(5)(7 + i).argmax()) for i in range(30)]
    assert tokens != without


PENALISED = Wish(sampling={"repetition_penalty": 3.0, "frequency_penalty": 1.0})


@pytest.mark.parametrize("wish", [Wish(), Wish(sampling={"frequency_penalty": 2.0}), PENALISED], ids=range(3))
def test_a_reused_row_keeps_no_state_of_its_previous_sequence(wish: Wish, device: torch.device) -> None:
    """A new sequence has only its own tokens, penalties and biases, in a row whose previous one was longer, beside a
    longer row."""
    rig = SamplingRig(vocab_size=VOCAB, max_rows=2, device=device)
    rig.add(1, range(VOCAB), replace(PENALISED, biases={7: 100.0}, banned=[2]))
    rig.step(lambda row, position: logits_of_sequence(1)(position), chunks={1: VOCAB})
    rig.core.free(rig.core.rows[1])
    rig.add(1, prompt(3), wish)
    rig.add(2, prompt(2) * 6, PENALISED)
    rig.step(lambda row, position: logits_of_sequence(3)(position), chunks={1: 7, 2: 42})
    for _ in range(6):
        rig.step(lambda row, position: logits_of_sequence(3)(position), decode=[1, 2])
    assert rig.core.rows[1].tokens[7:] == generate(device, {1: (3, wish)}, 7)[1]


@pytest.mark.parametrize("wish", FEATURED, ids=range(len(FEATURED)))
def test_a_resumed_sequence_continues_identically(wish: Wish, device: torch.device) -> None:
    """It resumes in another row from known tokens, some of which are output."""
    whole = generate(device, {2: (4, wish)}, 9)[2]
    rig = SamplingRig(vocab_size=VOCAB, max_rows=9, device=device)
    rig.add(7, [*prompt(4), *whole[:4]], wish, num_prompt=7)
    rig.laid_out(chunks={7: 6})
    rig.step(lambda row, position: logits_of_sequence(4)(position), chunks={7: 5})
    for _ in range(4):
        rig.step(lambda row, position: logits_of_sequence(4)(position), decode=[7])
    assert rig.core.rows[7].tokens[7:] == whole


def test_a_sequence_with_penalties_reaches_max_length(device: torch.device) -> None:
    """The token at max_length is not written to the history, where it would overwrite the next row's first."""
    rig = SamplingRig(vocab_size=VOCAB, max_rows=2, device=device)
    rig.add(1, prompt(1) * 9, Wish(sampling={"repetition_penalty": 1.5}))
    # The most probable token by far without the penalty for its occurrence in the prompt.
    rig.add(2, [5, *[6] * 6], Wish(sampling={"repetition_penalty": 100.0}, biases={5: 30.0}))
    rig.step(lambda row, position: logits_of_sequence(row)(position), chunks={1: 63, 2: 7})
    rig.step(lambda row, position: logits_of_sequence(row)(position), decode=[1, 2])
    rig.step(lambda row, position: logits_of_sequence(row)(position), decode=[2])
    assert len(rig.core.rows[1].tokens) == 65 and rig.core.rows[1].tokens[64] != 5
    assert 5 not in rig.core.rows[2].tokens[7:]


def test_padded_steps_without_features_upload_no_extras(device: torch.device) -> None:
    rig = SamplingRig(vocab_size=VOCAB, max_rows=3, device=device, padded=True)
    for row, wish in enumerate(PLAIN, 1):
        rig.add(row, prompt(row), wish)
    assert rig.laid_out(chunks={1: 7, 2: 7, 3: 7})[2] is None
    rig.add(1, prompt(1), Wish(banned=[3], sampling={"banned_until": 8}))
    _, _, extras = rig.laid_out(chunks={1: 7})
    assert extras is not None and extras.edits is not None
    rig.core.learn([1])
    assert rig.laid_out(decode=[1])[2] is None


NUM_DRAWS = 12_000
# Probable tokens of these logits.
OUTPUT = [37, 37, 32]
COMBINED = Wish(
    sampling={
        "temperature": 1.4,
        "top_k": 30,
        "top_p": 0.97,
        "min_p": 0.01,
        "typical_p": 0.99,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.8,
        "repetition_penalty": 1.3,
        "banned_until": 11,
    },
    biases={0: 1.5, 20: -1.0, 33: 2.0},
    allowed=[token for token in range(VOCAB) if token % 7],
    banned=[8, 9],
)


def counts_of(wish: Wish, vary: str, device: torch.device) -> tuple[np.ndarray, Tensor]:
    """How often each token was drawn for one prompt by rows that differ in `vary` alone; the first 6,000 pairs."""
    rig = SamplingRig(vocab_size=VOCAB, max_rows=NUM_DRAWS, device=device)
    tokens = [*prompt(0), *OUTPUT]
    for row in range(1, NUM_DRAWS + 1):
        sampling = {**wish.sampling, vary: row}
        rig.add(row, tokens, replace(wish, sampling=sampling), num_prompt=7)
    logits = logits_of_sequence(0)(10)
    drawn = rig.step(lambda row, position: logits, chunks=dict.fromkeys(range(1, NUM_DRAWS + 1), 10)).tokens.cpu()
    return drawn.bincount(minlength=VOCAB).double().numpy(), drawn


@pytest.mark.parametrize("vary", ["seed", "sample_idx"])
def test_draws_with_everything_combined_follow_the_exact_probabilities(vary: str, device: torch.device) -> None:
    """Chi-square against worker.proto's definition in float64. Wrong settings must fail with the same counts."""
    logits = logits_of_sequence(0)(10)

    def exact(**change: float) -> np.ndarray:
        wish = replace(COMBINED, sampling={**COMBINED.sampling, **change})
        return probabilities(logits_by_oracle(logits, wish, prompt(0), OUTPUT), wish)

    counts, drawn = counts_of(COMBINED, vary, device)
    assert (exact() > 0).sum() > 15
    assert chi_square(counts, exact()) > 1e-3
    for wrong in (
        {"temperature": 1.3},
        {"frequency_penalty": 0.4},
        {"repetition_penalty": 1.15},
        {"top_k": 12},
        {"typical_p": 0.5},
    ):
        assert chi_square(counts, exact(**wrong)) < 1e-6, wrong
    # Neighbours are independent: pairs against the product of their probabilities.
    likely = np.argsort(-exact())[:4]
    groups = np.full(VOCAB, 4)
    groups[likely] = np.arange(4)
    pairs = groups[drawn.numpy().reshape(-1, 2)]
    shares = np.bincount(groups, weights=exact(), minlength=5)
    together = np.bincount(pairs[:, 0] * 5 + pairs[:, 1], minlength=25)
    assert chi_square(together, np.outer(shares, shares).ravel()) > 1e-3


def test_draws_under_a_mask_follow_the_softmax_over_its_tokens(device: torch.device) -> None:
    """In float64; and those of other masks do not."""
    logits = logits_of_sequence(0)(10)
    mask = [token for token in range(VOCAB) if token % 3 != 1]

    def exact(tokens: list[int]) -> np.ndarray:
        weights = np.zeros(VOCAB)
        weights[tokens] = np.exp(logits.double().numpy()[tokens] / 1.5)
        return weights / weights.sum()

    counts, _ = counts_of(Wish(sampling={"temperature": 1.5}, mask=mask), "seed", device)
    assert chi_square(counts, exact(mask)) > 1e-3
    likely = int(exact(mask).argmax())
    assert chi_square(counts, exact([token for token in mask if token != likely])) < 1e-6
    assert chi_square(counts, exact([*range(VOCAB)])) < 1e-6


@pytest.mark.parametrize("top_k", [FEW_RANKS, FEW_RANKS + 1, 300])
def test_top_k_keeps_exactly_k_tokens_below_and_above_the_partial_sort_limit(top_k: int, device: torch.device) -> None:
    """Nearly flat logits, the most probable first: the last that is kept is drawn, the next never is."""
    num_draws = 20 * top_k
    rig = SamplingRig(vocab_size=400, max_rows=num_draws, device=device)
    for row in range(1, num_draws + 1):
        rig.add(row, [1], Wish(sampling={"temperature": 1.0, "top_k": top_k, "seed": row}))
    logits = -1e-4 * torch.arange(400)
    drawn = rig.step(lambda row, position: logits, decode=range(1, num_draws + 1)).tokens[:num_draws]
    assert int(drawn.max()) == top_k - 1


def test_a_row_without_top_k_keeps_all_tokens_while_other_rows_are_limited(device: torch.device) -> None:
    drawn = []
    for seed in range(20):
        rig = SamplingRig(vocab_size=400, max_rows=3, device=device)
        for row, top_k in enumerate((2, 0, 3), 1):
            rig.add(row, [1], Wish(sampling={"temperature": 1.0, "top_k": top_k, "seed": seed}))
        drawn.append(rig.step(lambda row, position: -1e-4 * torch.arange(400), decode=[1, 2, 3]).tokens[:3].tolist())
    first, second, third = np.array(drawn).T
    assert set(first.tolist()) == {0, 1} and set(third.tolist()) == {0, 1, 2}
    assert second.max() > FEW_RANKS


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [3, 4])
def test_nonfinite_logits_are_reported_even_if_bans_hide_them(value: float, place: int, device: torch.device) -> None:
    """Token 3 is allowed, token 4 is not."""
    rig = SamplingRig(vocab_size=VOCAB, max_rows=3, device=device)
    allowing = Wish(allowed=[2, 3], sampling={"temperature": 1.0})
    for row, wish in enumerate((allowing, Wish(banned=[4], sampling={"banned_until": 9}), allowing), 1):
        rig.add(row, [1], wish)
    sick, sound = torch.zeros(VOCAB), torch.zeros(VOCAB)
    sick[place] = value
    drawn = rig.step(lambda row, position: sound if row == 3 else sick, decode=[1, 2, 3]).tokens[:3].tolist()
    assert drawn[:2] == [-1, -1] and drawn[2] in (2, 3)


def test_more_logits_than_the_limit_are_refused(device: torch.device) -> None:
    rig = SamplingRig(vocab_size=VOCAB, max_rows=8, device=device, max_length=512)
    limit = rig.geometry.logit_rows
    assert limit < 400
    wish = Wish(sampling={"prompt_logprobs_from": 1})
    rig.add(1, [3] * 500, wish)
    rig.add(2, [3] * 9, Wish())
    with pytest.raises(PlanError, match=f"of 1 sampled row and {limit} prompt tokens; logit_rows is {limit}"):
        rig.laid_out(chunks={1: limit, 2: 9})
