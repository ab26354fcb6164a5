"""The bundled model's prompts for tests of equality: prompts.txt, one prompt per line.

Owns the candidates (hand_written_prompts.txt, and beginnings of held-out paragraphs) and the rule for keeping one:
greedy decoding in f32 has a clear winner at each of NUM_NEW_TOKENS steps, continues for a while, differs from the
completions of other prompts, and repeats less than that of a rejected candidate.

    python -m tests.bundled_recipe.prompts            check prompts.txt against the model
    python -m tests.bundled_recipe.prompts --choose   write prompts.txt again (after training)
"""

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from tests.bundled_recipe.corpus import build_corpus
from tests.bundled_recipe.evaluate import MODEL_DIR, load_f32
from tests.bundled_recipe.tokenizer import EOS_ID

PROMPTS_FILE = Path(__file__).parent / "prompts.txt"
HAND_WRITTEN_FILE = Path(__file__).parent / "hand_written_prompts.txt"
NUM_PROMPTS = 112
MIN_WORDS, MAX_WORDS = 4, 60
NUM_NEW_TOKENS = 64
MIN_TOKENS_BEFORE_EOS = 32
# Chosen well above what is promised, so that a slightly different order of sums changes no choice.
MIN_MARGIN_CHOSEN = 2e-3
MIN_MARGIN_PROMISED = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy:
    """A greedy completion; `min_margin` is the least gap between the best and the second logit."""

    token_ids: tuple[int, ...]
    min_margin: float

    @property
    def length_before_eos(self) -> int:
        return self.token_ids.index(EOS_ID) if EOS_ID in self.token_ids else len(self.token_ids)

    @property
    def distinct_share(self) -> float:
        return len(set(self.token_ids)) / len(self.token_ids)


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt_ids: list[int], num_new_tokens: int = NUM_NEW_TOKENS) -> Greedy:
    """NUM_NEW_TOKENS tokens, continuing past EOS as a service with ignore_eos does."""
    result = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        max_new_tokens=num_new_tokens,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best_two = torch.stack([logits[0].topk(2).values for logits in result.logits])
    token_ids = tuple(result.sequences[0, len(prompt_ids) :].tolist())
    return Greedy(token_ids=token_ids, min_margin=(best_two[:, 0] - best_two[:, 1]).min().item())


def read_prompts() -> list[str]:
    return PROMPTS_FILE.read_text().splitlines()


def candidates() -> Iterator[str]:
    """The hand-written prompts, then the first words of held-out paragraphs, one from each document."""
    yield from HAND_WRITTEN_FILE.read_text().splitlines()
    wanted = MIN_WORDS
    for document in build_corpus().held_out:
        paragraph = next(filter(_is_prose, document.split("\n\n")), None)
        if paragraph is not None:
            words = paragraph.split()
            yield " ".join(words[: min(wanted, len(words) - MIN_WORDS)])
            # Eleven is coprime to the number of lengths: all lengths come, short and long mixed.
            wanted = MIN_WORDS + (wanted - MIN_WORDS + 11) % (MAX_WORDS - MIN_WORDS + 1)


def _is_prose(paragraph: str) -> bool:
    is_sentence = paragraph[:1].isupper() and len(paragraph.split()) >= 2 * MIN_WORDS
    return is_sentence and not re.search(r"[=>|{}\\*]|\n ", paragraph)


def choose(model: PreTrainedModel, tokenizer: Tokenizer) -> list[str]:
    """The valid candidates with the least repetition in their completions, in their order."""
    kept: dict[str, float] = {}
    endings: set[tuple[int, ...]] = set()
    for prompt in dict.fromkeys(candidates()):
        completion = greedy(model, tokenizer.encode(prompt).ids)
        opening, ending = completion.token_ids[:8], completion.token_ids[-8:]
        if (
            completion.min_margin >= MIN_MARGIN_CHOSEN
            and completion.length_before_eos >= MIN_TOKENS_BEFORE_EOS
            and endings.isdisjoint((opening, ending))
        ):
            kept[prompt] = completion.distinct_share
            endings |= {opening, ending}
    best = set(sorted(kept, key=lambda prompt: -kept[prompt])[:NUM_PROMPTS])
    return [prompt for prompt in kept if prompt in best]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bundled_recipe.prompts")
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--choose", action="store_true")
    arguments = parser.parse_args()
    model = load_f32(arguments.model)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    if arguments.choose:
        PROMPTS_FILE.write_text("".join(f"{prompt}\n" for prompt in choose(model, tokenizer)))
    prompts = read_prompts()
    completions = [greedy(model, tokenizer.encode(prompt).ids) for prompt in prompts]
    margins = sorted(completion.min_margin for completion in completions)
    shares = sorted(completion.distinct_share for completion in completions)
    num_clear = sum(margin >= MIN_MARGIN_PROMISED for margin in margins)
    num_whole = sum(completion.length_before_eos == NUM_NEW_TOKENS for completion in completions)
    num_distinct = len({completion.token_ids for completion in completions})
    print(
        f"{len(prompts)} prompts: {num_clear} with a margin of at least {MIN_MARGIN_PROMISED} at all "
        f"{NUM_NEW_TOKENS} steps (least {margins[0]:.4f}, median {margins[len(margins) // 2]:.4f}), "
        f"{num_whole} without EOS, {num_distinct} distinct completions, "
        f"median {shares[len(shares) // 2]:.0%} of a completion's tokens distinct"
    )
    return 0 if num_clear == len(prompts) else 1


if __name__ == "__main__":
    sys.exit(main())
