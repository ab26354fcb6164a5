"""Whether tokens that differ between engines are near ties, computed in a process of its own.

Engines add in different orders, so two tokens of nearly equal logits may change places; the text differs from there on.
Computes in float64, with Transformers' eager attention, the logits at the first difference.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def margins(model: str, cases: str) -> list[dict[str, float]]:
    """Returns for each case how far the logits of the two tokens are from the largest, and from each other.

    cases: a file with a JSON list of [prompt and common output, one token, other token].
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    found: list[dict[str, float]] = []
    with torch.inference_mode():
        for text, one, other in json.loads(Path(cases).read_text()):
            logits = loaded(torch.tensor([text]), logits_to_keep=1).logits[0, -1]
            best = float(logits.max())
            below = [best - float(logits[token]) for token in (one, other)]
            found.append({"margin": abs(below[0] - below[1]), "below_best": max(below)})
    return found
