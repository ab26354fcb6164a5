"""Changed logits against Transformers' own processors, alone and combined, and a plain oracle; rows are independent."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from gpu_worker.sampling import logits as logits_module
from gpu_worker.sampling.logits import TokenHistory, edited
from gpu_worker.sampling.sampler import filtered
from tests.gpu_worker.sampling.test_sampler import warpers_of
from tests.gpu_worker.sampling_rig import SamplingRig, Wish, logits_by_oracle

VOCAB = 60
PROMPT, OUTPUT = [3, 3, 8, 12, 59, 0], [8, 20, 20, 20, 1]
LENGTH = len(PROMPT) + len(OUTPUT)

WISHES = {
    "bias": Wish(biases={3: 2.5, 8: -4.0, 59: 100.0, 17: -np.inf}),
    "repetition": Wish(sampling={"repetition_penalty": 1.7}),
    "repetition below 1": Wish(sampling={"repetition_penalty": 0.6}),
    "allowed": Wish(allowed=[1, 8, 30, 31, 32, 59]),
    "banned until later": Wish(banned=[8, 30], sampling={"banned_until": LENGTH + 1}),
    "banned until now": Wish(banned=[8, 30], sampling={"banned_until": LENGTH}),
    "bias and repetition": Wish(biases={20: -3.0, 12: 3.0}, sampling={"repetition_penalty": 1.3}),
    "all": Wish(
        biases={20: 3.0, 40: -np.inf, 2: 1.0},
        allowed=[*range(0, 60, 2), 1, 3],
        banned=[2, 3],
        sampling={
            "repetition_penalty": 1.2,
            "banned_until": LENGTH + 9,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.9,
            "min_p": 0.02,
            "typical_p": 0.9,
            "seed": 5,
        },
    ),
    "nothing": Wish(sampling={"temperature": 1.0}),
}


def changed(wishes: list[Wish], scores: Tensor, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Changed logits, float32 [E, V], and filtered logits [R, V] of the rows that draw."""
    rig = SamplingRig(vocab_size=scores.shape[1], max_rows=len(wishes), device=device, padded=False)
    rows = range(1, len(wishes) + 1)
    for row, wish in zip(rows, wishes, strict=True):
        rig.add(row, [*PROMPT, *OUTPUT], wish, num_prompt=len(PROMPT))
    _, _, extras = rig.laid_out(chunks=dict.fromkeys(rows, LENGTH))
    assert extras is not None
    history = TokenHistory(rig.geometry, device)
    edits, inputs = extras.edits, extras.drawing
    assert edits is not None
    if edits.penalties is not None:
        assert edits.penalties.missing is not None
        history.write(*edits.penalties.missing)
    result = edited(scores, edits, history)
    if inputs is None:
        return result, None
    drawing = scores.index_select(0, inputs.rows).float()
    if edits.draws is not None:
        drawing[edits.draws[1]] = result[edits.draws[0]]
    return result, filtered(drawing, inputs)


def processors(wish: Wish) -> tuple[LogitsProcessorList, LogitsProcessorList]:
    """Transformers' own, in worker.proto's order: changes, then temperature and filters."""
    get = wish.sampling.get
    changes: list[LogitsProcessor] = []
    if wish.biases:
        changes.append(SequenceBiasLogitsProcessor([[[token], float(bias)] for token, bias in wish.biases.items()]))
    if "repetition_penalty" in wish.sampling:
        changes.append(RepetitionPenaltyLogitsProcessor(get("repetition_penalty")))
    if wish.allowed:
        changes.append(SuppressTokensLogitsProcessor([token for token in range(VOCAB) if token not in wish.allowed]))
    if get("banned_until"):
        num_new = get("banned_until") - len(PROMPT)
        changes.append(MinNewTokensLengthLogitsProcessor(len(PROMPT), num_new, list(wish.banned)))
    return LogitsProcessorList(changes), warpers_of(wish.sampling)


