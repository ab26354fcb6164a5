"""The bundled model's recipe: every number that decides the result, beside the corpus.

Owns: the architecture's sizes, the order of the batches, the optimisers, the schedule. The architecture is
Transformers' Qwen3, unchanged. Knows nothing of files, logs or the clock.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn import functional
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.bundled_recipe.tokenizer import EOS_ID, TRAINED_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Counts are steps or tokens; rates are per step."""

    seed: int = 20_240
    num_steps: int = 5_000
    # The last part of the steps uses long windows; a step always holds the same number of tokens.
    long_fraction: float = 0.2
    short_window: int = 256
    long_window: int = 1_024
    tokens_per_step: int = 2_048
    peak_learning_rate: float = 4e-3
    final_learning_rate: float = 4e-5
    warmup_steps: int = 100
    momentum: float = 0.95
    weight_decay: float = 0.3
    embedding_weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.98
    max_gradient_norm: float = 1.0
    residual_dropout: float = 0.15
    max_positions: int = 2_048
    # The last phase, against circling: long windows, and prefixes of them continued by the model itself.
    num_finish_steps: int = 150
    finish_learning_rate: float = 1.5e-4
    finish_warmup_steps: int = 10
    unlikelihood_weight: float = 1.0
    unlikelihood_prefix: int = 32
    unlikelihood_new_tokens: int = 64

    def window(self, step: int) -> int:
        is_long = step >= self.num_steps - int(self.num_steps * self.long_fraction)
        return self.long_window if is_long else self.short_window

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to the final rate."""
        if step < self.warmup_steps:
            return self.peak_learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        half_cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.final_learning_rate + (self.peak_learning_rate - self.final_learning_rate) * half_cosine

    def finish_learning_rate_at(self, step: int) -> float:
        """For steps of the last phase: linear warm-up, and linear decay to nothing."""
        warm = min(1.0, (step + 1) / self.finish_warmup_steps)
        return self.finish_learning_rate * warm * (1 - step / self.num_finish_steps)

    def finish_batches(self, documents: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The batches of the last phase: another order, long windows only."""
        other = replace(self, seed=self.seed + 1, num_steps=self.num_finish_steps, long_fraction=1.0)
        return batches(documents, other)


def build_model(recipe: Recipe) -> PreTrainedModel:
    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        vocab_size=TRAINED_TOKENS,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=None,
    )
    model = Qwen3ForCausalLM(config)

    def drop(module: torch.nn.Module, _: object, output: torch.Tensor) -> torch.Tensor:
        return functional.dropout(output, recipe.residual_dropout, module.training)

    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            module.register_forward_hook(drop)
    return model


def batches(documents: list[torch.Tensor], recipe: Recipe) -> Iterator[torch.Tensor]:
    """[rows, window] ids for step 0, 1, …: shuffled documents in a row, shuffled again when they run out."""
    generator = torch.Generator().manual_seed(recipe.seed)
    stream = torch.empty(0, dtype=torch.long)
    for step in range(recipe.num_steps):
        while len(stream) < recipe.tokens_per_step:
            order = torch.randperm(len(documents), generator=generator)
            stream = torch.cat([stream, *(documents[i] for i in order)])
        yield stream[: recipe.tokens_per_step].view(-1, recipe.window(step))
        stream = stream[recipe.tokens_per_step :]


def build_optimizers(model: PreTrainedModel, recipe: Recipe) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the layers' matrices (half the tokens of AdamW to the same loss here), AdamW for the rest."""
    named = dict(model.named_parameters())
    embedding = named.pop("model.embed_tokens.weight")
    matrices = [parameter for parameter in named.values() if parameter.ndim == 2]
    vectors = [parameter for parameter in named.values() if parameter.ndim < 2]
    rate, betas = recipe.peak_learning_rate, (recipe.beta1, recipe.beta2)
    return (
        torch.optim.Muon(
            matrices,
            lr=rate,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW([embedding], lr=rate, betas=betas, weight_decay=recipe.embedding_weight_decay),
        torch.optim.AdamW(vectors, lr=rate, betas=betas, weight_decay=0.0),
    )
