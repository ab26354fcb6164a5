"""Recognises what a folder holds instead of a model that is served, and says what would work.

Owns one table, `Kind`: what each kind is, and the remedy. Every refusal of a folder takes them from here, at a start
and in an order to load new weights. Reads names in the folder, its small JSON files, and the first bytes of others.
Imports neither torch nor Transformers. What a model computes is not decided here: a config that may be served passes,
and `compatibility/` runs it. If that refuses it, `of_refused` names the kind.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
# How a file begins that Git LFS has not fetched.
POINTER = b"version https://git-lfs"
_LISTED, _SHOWN, _TEXT_CHARS = 10_000, 4, 300

_TEXT_MODEL = "serve a model that generates text by attention alone, such as Llama, Qwen3, Gemma 3 or Mistral"
_ORIGINAL = "give the folder of the original checkpoint, with config.json and safetensors"


class Kind(Enum):
    """What a folder, or a file, holds or is, with the sign of it for {}; and the remedy."""

    ADAPTER = (
        "holds an adapter (LoRA, PEFT) {}, which is not served without its base model",
        "merge it into the base model with PEFT's merge_and_unload, then save_pretrained, and give that folder",
    )
    CLASSIFIER = ("holds a classifier ({}), which generates no text", _TEXT_MODEL)
    DIFFUSION = ("holds a diffusion pipeline ({}), which makes images", _TEXT_MODEL)
    EMBEDDING = ("holds an encoder or embedding model ({}), which generates no text", _TEXT_MODEL)
    EMPTY = ("is empty", "download the model again; it is a folder with config.json and safetensors")
    ENCODER_DECODER = ("holds an encoder-decoder model ({}); its encoder is not served", _TEXT_MODEL)
    EXPORT = ("holds an export for another runtime ({}), which is not read", _ORIGINAL)
    FOLDERS = ("holds no model itself, but folders of models: {}", "give one of them")
    GGUF = ("holds GGUF ({}), the format of llama.cpp, which is not read", _ORIGINAL)
    MULTIMODAL = ("holds a model of images or sound ({}), which is not served", _TEXT_MODEL)
    NO_CONFIG = (
        "has weights ({}) and no config.json",
        "download config.json of the same model; a model is a folder with config.json and safetensors",
    )
    NO_MODEL = (
        f"has neither config.json nor {SINGLE}",
        "give the folder of a model, with config.json and safetensors, or download it again",
    )
    NO_TEXT = ("holds a model that generates no text ({})", _TEXT_MODEL)
    NO_WEIGHTS = (f"has no weights: no {SINGLE} and no {INDEX}", "download it again")
    ORIGINAL = (
        "holds weights in their author's own format ({}), not that of Transformers",
        "give the model's folder for Transformers (at the hub often of the same name with -hf), or convert it with the "
        "script convert_…_weights_to_hf.py of Transformers",
    )
    PICKLED = (
        "has {} and no safetensors; pickled weights can run code and are never read",
        "save them with save_pretrained, which writes safetensors",
    )
    POINTER = ("has {}, a Git LFS pointer and not the file itself", "git lfs pull fetches it")
    QUANTISED = (
        "holds weights quantised with {}, which are not served",
        "use the unquantised checkpoint",
    )
    RENAMED = (
        f"has {{}}, but neither {SINGLE} nor {INDEX}",
        f"weights must have these names: rename a single file to {SINGLE}, or save the model with save_pretrained",
    )
    SHARDED = (
        "holds a training checkpoint in parts of its ranks ({})",
        "convert it with the trainer's own tool (zero_to_fp32.py, accelerate merge-weights), and save_pretrained",
    )
    SNAPSHOTS = ("is a model's folder in the hub's cache, with the snapshots {}", "give one of them")
    STATE_SPACE = (
        "holds a model with state-space, recurrent or convolution layers ({}); no page keeps their state",
        _TEXT_MODEL,
    )


# By the names of files in a folder without weights for Transformers; the first that fits.
_NAMES: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    (Kind.DIFFUSION, ("model_index.json",)),
    (Kind.ADAPTER, (ADAPTER_CONFIG, "adapter_model.*")),
    (Kind.GGUF, ("*.gguf", "ggml-*.bin")),
    (Kind.EXPORT, ("*.onnx", "onnx", "*.engine", "*.plan", "*.mlpackage", "*.mlmodel", "openvino_model.xml")),
    (Kind.EXPORT, ("*.tflite", "*.h5", "*.msgpack", "saved_model.pb", "weights.*npz", "*.nemo", "*.pte", "*.litertlm")),
    (Kind.ORIGINAL, ("consolidated.*", "params.json", "model-*-of-*.pt")),
    (Kind.SHARDED, ("*.distcp", "global_step*", "zero_to_fp32.py", "rank*.pt", "__*_*.pt")),
    (Kind.RENAMED, ("*.safetensors",)),
    (Kind.PICKLED, ("pytorch_model*.bin", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")),
)  # fmt: skip
# By the end of a class's name in config.json, as Transformers names its classes.
_CLASSES: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    (Kind.CLASSIFIER, ("Classification", "ForQuestionAnswering", "ForMultipleChoice", "ForNextSentencePrediction")),
    (Kind.CLASSIFIER, ("RewardModel",)),
    (Kind.EMBEDDING, ("ForMaskedLM", "ForPreTraining", "EncoderModel", "ForTextEncoding")),
)
# A file of sentence-transformers: a pooling layer, or a head, follows the model.
_AFTER_MODEL = "modules.json"
# Keys, layer types and model types of models with layers that have a state.
_STATE = re.compile(
    r"state spaces|mamba|rwkv|ssm|state_size|linear_(attention|attn|num|conv)|recurrent|lstm|short_conv|conv_L"
)
_SENSES = re.compile(r"vision|image|visual|video|audio|speech|pixel|patch_size")


@dataclass(frozen=True, slots=True)
class Found:
    """What was recognised, and the sign of it."""

    kind: Kind
    sign: str = ""

    def sentence(self, what: object) -> str:
        """What the kind says of `what`, the folder or file, and the remedy; in one line."""
        text, remedy = self.kind.value
        # A name may have line breaks.
        return f"{what} {text.format(' '.join(self.sign.split())[:_TEXT_CHARS])}; {remedy}"


def recognise(folder: Path) -> Found | None:
    """What the folder holds that is not served; None if it may be a model. Raises OSError if it cannot be read."""
    names = _names(folder)
    for name in names:
        may_be_pointer = name.endswith((".safetensors", ".json", ".model", ".tiktoken"))
        if may_be_pointer and _first_bytes(folder / name, len(POINTER)) == POINTER:
            return Found(Kind.POINTER, name)
    if CONFIG in names and (content := of_config(_json(folder / CONFIG))):
        return content
    if CONFIG not in names or not {SINGLE, INDEX} & {*names}:
        return of_names(folder)
    if _AFTER_MODEL in names:
        return Found(Kind.EMBEDDING, f"{_AFTER_MODEL} of sentence-transformers")
    return None


def of_names(folder: Path, view: Path | None = None) -> Found:
    """What a folder without weights, or without config.json, holds. `view`: where its small files are read instead."""
    names = _names(folder)
    for weights in (SINGLE, INDEX):
        if weights in names:
            return Found(Kind.NO_CONFIG, weights)
    for kind, patterns in _NAMES:
        first = next((name for pattern in patterns for name in names if fnmatch(name, pattern)), "")
        if first and kind is Kind.ADAPTER:
            base = _json((view or folder) / ADAPTER_CONFIG).get("base_model_name_or_path")
            return Found(kind, f"for {base:.150} ({first})" if isinstance(base, str) and base else f"({first})")
        if first:
            return Found(kind, first)
    if snapshots := snapshots_of(folder):
        return Found(Kind.SNAPSHOTS, _some([str(path.relative_to(folder)) for path in snapshots]))
    if inside := _models_inside(folder, names):
        return Found(Kind.FOLDERS, _some(inside))
    return Found(Kind.NO_WEIGHTS if CONFIG in names else Kind.NO_MODEL if names else Kind.EMPTY)


def of_config(settings: Mapping[str, Any]) -> Found | None:
    """What config.json says of a model that is surely not served; None if it may be."""
    for part in (settings, settings.get("text_config")):
        given = part.get("quantization_config") if isinstance(part, dict) else None
        if given is not None:
            method = given.get("quant_method") if isinstance(given, dict) else None
            return Found(Kind.QUANTISED, f"{method or 'an unnamed method'!s:.80} (quantization_config in config.json)")
    if isinstance(settings.get("quantization"), dict):
        return Found(Kind.QUANTISED, "MLX (quantization in config.json)")
    if "_diffusers_version" in settings:
        return Found(Kind.DIFFUSION, f"{settings.get('_class_name')!s:.80} in config.json")
    # Its own code may name classes as it likes; it is never run.
    classes = [name for name in _list(settings.get("architectures")) if not settings.get("auto_map")]
    if settings.get("is_encoder_decoder") is True:
        return Found(Kind.ENCODER_DECODER, ", ".join(classes) or "is_encoder_decoder in config.json")
    for name in classes:
        for kind, ends in _CLASSES:
            if name.endswith(ends):
                return Found(kind, name)
    return None


def of_refused(settings: Mapping[str, Any], why: str = "") -> Found | None:
    """The kind of a model that a check refuses with the sentence `why`; without it, that has no class for a text."""
    parts = [part for part in (settings, settings.get("text_config")) if isinstance(part, dict)]
    names = [str(part.get("model_type")) for part in parts] + [name for part in parts for name in part]
    names += [kind for part in parts for name in part if name.startswith("layer") for kind in _list(part[name])]
    classes = _list(settings.get("architectures"))
    if (sign := _matching(_STATE, names)) and why:
        return Found(Kind.STATE_SPACE, f"{sign} in config.json: {why}")
    if _STATE.search(why):
        return Found(Kind.STATE_SPACE, why)
    if any(map(_is_headless, classes)) and why:
        return Found(Kind.EMBEDDING, f"{_some(classes)}: {why}")
    if not why and (sign := senses_of(settings)):
        return Found(Kind.MULTIMODAL, f"{_some([*classes, sign])} in config.json")
    return None if why else Found(Kind.NO_TEXT, f"{_some([*classes, names[0]])} in config.json")


def senses_of(settings: Mapping[str, Any]) -> str:
    """The sign in config.json that a model takes or makes images or sound; empty without one."""
    return _matching(_SENSES, [*settings])


def snapshots_of(folder: Path) -> list[Path]:
    """The snapshots in a model's folder of the hub's cache, or in its folder `snapshots`; the newest of main first."""
    within = folder if folder.name == "snapshots" else folder / "snapshots"
    if not within.is_dir():
        return []
    snapshots = sorted(path for path in within.iterdir() if (path / CONFIG).is_file())
    main = _first_bytes(within.parent / "refs" / "main", 64).decode(errors="replace").strip()
    return sorted(snapshots, key=lambda path: path.name != main)


def _models_inside(folder: Path, names: Sequence[str]) -> list[str]:
    """Folders with config.json, or of the hub's cache, one level below."""
    return [
        name
        for name in names
        if name.startswith("models--") or any((folder / name / file).is_file() for file in (CONFIG, "model_index.json"))
    ]


def _is_headless(name: str) -> bool:
    """Whether Transformers' class of this name has no head. A trainer may have written its own wrapper's name."""
    return name.endswith("Model") and not name.endswith(("HeadModel", "LMModel", "PeftModel"))


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path, _ in zip(folder.iterdir(), range(_LISTED), strict=False))


def _first_bytes(path: Path, num_bytes: int) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(num_bytes)


def _json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file; an empty one without the file, and for a file that a later check names."""
    try:
        read = json.loads(path.read_bytes()) if path.is_file() else {}
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _matching(pattern: re.Pattern[str], names: Sequence[str]) -> str:
    """The first of these names that matches, of a part of config.json if there is one; empty if none does."""
    matching = [name for name in names if pattern.search(name)]
    return next((name for name in matching if name.endswith("_config")), (matching or [""])[0])


def _list(value: object) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
