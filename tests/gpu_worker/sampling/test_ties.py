"""Equal logits have one order, by token: for the chosen token, for the most probable ones and for those of prompts.

In bfloat16 the largest logit of one position in a hundred occurs twice.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gpu_worker.sampling.choice import greedy_tokens
from gpu_worker.sampling.logits import logprobs_of
from gpu_worker.wire.frames import TokenLogprobs
from tests.gpu_worker import rig as rig_module
from tests.gpu_worker.rig import VOCAB_SIZE, Rig, RigSpec
from tests.gpu_worker.sampling_rig import SamplingRig, Wish

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def tied(num_rows: int, vocab_size: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Logits [n, V] of few values, both zeros among them; in some rows the largest ones are zeros."""
    draw = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(num_rows, vocab_size, generator=draw)).round()
    logits[1::3] = logits[1::3].clamp(max=0)
    signs = torch.randint(2, logits.shape, generator=draw) * 2 - 1
    return torch.where(logits == 0, logits.abs() * signs, logits).to(dtype)


def ordered(logits: Tensor) -> np.ndarray:
    """int64 [n, V]: the tokens of each row by logit, then by id."""
    return np.argsort(-logits.double().cpu().numpy(), kind="stable")


@TYPES
@pytest.mark.parametrize("vocab_size", [50, 1009, 5000])
def test_the_greedy_token_is_the_first_alternative(dtype: torch.dtype, vocab_size: int, device: torch.device) -> None:
    logits = tied(40, vocab_size, 1, dtype).to(device)
    rows = torch.arange(39, -1, -1, device=device)
    tokens = greedy_tokens(logits)
    assert tokens.tolist() == ordered(logits)[:, 0].tolist()
    for top_k in (1, 5, 20, vocab_size):
        for chosen, expected in ((None, logits), (rows, logits[rows])):
            found = logprobs_of(logits, tokens, top_k, rows=chosen)
            assert np.array_equal(found.top_token_ids.cpu().numpy(), ordered(expected)[:, :top_k])
            exact = expected.double().log_softmax(-1).gather(1, found.top_token_ids.long())
            torch.testing.assert_close(found.top_logprobs.double(), exact, rtol=0, atol=5e-6)


WISHES = [
    Wish(sampling={}),
    Wish(sampling={}, mask=range(3, 50, 2)),
    Wish(sampling={}, allowed=range(4, 50, 3)),
    Wish(sampling={"banned_until": 99}, banned=[0, 1, 2, 3, 5, 8, 13]),
    # The most probable token alone, at any temperature.
    Wish(sampling={"temperature": 1.5, "top_k": 1, "seed": 5}),
    Wish(sampling={"temperature": 0.3, "top_k": 1, "top_p": 0.5, "seed": 6}, mask=range(3, 50, 2)),
    Wish(sampling={"temperature": 0.9, "seed": 7}),
]


@TYPES
@pytest.mark.parametrize("padded", [False, True])
def test_a_greedy_token_is_the_first_that_its_row_allows(
    dtype: torch.dtype, padded: bool, device: torch.device
) -> None:
    rig = SamplingRig(vocab_size=50, max_rows=len(WISHES), device=device, padded=padded)
    rows = dict(enumerate(WISHES, 1))
    for row, wish in rows.items():
        rig.add(row, [1, 2], replace(wish, sampling={"num_logprobs": 51, **wish.sampling}))
    for step in range(12):
        logits = tied(len(WISHES) + 1, 50, step, dtype)
        running: dict[str, object] = {"decode": list(rows)} if step else {"chunks": dict.fromkeys(rows, 2)}
        output = rig.step(lambda row, _, logits=logits: logits[row], **running)
        assert output.logprobs is not None
        top = output.logprobs.top_token_ids.cpu().numpy()
        assert np.array_equal(top, ordered(logits)[1:])
        for i, wish in enumerate(WISHES[:-1]):
            first = next(token for token in top[i] if _is_allowed(token, wish))
            assert output.tokens[i] == first, (step, wish)


def _is_allowed(token: int, wish: Wish) -> bool:
    return token not in wish.banned and all(not only or token in only for only in (wish.allowed, wish.mask))


@pytest.mark.parametrize(
    "options",
    [{"graphs": True}, {"graphs": True, "dtype": torch.bfloat16}, {"native": False}],
    ids=["captured", "captured bfloat16", "torch"],
)
def test_outputs_and_prompts_of_a_model_with_equal_tokens(
    options: dict[str, object], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the runner: every row of the output head occurs many times, in all of its panels."""
    eager_model: Callable[..., PreTrainedModel] = rig_module.eager_model

    def with_equal_tokens(config: object, seed: int) -> PreTrainedModel:
        model = eager_model(config, seed=seed)
        head = model.get_output_embeddings().weight
        with torch.no_grad():
            head.copy_(head[torch.arange(VOCAB_SIZE) % 9])
        return model

    monkeypatch.setattr(rig_module, "eager_model", with_equal_tokens)
    rig = Rig(RigSpec(page_size=16, group=1, head_dim=16, family="llama", chunk_align=32, **options), device)
    core = rig.core()
    for row in (1, 2):
        core.add(row, rig.prompt(12, seed=row), num_logprobs=21, prompt_logprobs_from=1)
    for step in range(8):
        running = {"decode": [1, 2]} if step else {"chunks": {1: 12, 2: 12}}
        outcome = rig.submit(core.plan(**running))
        core.learn(outcome.tokens)
        assert outcome.logprobs is not None
        assert outcome.tokens.tolist() == outcome.logprobs.top_token_ids[:, 0].tolist()
        _assert_ordered(outcome.logprobs)
        if not step:
            assert outcome.prompt_logprobs is not None and outcome.prompt_logprobs.logprobs.size == 22
            _assert_ordered(outcome.prompt_logprobs)


def _assert_ordered(found: TokenLogprobs) -> None:
    """The first groups of equal tokens are whole, and the last one begins with its smallest ids."""
    for ids, logprobs in zip(found.top_token_ids.tolist(), found.top_logprobs.tolist(), strict=True):
        of_group = {token % 9: logprob for token, logprob in zip(ids, logprobs, strict=True)}
        tokens = [token for token in range(VOCAB_SIZE) if token % 9 in of_group]
        assert ids == sorted(tokens, key=lambda token: (-of_group[token % 9], token))[: len(ids)]
