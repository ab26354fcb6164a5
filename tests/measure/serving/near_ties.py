"""Whether tokens that differ between engines are near ties: `python -m tests.measure.serving.near_ties …`.

Engines add in different orders, so two tokens of nearly equal logits may change places; the text differs from there on.
Computes in float64, with Transformers' eager attention, the logits at the first difference. Reads a JSON list of
[prompt and common output, one token, other token] from a file; prints one JSON object. Runs in a process of its own.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def margins(model: Path, cases: list[tuple[list[int], int, int]]) -> list[dict[str, float]]:
    """Returns for each case how far the logits of the two tokens are from the largest, and from each other."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    found: list[dict[str, float]] = []
    with torch.inference_mode():
        for text, one, other in cases:
            logits = loaded(torch.tensor([text]), logits_to_keep=1).logits[0, -1]
            best = float(logits.max())
            below = [best - float(logits[token]) for token in (one, other)]
            found.append({"margin": abs(below[0] - below[1]), "below_best": max(below)})
    return found


def main() -> None:
    """Prints one line of JSON to stdout."""
    parser = argparse.ArgumentParser(prog="near_ties", allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cases", type=Path, required=True)
    args = parser.parse_args()
    print(json.dumps({"near_ties": margins(args.model, json.loads(args.cases.read_text()))}), flush=True)


if __name__ == "__main__":
    main()
