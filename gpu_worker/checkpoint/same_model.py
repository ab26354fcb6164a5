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

from tokenizers import Tokenizer

from gpu_worker.checkpoint.files import ModelFiles, read_config, read_tokenizer, stop_ids
from gpu_worker.checkpoint.generation import GENERATION_FILE, read_generation
from gpu_worker.checkpoint.weights import DESCRIPTIONS, TEMPLATES, ModelRefused, find_weights

_START_ANEW = "start the worker with this folder instead"
_OF_TOKENIZER = (*(name for name in DESCRIPTIONS if name not in ("config.json", GENERATION_FILE)), TEMPLATES)


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
    if any((folder / name).exists() for name in _OF_TOKENIZER):
        tokenizer_json, chat = read_tokenizer(folder, int(config.get_text_config().vocab_size))
        found = replace(found, tokenizer_json=tokenizer_json, chat=chat)
    return found


def check_described(own: ModelFiles, new: ModelFiles) -> None:
    """Raises ModelRefused, which names file and field, unless both folders describe the same for Join."""
    if bool(own.tokenizer_json) != bool(new.tokenizer_json):
        has, had = ("a" if each.tokenizer_json else "no" for each in (new, own))
        raise ModelRefused(f"the folder has {has} tokenizer.json, the served model {had}; {_START_ANEW}")
    for name in differences(_for_join(own), _for_join(new)):
        raise ModelRefused(f"{name}; {_START_ANEW}")
    if own.tokenizer_json != new.tokenizer_json and _canonical(own.tokenizer_json) != _canonical(new.tokenizer_json):
        raise ModelRefused(f"tokenizer.json differs from the served model's; {_START_ANEW}")


def differences(own: Mapping[str, Any], new: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Each field that differs, as `name is X, the served model's is Y`, with the path of nested ones."""
    for name in sorted(own.keys() | new.keys()):
        ours, theirs = own.get(name), new.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            yield from differences(ours, theirs, f"{within}{name}.")
        elif ours != theirs:
            yield f"{within}{name} is {theirs!r:.80}, the served model's is {ours!r:.80}"


def _for_join(files: ModelFiles) -> dict[str, Any]:
    """What travels in Join of the folder's small files, by file."""
    generation = {"eos_token_id": sorted(files.eos_token_ids), **files.generation.defaults}
    chat = asdict(files.chat)
    for name in ("tokenizer_config_json", "response_template_json"):
        chat[name.removesuffix("_json")] = json.loads(chat.pop(name) or "{}")
    return {GENERATION_FILE: generation, "files of chats": chat}


def _canonical(tokenizer_json: bytes) -> str:
    """The same text for tokenizers that give the same ids: trainers write another version's form, and their padding."""
    if not tokenizer_json:
        return ""
    tokenizer: Tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return str(tokenizer.to_str())
