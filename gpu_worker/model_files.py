"""The model's folder: found, read, refused or identified, before a weight is loaded.

Owns everything Join says of the model, and which files are read: safetensors and JSON, nothing that can run code.
Knows nothing of torch modules, pages, plans or sockets.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

_SAMPLE_BYTES, _NUM_SAMPLES = 4096, 1024


class ModelRefused(ValueError):
    """The model cannot be served; the message says why and what would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model's folder, and what Join says of it beside the weights."""

    folder: Path
    config: PreTrainedConfig
    eos_token_ids: tuple[int, ...]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    tokenizer_json: bytes
    chat_template: str


def locate(name: str) -> Path:
    """The folder of a local path or of a hub name (downloaded: safetensors, no code). Raises ModelRefused."""
    if Path(name).is_dir():
        return Path(name).resolve()
    if name.startswith((".", "/", "~")):
        raise ModelRefused(f"model folder {name} does not exist")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.jinja"]))
    except (OSError, ValueError, HFValidationError) as error:
        reason = str(error).splitlines()[0]
        raise ModelRefused(f"model {name} is no folder here and cannot be had from the hub: {reason}") from error


def read_files(folder: Path) -> ModelFiles:
    """Everything but the weights. Raises ModelRefused."""
    if not (folder / "config.json").is_file():
        raise ModelRefused(f"{folder} has no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        generation = _generation_config(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelRefused(f"{folder}/config.json cannot be used: {error}") from error
    eos = generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id
    eos_ids = eos if isinstance(eos, list) else [eos] if eos is not None else []
    draws = bool(generation.do_sample)

    def default(name: str, off: float) -> float:
        value = getattr(generation, name, None)
        return off if value is None or not draws else value

    return ModelFiles(
        folder=folder,
        config=config,
        eos_token_ids=tuple(int(token) for token in eos_ids),
        temperature=default("temperature", 1.0) if draws else 0.0,
        top_p=default("top_p", 1.0),
        top_k=int(default("top_k", 0)),
        min_p=default("min_p", 0.0),
        tokenizer_json=_read_bytes(folder / "tokenizer.json"),
        chat_template=_chat_template(folder),
    )


def identity(files: ModelFiles, page_size: int) -> str:
    """SHA-256 over weights, config, tokenizer and page size: workers with equal ones continue each other's requests."""
    digest = hashlib.sha256()

    def add(name: str, data: bytes) -> None:
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)

    for path in sorted(files.folder.glob("*.safetensors")):
        add(path.name, hashlib.sha256(b"".join(_fingerprint(path))).digest())
    add("config.json", _canonical(files.folder / "config.json"))
    add("tokenizer.json", files.tokenizer_json)
    add("chat_template", files.chat_template.encode())
    add("page_size", str(page_size).encode())
    return digest.hexdigest()


def _fingerprint(path: Path) -> Iterator[bytes]:
    """The header with every tensor's name and place, and evenly spaced samples; files up to 4 MiB are read whole."""
    size = path.stat().st_size
    yield size.to_bytes(8, "little")
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        yield file.read(min(header_bytes, 100 << 20))
        start = file.tell()
        stride = max(_SAMPLE_BYTES, (size - start) // _NUM_SAMPLES)
        for offset in range(start, size, stride):
            file.seek(offset)
            yield file.read(_SAMPLE_BYTES)


def _canonical(path: Path) -> bytes:
    return json.dumps(json.loads(path.read_text()), sort_keys=True).encode()


def _read_bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _generation_config(folder: Path) -> GenerationConfig:
    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig()


def _chat_template(folder: Path) -> str:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text()
    if (folder / "tokenizer_config.json").is_file():
        settings: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
        template = settings.get("chat_template")
        return template if isinstance(template, str) else ""
    return ""
