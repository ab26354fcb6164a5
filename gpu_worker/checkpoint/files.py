"""Reads, checks and identifies the model's folder before a weight is loaded.

Owns the description of the model in Join, and the choice of files: safetensors and JSON, no format that can run code.
Knows nothing of torch modules, pages, plans or sockets.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gpu_worker.checkpoint.locate import read_json, read_settings
from gpu_worker.checkpoint.tokenizer import ModelTokenizer, read_tokenizer, source_hashes
from gpu_worker.checkpoint.weights import ModelRefused, WeightFiles, find_weights
from gpu_worker.failures import first_line

# Samples of a model's weights for its identity, distributed over the shards by size.
_SAMPLE_BYTES, _NUM_SAMPLES = 4096, 1024
_LEAST_SAMPLES = 4
# Options of generation_config.json that change tokens and are not supported, with their values for "off".
_UNSUPPORTED = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "typical_p": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model's folder and its description for Join, without the weights."""

    folder: Path
    config: PreTrainedConfig
    weights: WeightFiles
    eos_token_ids: tuple[int, ...]
    # Settings of sampling, by their names in GenerationDefaults of worker.proto.
    defaults: dict[str, float]
    # Unsupported options of generation_config.json, as `name value`.
    unsupported: tuple[str, ...]
    # Empty without a tokenizer: prompts and outputs are token ids then.
    tokenizer: ModelTokenizer


def read_files(folder: Path) -> ModelFiles:
    """Reads the folder, and only the headers of weights. Raises ModelRefused, or OSError with the file's name."""
    config = _read_config(folder)
    try:
        has_options = (folder / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(folder) if has_options else GenerationConfig()
    except (OSError, ValueError, TypeError) as error:
        raise ModelRefused(f"{folder}/generation_config.json cannot be used: {first_line(error)}") from error
    eos = generation.eos_token_id if generation.eos_token_id is not None else getattr(config, "eos_token_id", None)
    eos_ids = eos if isinstance(eos, list) else [eos] if eos is not None else []
    vocab_size = int(config.get_text_config().vocab_size)
    for token in eos_ids:
        if not 0 <= int(token) < vocab_size:
            raise ModelRefused(
                f"eos_token_id is {token}; it must be 0 to {vocab_size - 1}, the model's vocabulary: "
                "correct generation_config.json or config.json"
            )
    return ModelFiles(
        folder=folder,
        config=config,
        weights=find_weights(folder),
        eos_token_ids=tuple(int(token) for token in eos_ids),
        defaults=_sampling_defaults(generation),
        unsupported=_unsupported_options(generation),
        tokenizer=read_tokenizer(folder, vocab_size),
    )


def _read_config(folder: Path) -> PreTrainedConfig:
    path = folder / "config.json"
    _refuse_unknown_model(path, read_settings(folder))
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except OSError:
        raise
    except Exception as error:  # any error of a config class of Transformers
        raise ModelRefused(f"{path} cannot be used: {first_line(error)}") from error
    for part in (config, config.get_text_config()):
        # A forward returns logits only.
        part.return_dict = True
        for name in ("output_attentions", "output_hidden_states", "output_router_logits"):
            if getattr(part, name, False):
                setattr(part, name, False)
    return config


def _refuse_unknown_model(path: Path, settings: dict[str, Any]) -> None:
    """Raises ModelRefused if Transformers lacks the model type, because a checkpoint's own code is never run."""
    kind, own_code = settings.get("model_type"), settings.get("auto_map") or {}
    if kind in CONFIG_MAPPING and (kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or not own_code):
        return
    installed, written_by = transformers.__version__, settings.get("transformers_version")
    if own_code:
        raise ModelRefused(
            f"{path}: model type {kind} needs its own code (auto_map), which is never run; "
            f"serve a checkpoint of a model that Transformers {installed} supports"
        )
    if kind is None:
        raise ModelRefused(f"{path} has no model_type; a checkpoint saved by Transformers has one")
    newer = f", config.json was written by {written_by}" if isinstance(written_by, str) else ""
    raise ModelRefused(
        f"{path}: model type {kind} is unknown to the installed Transformers {installed}{newer}; "
        "a newer Transformers may support it"
    )


def identity(files: ModelFiles, page_size: int, window: tuple[int, int] | None = None) -> str:
    """SHA-256 of weights, config, files of tokenizer and chats, page size, and the settings window and window_sinks.

    Workers with equal identities can continue each other's requests.
    """
    digest = hashlib.sha256()

    def add(name: str, data: bytes) -> None:
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)

    sizes = {path: path.stat().st_size for path in files.weights.paths}
    for path, size in sizes.items():
        num_samples = max(_LEAST_SAMPLES, _NUM_SAMPLES * size // sum(sizes.values()))
        add(path.name, hashlib.sha256(b"".join(_fingerprint(path, num_samples))).digest())
    add("config.json", json.dumps(read_json(files.folder / "config.json"), sort_keys=True).encode())
    for name, hashed in source_hashes(files.folder):
        add(name, hashed)
    add("page_size", str(page_size).encode())
    if window is not None:
        add("window", "{} {}".format(*window).encode())
    return digest.hexdigest()


def _fingerprint(path: Path, num_samples: int) -> Iterator[bytes]:
    """The header with every tensor's name and offset, and evenly spaced samples; a model up to 4 MiB is read whole."""
    size = path.stat().st_size
    yield size.to_bytes(8, "little")
    with path.open("rb") as file:
        yield file.read(int.from_bytes(file.read(8), "little"))
        start = file.tell()
        stride = max(_SAMPLE_BYTES, (size - start) // num_samples)
        for offset in range(start, size, stride):
            file.seek(offset)
            yield file.read(_SAMPLE_BYTES)


def _sampling_defaults(generation: GenerationConfig) -> dict[str, float]:
    # The penalty applies to greedy decoding too, as in Transformers.
    penalty = {"repetition_penalty": generation.repetition_penalty or 1.0}
    if not generation.do_sample:
        return penalty | {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    usual = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    given = {name: type(off)(value) for name, off in usual.items() if (value := getattr(generation, name)) is not None}
    return penalty | usual | given


def _unsupported_options(generation: GenerationConfig) -> tuple[str, ...]:
    asked = {name: getattr(generation, name, None) for name in _UNSUPPORTED}
    return tuple(
        f"{name} {value}" for name, value in asked.items() if value is not None and value != _UNSUPPORTED[name]
    )
