"""The bundled model's recipe in one command: corpus, tokenizer, training, measure, saved folder.

Owns: the recipe's numbers, the optimiser loop, its log, and the command line. The architecture is Transformers'
Qwen3, unchanged. Step n draws the same documents and the same dropout noise on every run, whatever came before
it, so an interrupted run goes on as if it had not stopped.

    python -m gpu_worker.bundled.train --out DIR      the whole recipe
    python -m gpu_worker.bundled.train --verify       measure the committed model again
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from gpu_worker.bundled.checkpoint import load_checkpoint, save_checkpoint
from gpu_worker.bundled.corpus import build_corpus
from gpu_worker.bundled.evaluate import (
    MODEL_DIR,
    encode_documents,
    held_out_windows,
    load_f32,
    measure,
    verify,
)
from gpu_worker.bundled.provenance import write_provenance
from gpu_worker.bundled.tokenizer import EOS_ID, VOCAB_SIZE, save_tokenizer, train_tokenizer

PRECISIONS = ("auto", "bf16", "f32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the result, beside the corpus."""

    seed: int = 20_240
    num_steps: int = 3_000
    # The last part of the steps uses long windows; a step always holds the same number of tokens.
    long_fraction: float = 0.2
    short_window: int = 256
    long_window: int = 1_024
    tokens_per_step: int = 4_096
    peak_learning_rate: float = 2e-3
    final_learning_rate: float = 5e-5
    warmup_steps: int = 100
    weight_decay: float = 0.2
    beta1: float = 0.9
    beta2: float = 0.98
    max_gradient_norm: float = 1.0
    residual_dropout: float = 0.1
    max_positions: int = 2_048

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


def build_model(recipe: Recipe) -> PreTrainedModel:
    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
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
    """[rows, window] ids for step 0, 1, …: shuffled documents in a row, shuffled anew when they run out."""
    generator = torch.Generator().manual_seed(recipe.seed)
    stream = torch.empty(0, dtype=torch.long)
    for step in range(recipe.num_steps):
        while len(stream) < recipe.tokens_per_step:
            order = torch.randperm(len(documents), generator=generator)
            stream = torch.cat([stream, *(documents[i] for i in order)])
        yield stream[: recipe.tokens_per_step].view(-1, recipe.window(step))
        stream = stream[recipe.tokens_per_step :]


def build_optimizer(model: PreTrainedModel, recipe: Recipe) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_learning_rate, betas=(recipe.beta1, recipe.beta2))