def random_logits(num: int, *, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(num, VOCAB, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name in WISHES if name not in ("nothing", "banned until now")])
def test_logits_equal_those_of_transformers(name: str, dtype: torch.dtype, device: torch.device) -> None:
    wish, scores = WISHES[name], random_logits(1, seed=1, dtype=dtype)
    changes, warpers = processors(wish)
    expected = changes(torch.tensor([[*PROMPT, *OUTPUT]]), scores.float())
    before = scores.clone()
    ours, drawn = changed([wish], scores.to(device), device)
    assert torch.equal(ours.cpu(), expected)
    assert torch.equal(scores, before)
    if drawn is not None:
        left = warpers(torch.tensor([[*PROMPT, *OUTPUT]]), expected)
        assert torch.equal(drawn.cpu().isfinite(), left.isfinite())
        kept = left.isfinite()
        torch.testing.assert_close(drawn.cpu()[kept], left[kept], rtol=1e-6, atol=1e-6)


def test_frequency_and_presence_penalties_count_only_output_tokens(device: torch.device) -> None:
    wish = Wish(sampling={"frequency_penalty": 0.7, "presence_penalty": -0.4})
    scores = random_logits(1, seed=3)
    ours, _ = changed([wish], scores.to(device), device)
    difference = (scores - ours.cpu())[0]
    expected = torch.zeros(VOCAB)
    expected[[8, 1]], expected[20] = 0.7 - 0.4, 3 * 0.7 - 0.4
    torch.testing.assert_close(difference, expected, rtol=0, atol=1e-6)


def random_wish(draw: np.random.Generator) -> Wish:
    sampling: dict[str, float] = {}
    for name, low, high in (
        ("presence_penalty", -2, 2),
        ("frequency_penalty", -2, 2),
        ("repetition_penalty", 0.5, 2),
        ("temperature", 0.3, 3),
        ("top_p", 0.3, 1),
        ("min_p", 0, 0.3),
        ("typical_p", 0.2, 1),
    ):
        if draw.random() < 0.4:
            sampling[name] = float(np.float32(draw.uniform(low, high)))
    if draw.random() < 0.4:
        sampling["top_k"] = int(draw.integers(1, VOCAB))
    banned = draw.choice(VOCAB, 5, replace=False).tolist() if draw.random() < 0.4 else []
    if banned:
        sampling["banned_until"] = LENGTH + int(draw.integers(0, 3))
    tokens = draw.choice(VOCAB, 12, replace=False)
    biases = {int(token): float(np.float32(draw.uniform(-5, 5))) for token in tokens} if draw.random() < 0.4 else {}
    allowed = draw.choice(VOCAB, 40, replace=False).tolist() if draw.random() < 0.3 else []
    return Wish(sampling=sampling, biases=biases, allowed=allowed, banned=banned)


def test_any_combination_matches_the_oracle_and_stays_in_its_row(device: torch.device) -> None:
    """60 rows in one step, each against float64, and bit for bit equal to the row alone."""
    draw = np.random.default_rng(4)
    wishes = [WISHES["bias"], *(random_wish(draw) for _ in range(60))]
    scores = random_logits(len(wishes), seed=5)
    ours, _ = changed(wishes, scores.to(device), device)
    at, asking = 0, 0
    for i, wish in enumerate(wishes):
        expected = logits_by_oracle(scores[i], wish, PROMPT, OUTPUT)
        asks = not np.array_equal(expected, scores[i].double().numpy()) or bool(
            wish.biases or wish.allowed or wish.sampling.keys() & {"presence_penalty", "frequency_penalty"}
        )
        if not asks:
            continue
        asking += 1
        mine = ours[at].cpu()
        at += 1
        np.testing.assert_allclose(mine.double().numpy(), expected, rtol=1e-5, atol=1e-5, err_msg=str(wish))
        alone, _ = changed([wish], scores[i : i + 1].to(device), device)
        assert torch.equal(alone[0].cpu(), mine)
    assert at == ours.shape[0] and 40 < asking < 61


def test_penalties_in_parts_equal_those_of_all_rows_at_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes = [Wish(sampling={"repetition_penalty": 1 + i / 10, "frequency_penalty": i / 5}) for i in range(1, 8)]
    scores = random_logits(7, seed=6).to(device)
    whole, _ = changed(wishes, scores, device)
    monkeypatch.setattr(logits_module, "MAX_SCRATCH", 3 * VOCAB)
    parts, _ = changed(wishes, scores, device)
    assert torch.equal(whole, parts)
    assert not torch.equal(whole[0], whole[1])
