"""The cure for circling: sequence-level unlikelihood (Welleck et al. 2020, arXiv:1908.04319).

Owns: greedy continuations of training text, which of their tokens repeat, and the loss that makes those less
likely. A small model decoded greedily soon says one sentence for ever; this takes most of that away and costs
little likelihood. Knows nothing of optimisers and schedules.
"""

import torch
from transformers import PreTrainedModel

NGRAM = 4


def repeats(ids: torch.Tensor, prefix_length: int) -> torch.Tensor:
    """[rows, length - prefix_length] bool: whether a new token ends, or is in, an n-gram met before in its row."""
    marks = torch.zeros_like(ids, dtype=torch.bool)
    for row, tokens in enumerate(ids.tolist()):
        met: set[tuple[int, ...]] = set()
        for end in range(NGRAM, len(tokens) + 1):
            ngram = tuple(tokens[end - NGRAM : end])
            if ngram in met:
                marks[row, end - NGRAM : end] = True
            met.add(ngram)
    return marks[:, prefix_length:]


def unlikelihood(model: PreTrainedModel, prefixes: torch.Tensor, num_new_tokens: int) -> torch.Tensor:
    """Mean of -log(1 - p) over the repeating tokens of the model's own greedy continuations."""
    model.eval()
    ids = model.generate(
        prefixes,
        attention_mask=torch.ones_like(prefixes),
        max_new_tokens=num_new_tokens,
        do_sample=False,
        # EOS does not end a row.
        eos_token_id=None,
    )
    model.train()
    is_repeat = repeats(ids, prefixes.shape[1])
    logits = model(ids[:, :-1]).logits[:, prefixes.shape[1] - 1 :].float()
    chances = logits.softmax(-1).gather(-1, ids[:, prefixes.shape[1] :, None])[..., 0]
    penalties = -torch.log1p(-chances.clamp(max=1 - 1e-5))
    return (penalties * is_repeat).sum() / is_repeat.numel()