def train(
    model: PreTrainedModel,
    documents: list[torch.Tensor],
    held_out: torch.Tensor,
    recipe: Recipe,
    out: Path,
    *,
    use_bf16: bool,
) -> None:
    """All steps from the checkpoint in `out` (or the start) on, with the log in `out`."""
    optimizer = build_optimizer(model, recipe)
    checkpoint, log_path = out / "checkpoint.safetensors", out / "training_log.jsonl"
    first_step = load_checkpoint(checkpoint, model, optimizer) if checkpoint.exists() else 0
    lines = log_path.read_text().splitlines() if first_step else []
    lines = [line for line in lines if json.loads(line)["step"] <= first_step]
    seconds_before = json.loads(lines[-1])["seconds"] if lines else 0.0
    log_path.write_text("".join(f"{line}\n" for line in lines))
    started, recent = time.monotonic(), []
    model.train()
    for step, batch in enumerate(batches(documents, recipe)):
        if step < first_step:
            continue
        torch.manual_seed(recipe.seed + step)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=use_bf16):
            logits = model(batch).logits
        predicted = logits[:, :-1].reshape(-1, VOCAB_SIZE).float()
        loss = functional.cross_entropy(predicted, batch[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_gradient_norm)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(loss.item())
        done = step + 1
        if done % 25 == 0 or done == recipe.num_steps:
            seconds = seconds_before + time.monotonic() - started
            remaining = (time.monotonic() - started) / (done - first_step) * (recipe.num_steps - done)
            entry = {
                "step": done,
                "tokens": done * recipe.tokens_per_step,
                "loss": sum(recent) / len(recent),
                "learning_rate": recipe.learning_rate(step),
                "seconds": round(seconds, 1),
            }
            if done % 250 == 0 or done == recipe.num_steps:
                entry["held_out_loss"] = measure(model, held_out)["held_out_loss"]
                save_checkpoint(checkpoint, model, optimizer, done)
            with log_path.open("a") as log:
                log.write(json.dumps(entry) + "\n")
            print(f"{json.dumps(entry)}  about {remaining / 60:.0f} min to go", flush=True)
            recent.clear()


def cpu_has_bf16() -> bool:
    """Whether bf16 products are native here; emulated ones would be slower than f32."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "bf16" in cpuinfo.read_text()


def run(recipe: Recipe, out: Path, *, threads: int, precision: str) -> None:
    torch.set_num_threads(threads)
    use_bf16 = cpu_has_bf16() if precision == "auto" else precision == "bf16"
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    corpus = build_corpus()
    print(f"corpus: {len(corpus.train)} + {len(corpus.held_out)} documents, sha256 {corpus.sha256}")
    tokenizer = train_tokenizer(corpus.train)
    save_tokenizer(tokenizer, out, max_length=recipe.max_positions)
    documents, held_out = encode_documents(tokenizer, corpus.train), held_out_windows(tokenizer, corpus)
    num_tokens = sum(map(len, documents))
    print(
        f"tokens: {num_tokens} to train on, {held_out.numel()} held out; {time.monotonic() - started:.0f} s"
    )
    arithmetic = "bf16 products, f32 sums and weights" if use_bf16 else "f32"
    print(f"training: {recipe.num_steps} steps, {threads} threads, {arithmetic}", flush=True)
    model = build_model(recipe)
    train(model, documents, held_out, recipe, out, use_bf16=use_bf16)
    model.to(torch.bfloat16).save_pretrained(out)
    GenerationConfig(eos_token_id=EOS_ID, pad_token_id=EOS_ID).save_pretrained(out)
    figures = measure(load_f32(out), held_out)
    (out / "checkpoint.safetensors").unlink()
    write_provenance(
        out,
        corpus_sha256=corpus.sha256,
        recipe=asdict(recipe),
        figures=figures,
        counts={
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "train_documents": len(corpus.train),
            "train_tokens": num_tokens,
            "held_out_documents": len(corpus.held_out),
            "held_out_tokens": held_out.numel(),
        },
        precision=arithmetic,
        threads=threads,
    )
    minutes = (time.monotonic() - started) / 60
    loss = figures["held_out_loss"]
    print(f"DONE in {minutes:.1f} min: held-out loss {loss:.4f} nats per token, saved in {out}")
    if (MODEL_DIR / "provenance.json").exists() and out.resolve() != MODEL_DIR:
        recorded = json.loads((MODEL_DIR / "provenance.json").read_text())["held_out_loss"]
        print(f"the committed model has {recorded:.4f}: {loss / recorded - 1:+.2%}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gpu_worker.bundled.train", description="The bundled model's recipe in one command."
    )
    parser.add_argument("--out", type=Path, help="folder for the new model; an interrupted run goes on there")
    parser.add_argument("--verify", action="store_true", help="only measure the committed model (or --out)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="auto", help="auto: bf16 where it is native"
    )
    parser.add_argument("--steps", type=int, default=Recipe.num_steps, help="fewer: a weaker model")
    arguments = parser.parse_args()
    if arguments.verify:
        torch.set_num_threads(arguments.threads)
        return 0 if verify(arguments.out or MODEL_DIR) else 1
    if arguments.out is None:
        parser.error("--out DIR is needed, unless --verify")
    recipe = replace(Recipe(), num_steps=arguments.steps)
    run(recipe, arguments.out, threads=arguments.threads, precision=arguments.precision)
    return 0


if __name__ == "__main__":
    sys.exit(main())
