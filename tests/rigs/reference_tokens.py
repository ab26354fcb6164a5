"""Greedy tokens as Transformers alone makes them: `python -m tests.rigs.reference_tokens --model DIR < prompts`.

Tests compare the service with these tokens: f32, eager attention, `generate()` with its own cache, end of sequence
ignored, one thread. The module reads {"prompts": [text …], "new_tokens": n} from stdin and prints one JSON object. It
knows nothing of Tandem.

Prompts run in left-padded batches, because that is quick. Padding adds exact zeros, but sums of other shapes round
differently. So the output has each prompt's smallest margin between the best and the second logit, and a prompt with a
margin below `_LEAST_MARGIN` runs again alone.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

_BATCH, _LEAST_MARGIN = 32, 1e-3


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompts: list[list[int]], new_tokens: int) -> list[tuple[list[int], float]]:
    """Returns, per prompt, its new tokens and the smallest margin at any of them."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    result = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack([logits.topk(2).values for logits in result.logits])
    margins = (best[..., 0] - best[..., 1]).amin(dim=0).tolist()
    tokens: list[list[int]] = result.sequences[:, longest:].tolist()
    return list(zip(tokens, margins, strict=True))


def main() -> int:
    """Prints {"prompt_ids": [[…]], "tokens": [[…]], "margins": [margin], "alone": number that ran again alone}."""
    parser = argparse.ArgumentParser(prog="reference_tokens", allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True)
    args = parser.parse_args()
    request: dict[str, Any] = json.load(sys.stdin)
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in request["prompts"]]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="eager").eval()
    # Prompts of similar length share a batch, so that little is padded.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: dict[int, tuple[list[int], float]] = {}
    for first in range(0, len(order), _BATCH):
        batch = order[first : first + _BATCH]
        found |= dict(zip(batch, greedy(model, [prompts[i] for i in batch], request["new_tokens"]), strict=True))
    close = [i for i in order if found[i][1] < _LEAST_MARGIN]
    for i in close:
        found[i] = greedy(model, [prompts[i]], request["new_tokens"])[0]
    answer = {
        "prompt_ids": prompts,
        "tokens": [found[i][0] for i in range(len(prompts))],
        "margins": [found[i][1] for i in range(len(prompts))],
        "alone": len(close),
    }
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
