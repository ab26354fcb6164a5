"""The `rollout_func` of TRL's `GRPOTrainer`: samples from a Tandem service with the trainer's newest weights.

Imports neither torch nor TRL. It uses of the trainer: `state.global_step`, `model.save_pretrained`, `processing_class`
for prompts that are messages, and `args` with `num_generations`, `max_completion_length`, `seed` and what they have of
the options of sampling. The prompts come as TRL passes them: each `num_generations` times in a row.
"""

import itertools
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from tandem_client.errors import TandemError
from tandem_client.sync_client import Client
from tandem_client.types import UpdateState
from tandem_client.wire.parts import SAMPLING
from tandem_client.wire.request import GenerateOptions

_MAX_THREADS = 32


class UpdateFailed(TandemError):
    """Not all workers have the new weights."""


class TandemRollout:
    """Call it as `rollout_func(prompts, trainer)`. It keeps one folder of weights, that of the newest version."""

    def __init__(self, client: Client, folder: str | os.PathLike[str], *, timeout: float | None = None) -> None:
        """`folder`: an absolute path below --weights-folders, which workers see too. `timeout`: seconds for a call."""
        self._client, self._folder, self._timeout = client, Path(folder), timeout
        # Versions are never used twice, also by another trainer.
        self._run = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._step: int | None = None
        self._newest: Path | None = None

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Returns prompt_ids, completion_ids and logprobs, one entry for each prompt, in order."""
        self.synchronize(trainer)
        groups = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
        with ThreadPoolExecutor(min(_MAX_THREADS, len(groups))) as pool:
            waiting = [pool.submit(self._samples, idx, group, trainer) for idx, group in enumerate(groups)]
            results = [group.result() for group in waiting]
        return {name: [entry for result in results for entry in result[name]] for name in results[0]}

    def synchronize(self, trainer: Any) -> None:
        """Lets the service load the trainer's weights, if they have changed. Raises UpdateFailed."""
        step = int(trainer.state.global_step)
        if step == self._step:
            return
        version = f"{self._run}-{step}-{next(self._numbers)}"
        folder = self._folder / version
        folder.mkdir(parents=True)
        trainer.model.save_pretrained(folder, safe_serialization=True)
        *_, last = self._client.update_weights(folder, version=version, timeout=self._timeout)
        if last.state is not UpdateState.DONE:
            raise UpdateFailed(f"weights {version}: {last.state}: {last.detail}")
        # Workers that join load the newest folder.
        self.close()
        self._step, self._newest = step, folder

    def close(self) -> None:
        """Removes the newest folder; workers that join later cannot load it then."""
        if self._newest is not None:
            shutil.rmtree(self._newest, ignore_errors=True)
            self._newest = None

    def _samples(self, idx: int, group: tuple[Any, int], trainer: Any) -> dict[str, list[Any]]:
        prompt, count = group
        ids = _token_ids(prompt, trainer.processing_class)
        stream = self._client.generate(ids, timeout=self._timeout, **self._options(idx, count, trainer))
        for _ in stream:
            pass  # The stream collects its samples.
        logprobs = [[entry.logprob for entry in sample.logprobs] for sample in stream.samples]
        tokens = [sample.token_ids for sample in stream.samples]
        return {"prompt_ids": [ids] * count, "completion_ids": tokens, "logprobs": logprobs}

    def _options(self, idx: int, count: int, trainer: Any) -> GenerateOptions:
        args = trainer.args
        options: dict[str, Any] = {
            "num_samples": count,
            "max_new_tokens": args.max_completion_length,
            "logprobs": 0,
            # Other noise for each step and prompt, and the same in a run with the same seed.
            "seed": (args.seed * 1_000_003 + (self._step or 0) * 10_007 + idx) & 0xFFFF_FFFF,
        }
        given = {name: getattr(args, name, None) for name in SAMPLING if name not in options}
        if given["top_k"] is not None:
            # -1 is another name of all tokens.
            given["top_k"] = max(0, given["top_k"])
        return cast(GenerateOptions, options | given)


def _token_ids(prompt: Any, tokenizer: Any) -> list[int]:
    """The ids of a text, of a list of messages, or of ids."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if prompt and isinstance(prompt[0], Mapping):
        return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False))
    return list(prompt)
