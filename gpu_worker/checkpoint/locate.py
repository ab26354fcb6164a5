"""Finds the model's folder, local or downloaded from the hub, and makes the checks that need no torch.

Imports neither torch nor Transformers, so that a wrong name is refused within a second.
"""

import json
import logging
from pathlib import Path
from typing import Any

from gpu_worker.checkpoint.weights import ModelRefused, find_weights
from tandem_contract import logs

log = logging.getLogger(__name__)

# Parts of config.json that may contain quantization_config, besides the top level.
_PARTS = ("text_config",)
# Weights, and the files of configs, templates and tokenizers; no code.
_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]


def locate(name: str) -> Path:
    """The folder of a local path or of a hub name (downloaded: safetensors, no code). Raises ModelRefused."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.exists():
        raise ModelRefused(f"model {name} is a file; give the folder with config.json and safetensors")
    if name.startswith((".", "/", "~")):
        raise ModelRefused(f"model folder {name} does not exist; model is a folder or a hub name")
    log.info("fetching %s from the hub, unless it is in the hub's cache already", name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    if not logs.can_draw():
        disable_progress_bars()

    neither = f"model {name} is neither a local folder nor reachable on the hub"
    hint = "check the spelling, or download it and give the folder"
    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS))
    except HFValidationError as error:
        raise ModelRefused(f"{neither}: a hub name has the form name or owner/name; {hint}") from error
    except RepositoryNotFoundError as error:
        raise ModelRefused(f"{neither}: the hub has no such model, or it is private; {hint}") from error
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{neither}: {_first_cause(error)}; {hint}") from error


def check_folder(folder: Path) -> None:
    """Raises ModelRefused for a folder without config.json or safetensors, and for quantised weights."""
    read_settings(folder)
    find_weights(folder)


def read_settings(folder: Path) -> dict[str, Any]:
    """The contents of config.json. Raises ModelRefused, or OSError with the file's name."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelRefused(f"{folder} has no config.json; a model is a folder with config.json and safetensors")
    settings = read_json(path)
    for part in (settings, *(settings.get(name) for name in _PARTS)):
        quantised = part.get("quantization_config") if isinstance(part, dict) else None
        if quantised is not None:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else None
            raise ModelRefused(
                f"{folder} holds weights quantised with {method or 'an unnamed method'} (quantization_config in "
                "config.json), which are not served; use the unquantised checkpoint"
            )
    return settings


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelRefused, or OSError with the file's name."""
    try:
        settings = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{path} is not JSON: {error}; download it again") from error
    if not isinstance(settings, dict):
        raise ModelRefused(f"{path} is not a JSON object; download it again")
    return settings


def _first_cause(error: BaseException) -> str:
    """The first cause, because the hub's exceptions wrap those of the network."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    text = getattr(error, "strerror", None) or next(iter(str(error).strip().splitlines()), "")
    return (text or type(error).__name__).rstrip(".")
