"""Reads, checks and identifies a model's folder before a weight is loaded, and compares another folder with it.

Owns the description of the model in Join, which stays while the worker lives: another folder for new weights may not
differ in tokenizer, files of chats, stop ids and defaults, and each file that it does not have is as in the served
model (what config.json computes is compared by `memory.model_facts`). Knows nothing of torch modules, pages, plans or
sockets.
"""

import copy
import hashlib
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gpu_worker.checkpoint.folder import (
    ModelRefused,
    WeightFiles,
    find_weights,
    read_json,
    read_settings,
    tokenizer_files,
)
from gpu_worker.checkpoint.generation import GENERATION_FILE, Generation, eos_ids, read_generation
from gpu_worker.checkpoint.recognise import of_refused, senses_of
from gpu_worker.checkpoint.tokenizer import ModelTokenizer, read_tokenizer, source_hashes

log = logging.getLogger(__name__)

# Samples of a model's weights for its identity, distributed over the shards by size.
_SAMPLE_BYTES, _NUM_SAMPLES = 4096, 1024
_LEAST_SAMPLES = 4
# As the scheduler takes it in Join.
_MAX_VOCABULARY = 1 << 24
# The worker's setting decides in which dtype a model is served.
_DTYPES = ("dtype", "torch_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model's folder and its description for Join, without the weights."""

    folder: Path
    config: PreTrainedConfig
    weights: WeightFiles
    eos_token_ids: tuple[int, ...]
    generation: Generation
    # Empty without a tokenizer: prompts and outputs are token ids then.
    tokenizer: ModelTokenizer


def read_files(folder: Path, served: ModelFiles | None = None) -> ModelFiles:
    """Reads the folder, and only the headers of weights; served: the model that has what the folder lacks.

    Raises ModelRefused, or OSError with the file's name.
    """
    config = copy.deepcopy(served.config) if served and not (folder / "config.json").is_file() else read_config(folder)
    generation = served.generation if served and not (folder / GENERATION_FILE).is_file() else read_generation(folder)
    weights, ids = find_weights(folder), stop_ids(config, generation, folder)
    if served and not tokenizer_files(folder):
        tokenizer = served.tokenizer
    else:
        tokenizer = read_tokenizer(folder, config.get_text_config().vocab_size, config)
    return ModelFiles(
        folder=folder, config=config, weights=weights, eos_token_ids=ids, generation=generation, tokenizer=tokenizer
    )


def warn_of(files: ModelFiles) -> None:
    """Logs what the folder lacks, and what of its options is changed or ignored."""
    if not files.tokenizer.backend_json:
        log.warning(
            "%s has no tokenizer: prompts and outputs are token ids only; for texts, add the model's tokenizer.json",
            files.folder,
        )
    if sign := senses_of(files.config.to_diff_dict()):
        log.warning("%s is also for images or sound (%s in config.json): its text alone is served", files.folder, sign)
    for note in files.generation.notes:
        log.warning("%s", note)
    if files.generation.unsupported:
        log.warning(
            "generation_config.json contains %s, which is not supported; it is ignored",
            ", ".join(files.generation.unsupported)[:500],
        )


def read_config(folder: Path) -> PreTrainedConfig:
    """config.json as Transformers reads it. Raises ModelRefused, or OSError with the file's name."""
    path = folder / "config.json"
    settings = read_settings(folder)
    _refuse_unknown_model(path, settings)
    try:
        with tempfile.TemporaryDirectory(prefix="tandem-config-") as cleaned:
            (Path(cleaned) / path.name).write_text(json.dumps(_cleaned(settings, path)))
            config = AutoConfig.from_pretrained(cleaned, trust_remote_code=False)
        # Equal configs in different folders describe one model.
        config._name_or_path = ""
        parts = (config, config.get_text_config())
    except (OSError, ModelRefused):
        raise
    except Exception as error:  # any error of a config class of Transformers
        raise ModelRefused(f"{path} cannot be used: {' '.join(str(error).split())[:300]}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and (refused := of_refused(settings)):
        raise ModelRefused(refused.sentence(folder))
    for part in parts:
        if not isinstance(part, PreTrainedConfig):
            raise ModelRefused(f"{path} has a text_config that is not an object of settings: correct the file")
        # A forward returns logits only.
        part.return_dict = True
        for name in ("output_attentions", "output_hidden_states", "output_router_logits"):
            if getattr(part, name, False):
                setattr(part, name, False)
    size = getattr(parts[1], "vocab_size", None)
    if not isinstance(size, int) or not 1 <= size <= _MAX_VOCABULARY:
        raise ModelRefused(f"vocab_size in {path} is {size!r}; it must be 1 to {_MAX_VOCABULARY}: correct the file")
    return config


def _cleaned(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    """The settings, and those of parts, without dtypes, and with stop ids as a list of numbers."""
    cleaned = {name: value for name, value in settings.items() if name not in _DTYPES}
    for name, value in cleaned.items():
        if isinstance(value, dict):
            cleaned[name] = _cleaned(value, path)
    if isinstance(cleaned.get("eos_token_id"), list):
        notes = list[str]()
        cleaned["eos_token_id"] = list(eos_ids(cleaned["eos_token_id"], path, notes) or ())
        for note in notes:
            log.warning("%s", note)
    return cleaned


def stop_ids(config: PreTrainedConfig, generation: Generation, folder: Path) -> tuple[int, ...]:
    """The stop ids of generation_config.json, or else of config.json. Raises ModelRefused."""
    text, name = config.get_text_config(), GENERATION_FILE
    ids, notes = generation.eos_token_ids, list[str]()
    for part in (config, text):
        if ids is None:
            name = "config.json"
            ids = eos_ids(getattr(part, "eos_token_id", None), folder / name, notes)
    for token in ids or ():
        if not 0 <= token < text.vocab_size:
            raise ModelRefused(
                f"eos_token_id in {folder / name} is {token}; it must be 0 to {text.vocab_size - 1}, the model's "
                "vocabulary: correct the file"
            )
    return ids or ()


def _refuse_unknown_model(path: Path, settings: dict[str, Any]) -> None:
    """Raises ModelRefused if Transformers lacks the model type, because a checkpoint's own code is never run."""
    kind, own_code = settings.get("model_type"), settings.get("auto_map") or {}
    if kind is not None and not isinstance(kind, str):
        raise ModelRefused(f"{path} has model_type {kind!r:.80}; it must be a name, as Transformers saves it")
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


def check_described(served: ModelFiles, new: ModelFiles) -> None:
    """Raises ModelRefused, which names file and field, unless both folders describe the same for Join."""
    for name in differences(_for_join(served), _for_join(new)):
        raise ModelRefused(f"{name}; start the worker with this folder instead")


def differences(served: Mapping[str, Any], new: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Each field that differs, as `name is X, the served model's is Y`, with the path of nested ones."""
    for name in sorted(served.keys() | new.keys()):
        ours, theirs = served.get(name), new.get(name)
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
