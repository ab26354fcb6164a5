"""Trains the bundled model by GRPO with samples of a Tandem service: `make test-trl`.

The reward of a completion is the share of its characters that are the letter e. Exit code 1 if a seed does not learn.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tandem_client import Client
from tandem_client.training.rollout import TandemRollout

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "gpu_worker" / "bundled" / "model"
STEPS, TENTH, GAIN = 40, 10, 1.5
# The service's Python, which has its packages.
PYTHON = os.environ.get("TANDEM_PYTHON", sys.executable)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [text.count("e") / max(1, len(text)) for text in completions]


def train(client: Client, folder: Path, seed: int) -> list[float]:
    """The mean reward of each step."""
    lines = (ROOT / "tests" / "bundled_recipe" / "prompts.txt").read_text().splitlines()
    prompts = [line for line in lines if line.strip()][:64]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rollout = TandemRollout(client, folder)
    config = GRPOConfig(
        output_dir=str(folder / "out"), max_steps=STEPS, per_device_train_batch_size=16, num_generations=8,
        max_completion_length=24, learning_rate=1e-3, temperature=1.0, seed=seed, data_seed=seed, logging_steps=1,
        report_to=[], use_cpu=True, bf16=False, save_strategy="no", beta=0.0, lr_scheduler_type="constant",
        disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    trainer.train()
    rollout.close()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trl")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    seeds = parser.parse_args().seeds
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    runtime, weights = folder / "run", folder / "weights"
    weights.mkdir()
    common = ["--runtime-dir", str(runtime), "--exit-with-parent"]
    worker = [PYTHON, "-m", "gpu_worker", *common, "--device", "cpu", "--threads", "1", "--max-rows", "64"]
    listen, log = "127.0.0.1:50971", (folder / "service.log").open("w")
    scheduler = [PYTHON, "-m", "scheduler_svc", *common, "--listen", listen, "--weights-folders", str(weights)]
    children = [subprocess.Popen(command, cwd=ROOT, stderr=log) for command in (scheduler, worker)]
    failed = 0
    try:
        with Client(listen) as client:
            client.wait_ready(120)
            for seed in seeds:
                begun = time.perf_counter()
                rewards = train(client, weights, seed)
                first, last = sum(rewards[:TENTH]) / TENTH, sum(rewards[-TENTH:]) / TENTH
                failed += last < GAIN * first or len(rewards) != STEPS
                seconds = time.perf_counter() - begun
                print(
                    f"seed {seed}: reward {first:.4f} -> {last:.4f}, x {last / first:.2f}, {seconds:.0f} s", flush=True
                )
    finally:
        for child in children:
            child.terminate()
            child.wait()
        shutil.rmtree(folder)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
