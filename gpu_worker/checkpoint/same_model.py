"""What a folder describes beside its weights, compared with the served model's, which was told in Join and stays.

Owns the refusals of another tokenizer, other files of chats, stop ids and defaults. Each file that the folder does not
have is as in the served model. What config.json computes is compared by `memory.model_facts`.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gpu_worker.checkpoint.files import ModelFiles, read_config, stop_ids
from gpu_worker.checkpoint.generation import GENERATION_FILE, read_generation
from gpu_worker.checkpoint.tokenizer import read_tokenizer
from gpu_worker.checkpoint.weights import ModelRefused, find_weights, tokenizer_files

_START_ANEW = "start the worker with this folder instead"


def read_described(folder: Path, own: ModelFiles) -> ModelFiles:
    """The folder as `read_files` reads it, with what it lacks from `own`. Raises ModelRefused, and OSError."""
    has_config, has_options = ((folder / name).is_file() for name in ("config.json", GENERATION_FILE))
    config = read_config(folder) if has_config else copy.deepcopy(own.config)
    generation = read_generation(folder) if has_options else own.generation
    found = replace(
        own,
        folder=folder,
        config=config,
        weights=find_weights(folder),
        eos_token_ids=stop_ids(config, generation, folder),
        generation=generation,
    )
    if tokenizer_files(folder):
        found = replace(found, tokenizer=read_tokenizer(folder, config.get_text_config().vocab_size, config))
    return found


def check_described(own: ModelFiles, new: ModelFiles) -> None:
    """Raises ModelRefused, which names file and field, unless both folders describe the same for Join."""
    for name in differences(_for_join(own), _for_join(new)):
        raise ModelRefused(f"{name}; {_START_ANEW}")


def differences(own: Mapping[str, Any], new: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Each field that differs, as `name is X, the served model's is Y`, with the path of nested ones."""
    for name in sorted(own.keys() | new.keys()):
        ours, theirs = own.get(name), new.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            yield from differences(ours, theirs, f"{within}{name}.")
        elif ours != theirs:
            yield f"{within}{name} is {theirs!r:.80}, the served model's is {ours!r:.80}"


def _for_join(files: ModelFiles) -> dict[str, Any]:
    """What travels in Join of the folder's small files."""
    generation = {"eos_token_id": sorted(files.eos_token_ids), **files.generation.defaults}
    tokenizer = asdict(files.tokenizer)
    for name in ("backend_json", "settings_json", "response_template_json"):
        tokenizer[name.removesuffix("_json")] = json.loads(tokenizer.pop(name) or "{}")
    return {GENERATION_FILE: generation, "tokenizer": tokenizer}
