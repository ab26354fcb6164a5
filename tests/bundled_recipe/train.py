"""The bundled model's recipe in one command: corpus, tokenizer, training, measure, saved folder.

Owns the optimiser loop, its log and checkpoint, provenance.json and the command line. Step n draws the same documents
and the same dropout noise on every run, so an interrupted run continues with the same results.

    python -m tests.bundled_recipe.train --out DIR      the whole recipe
    python -m tests.bundled_recipe.train --verify       measure the committed model again
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedModel

from tests.bundled_recipe.chat_tokens import add_chat
from tests.bundled_recipe.corpus import build_corpus
from tests.bundled_recipe.evaluate import (
    MODEL_DIR,
    PROVENANCE,
    encode_documents,
    file_checksums,
    held_out_windows,
    load_f32,
    measure,
    say_if_other_corpus,
    verify,
)
from tests.bundled_recipe.recipe import Recipe, batches, build_model, build_optimizers
from tests.bundled_recipe.tokenizer import EOS_ID, TRAINED_TOKENS, save_tokenizer, train_tokenizer
from tests.bundled_recipe.unlikelihood import unlikelihood

PRECISIONS = ("auto", "bf16", "f32")
LOG_EVERY, MEASURE_EVERY = 25, 500


class Log:
    """A line of JSON every LOG_EVERY steps, kept up to `first_step` when a run continues."""

    def __init__(self, path: Path, recipe: Recipe, first_step: int) -> None:
        lines = path.read_text().splitlines() if first_step else []
        lines = [line for line in lines if json.loads(line)["step"] <= first_step]
        path.write_text("".join(f"{line}\n" for line in lines))
        self._path, self._recipe, self._first_step = path, recipe, first_step
        self._seconds_before: float = json.loads(lines[-1])["seconds"] if lines else 0.0
        self._started = time.monotonic()

    def write(self, step: int, losses: list[dict[str, float]], **figures: float) -> None:
        """Writes the means of the losses since the last line, and empties them."""
        means = {name: sum(loss[name] for loss in losses) / len(losses) for name in losses[0]}
        losses.clear()
        seconds = time.monotonic() - self._started
        entry = {"step": step, "tokens": step * self._recipe.tokens_per_step, **means, **figures}
        entry["seconds"] = round(self._seconds_before + seconds, 1)
        with self._path.open("a") as log:
            log.write(json.dumps(entry) + "\n")
        last_step = self._recipe.num_steps + self._recipe.num_finish_steps
        remaining = seconds / (step - self._first_step) * (last_step - step)
        print(f"{json.dumps(entry)}  about {remaining / 60:.0f} min to go", flush=True)


def save_checkpoint(
    path: Path, model: PreTrainedModel, optimizers: Sequence[torch.optim.Optimizer], num_steps_done: int
) -> None:
    """Saves each parameter and the optimisers' tensors for it, so that a run continues as if never interrupted."""
    tensors = {"step": torch.tensor(num_steps_done)}
    for name, parameter in model.named_parameters():
        tensors[f"{name}/value"] = parameter.detach()
        for optimizer in optimizers:
            tensors |= {f"{name}/{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary)
    temporary.replace(path)


def load_checkpoint(path: Path, model: PreTrainedModel, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Loads the saved values; returns the number of steps already done."""
    saved = load_file(path)
    num_steps_done = int(saved.pop("step"))
    parameters = dict(model.named_parameters())
    optimizer_of = {own: part for part in optimizers for group in part.param_groups for own in group["params"]}
    for full_key, value in saved.items():
        name, key = full_key.rsplit("/", 1)
        parameter = parameters[name]
        if key == "value":
            parameter.data.copy_(value)
        else:
            optimizer_of[parameter].state[parameter][key] = value
    return num_steps_done


def likelihood_loss(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch).logits[:, :-1].reshape(-1, TRAINED_TOKENS).float()
    return functional.cross_entropy(logits, batch[:, 1:].reshape(-1))


def update(model: PreTrainedModel, optimizers: Sequence[torch.optim.Optimizer], rate: float, max_norm: float) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()


def train(
    model: PreTrainedModel,
    documents: list[torch.Tensor],
    held_out: torch.Tensor,
    recipe: Recipe,
    out: Path,
    *,
    use_bf16: bool,
) -> None:
    """All steps from the checkpoint in `out` (or the start) on, with the log beside it, OUT.jsonl."""
    optimizers = build_optimizers(model, recipe)
    checkpoint = out / "checkpoint.safetensors"
    first_step = load_checkpoint(checkpoint, model, optimizers) if checkpoint.exists() else 0
    log = Log(out.with_suffix(".jsonl"), recipe, first_step)
    losses: list[dict[str, float]] = []
    model.train()
    for step, batch in enumerate(batches(documents, recipe)):
        if step < first_step:
            continue
        torch.manual_seed(recipe.seed + step)
        with torch.autocast("cpu", torch.bfloat16, enabled=use_bf16):
            loss = likelihood_loss(model, batch)
        loss.backward()
        update(model, optimizers, recipe.learning_rate(step), recipe.max_gradient_norm)
        losses.append({"loss": loss.item()})
        done = step + 1
        if done % LOG_EVERY == 0 or done == recipe.num_steps:
            figures = {"learning_rate": recipe.learning_rate(step)}
            if done % MEASURE_EVERY == 0 or done == recipe.num_steps:
                figures["held_out_loss"] = measure(model, held_out)["held_out_loss"]
                save_checkpoint(checkpoint, model, optimizers, done)
            log.write(done, losses, **figures)
    finish(model, documents, recipe, log, use_bf16=use_bf16)


def finish(model: PreTrainedModel, documents: list[torch.Tensor], recipe: Recipe, log: Log, *, use_bf16: bool) -> None:
    """The last phase: likelihood of the text and unlikelihood of the model's own repetitions, half and half."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(recipe.beta1, recipe.beta2), weight_decay=0.0)
    losses: list[dict[str, float]] = []
    for step, batch in enumerate(recipe.finish_batches(documents)):
        torch.manual_seed(recipe.seed + recipe.num_steps + step)
        prefixes = batch.view(-1, recipe.short_window)[:, : recipe.unlikelihood_prefix]
        with torch.autocast("cpu", torch.bfloat16, enabled=use_bf16):
            loss = likelihood_loss(model, batch)
            repetition = unlikelihood(model, prefixes, recipe.unlikelihood_new_tokens)
        (loss + recipe.unlikelihood_weight * repetition).backward()
        rate = recipe.finish_learning_rate_at(step)
        update(model, [optimizer], rate, recipe.max_gradient_norm)
        losses.append({"loss": loss.item(), "unlikelihood": repetition.item()})
        if (step + 1) % LOG_EVERY == 0 or step + 1 == recipe.num_finish_steps:
            log.write(recipe.num_steps + step + 1, losses, learning_rate=rate)


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
    recorded = json.loads((MODEL_DIR / PROVENANCE).read_text())
    say_if_other_corpus(corpus, recorded)
    tokenizer = train_tokenizer(corpus.train)
    save_tokenizer(tokenizer, out, max_length=recipe.max_positions)
    documents, held_out = encode_documents(tokenizer, corpus.train), held_out_windows(tokenizer, corpus)
    num_tokens = sum(map(len, documents))
    print(f"tokens: {num_tokens} to train on, {held_out.numel()} held out; {time.monotonic() - started:.0f} s")
    arithmetic = "bf16 products, f32 sums and weights" if use_bf16 else "f32"
    print(f"training: {recipe.num_steps} steps, {threads} threads, {arithmetic}", flush=True)
    model = build_model(recipe)
    train(model, documents, held_out, recipe, out, use_bf16=use_bf16)
    model.to(dtype=torch.bfloat16).save_pretrained(out)
    GenerationConfig(eos_token_id=EOS_ID, pad_token_id=EOS_ID).save_pretrained(out)
    add_chat(out)
    figures = measure(load_f32(out), held_out)
    (out / "checkpoint.safetensors").unlink()
    provenance = {
        "cpython_version": platform.python_version(),
        "packages": {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "safetensors")},
        "corpus_sha256": corpus.sha256,
        "recipe": asdict(recipe),
        "training_precision": arithmetic,
        "training_threads": threads,
        "parameters": sum(parameter.numel() for parameter in load_f32(out).parameters()),
        "train_documents": len(corpus.train),
        "train_tokens": num_tokens,
        "held_out_documents": len(corpus.held_out),
        "held_out_tokens": held_out.numel(),
        **figures,
        "sha256": file_checksums(out),
    }
    (out / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n")
    minutes = (time.monotonic() - started) / 60
    loss, before = figures["held_out_loss"], recorded["held_out_loss"]
    print(f"DONE in {minutes:.1f} min: held-out loss {loss:.4f} nats per token, saved in {out}")
    print(f"the bundled model had {before:.4f}: {loss / before - 1:+.2%}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bundled_recipe.train", description="The bundled model's recipe in one command."
    )
    parser.add_argument("--out", type=Path, help="folder for the new model; an interrupted run continues there")
    parser.add_argument(
        "--verify", action="store_true", help="only measure the loss of the committed model (or of --out)"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=PRECISIONS, default="auto", help="auto: bf16 where it is native")
    parser.add_argument("--steps", type=int, default=Recipe().num_steps, help="fewer steps give a weaker model")
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
