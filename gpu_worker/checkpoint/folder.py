"""Finds a model's folder, local or downloaded from the hub, and checks that its files are complete and may be read.

Owns the refusal of files that are incomplete, and of files that links lead to outside the folders that may be read;
`recognise` knows what a folder holds other than a model in safetensors. Imports neither torch nor Transformers, so that
a wrong name is refused within a second.
"""

import errno
import json
import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_worker.checkpoint.recognise import (
    ADAPTER_CONFIG,
    CONFIG,
    INDEX,
    POINTER,
    SINGLE,
    Found,
    Kind,
    of_config,
    of_names,
    of_refused,
    recognise,
    snapshots_of,
)
from tandem_contract import logs
from tandem_contract.plural import numbered

log = logging.getLogger(__name__)

_CONFIGS = (CONFIG, "generation_config.json", ADAPTER_CONFIG)
# One of these makes a tokenizer.
VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.*", "*.model", "*.tiktoken")
# Every other file that AutoTokenizer may read, besides config.json.
_BESIDE = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("chat_template*", "additional_chat_templates/*.jinja"),
)
_MAX_FILES = 128
# A safetensors file: the header's length in 8 bytes, the header in JSON, the tensors.
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_AGAIN = "download it again"
_HUB_ADDRESS = re.compile(r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)([\w.-]+/[\w.-]+)")
# Weights, and the files of configs, templates and tokenizers; no code.
_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]
# Weights that are never read: in their author's own format, or in a folder within.
_UNREAD = ["consolidated*.safetensors", "*/*.safetensors"]


class ModelRefused(ValueError):
    """The model cannot be served; the message contains the reason and a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The files in order of their names, and the bytes of every tensor in them."""

    paths: tuple[Path, ...]
    tensor_bytes: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.tensor_bytes.values())


def find_weights(folder: Path) -> WeightFiles:
    """The weights of a folder, in one file or in shards. Raises ModelRefused."""
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return WeightFiles(paths=(single,), tensor_bytes=_tensor_bytes(single))
    if not index.is_file():
        raise ModelRefused(of_names(folder).sentence(folder))
    return _sharded(folder, index)


def tokenizer_files(folder: Path) -> list[Path]:
    """The files that a tokenizer and its chats are made of, in order of their names."""
    return sorted({path for pattern in (*VOCABULARIES, *_BESIDE) for path in folder.glob(pattern) if path.is_file()})


def resolve_folder(folder: str, roots: Sequence[str]) -> Path:
    """The folder without symbolic links. Raises ModelRefused if it is not in one of `roots`."""
    path = Path(folder)
    if not path.is_absolute():
        raise ModelRefused(f"{folder!r} is not an absolute path")
    try:
        resolved = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ModelRefused(f"{folder} cannot be opened: {getattr(error, 'strerror', None) or error}") from error
    _check_inside(path, resolved, roots)
    if not resolved.is_dir():
        raise ModelRefused(f"{folder} is not a folder")
    return resolved


@contextmanager
def opened_weights(folder: str, roots: Sequence[str]) -> Iterator[Path]:
    """Opens the files of a model, and yields a folder of links to the open files, to be read in place of `folder`.

    Links that change meanwhile change nothing: what was checked is what is read. Raises ModelRefused if the folder or
    one of the files is not in one of `roots`, and OSError.
    """
    resolved = resolve_folder(folder, roots)
    with ExitStack() as stack:
        view = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-weights-")))
        for name in _CONFIGS:
            _open_into(view, resolved, name, roots, stack)
        if not _open_into(view, resolved, SINGLE, roots, stack):
            if not _open_into(view, resolved, INDEX, roots, stack):
                raise ModelRefused(of_names(resolved, view).sentence(resolved))
            # A shard that does not exist is refused when the view is read.
            for name in sorted(set(_read_index(view / INDEX).values())):
                _open_into(view, resolved, name, roots, stack)
        of_tokenizer = [path.relative_to(resolved) for path in tokenizer_files(resolved)]
        if len(of_tokenizer) > _MAX_FILES:
            raise ModelRefused(f"{folder} has {len(of_tokenizer)} files of a tokenizer; the limit is {_MAX_FILES}")
        for name in map(str, of_tokenizer):
            (view / name).parent.mkdir(exist_ok=True)
            _open_into(view, resolved, name, roots, stack)
        yield view


def _open_into(view: Path, folder: Path, name: str, roots: Sequence[str], stack: ExitStack) -> bool:
    """Opens a file until `stack` closes and links to it in `view`. Returns False if it does not exist."""
    try:
        # A pipe does not block.
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    stack.callback(os.close, descriptor)
    opened = f"/proc/self/fd/{descriptor}"
    # Where the open file is, so that no link can be exchanged between the check and the opening.
    _check_inside(folder / name, Path(os.readlink(opened)), roots)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise ModelRefused(f"{folder / name} is not a file")
    if os.pread(descriptor, len(POINTER), 0) == POINTER:
        raise ModelRefused(Found(Kind.POINTER, name).sentence(folder))
    (view / name).symlink_to(opened)
    return True


def _check_inside(path: Path, resolved: Path, roots: Sequence[str]) -> None:
    if not any(resolved.is_relative_to(Path(root).resolve()) for root in roots):
        raise ModelRefused(f"{path} leads to {resolved}, which is not in one of: {', '.join(roots)}")


def _sharded(folder: Path, index: Path) -> WeightFiles:
    shard_of = _read_index(index)
    names = sorted(set(shard_of.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelRefused(
            f"{index} names {missing[0]}, which does not exist ({len(missing)} of "
            f"{numbered(len(names), 'shard', 'are')} missing); download {'it' if len(missing) == 1 else 'them'} again"
        )
    by_shard = {name: _tensor_bytes(folder / name) for name in names}
    tensor_bytes = dict[str, int]()
    for name, sizes in by_shard.items():
        if twice := sorted(tensor_bytes.keys() & sizes.keys()):
            first = next(each for each in names if twice[0] in by_shard[each])
            raise ModelRefused(f"{twice[0]} is in both {folder / first} and {folder / name}; download them again")
        tensor_bytes |= sizes
    absent = [tensor for tensor, name in shard_of.items() if tensor not in by_shard[name]]
    if absent:
        raise ModelRefused(
            f"{index} lists {absent[0]} in {shard_of[absent[0]]}, which does not contain it "
            f"({numbered(len(absent), 'such tensor')}); index and shards are of "
            f"different checkpoints, download them again"
        )
    return WeightFiles(paths=tuple(folder / name for name in names), tensor_bytes=tensor_bytes)


def _read_index(index: Path) -> dict[str, str]:
    """Tensor name → file name."""
    try:
        shard_of = json.loads(index.read_text())["weight_map"]
        names = [*shard_of.values()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelRefused(f"{index} is not an index of safetensors: {error}; {_AGAIN}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelRefused(f"{index} names {name!r}; shards must be *.safetensors files beside it")
    if not names:
        raise ModelRefused(f"{index} names no tensors; {_AGAIN}")
    return shard_of


def by_kind(error: ModelRefused, settings: Mapping[str, Any]) -> ModelRefused:
    """A check's refusal as that of the kind of model, if config.json shows which; else the refusal itself."""
    content = of_refused(settings, str(error))
    return ModelRefused(content.sentence("the folder")) if content else error


def tensor_types(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor name → dtype as safetensors names it, and shape. The file was checked before."""
    with path.open("rb") as file:
        entries = json.loads(file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little")))
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items() if name != "__metadata__"}


def _tensor_bytes(path: Path) -> dict[str, int]:
    """Tensor name → bytes, from the header. Raises ModelRefused if the file is incomplete."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        header_bytes = int.from_bytes(start, "little")
        if size < _LENGTH_BYTES or header_bytes > _MAX_HEADER_BYTES:
            raise ModelRefused(f"{path} is not a safetensors file; {_AGAIN}")
        header = file.read(header_bytes)
    if len(header) < header_bytes:
        raise _truncated(path, size, _LENGTH_BYTES + header_bytes)
    try:
        entries: dict[str, Any] = json.loads(header)
        spans = {name: entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"}
        sizes = {name: int(end) - int(begin) for name, (begin, end) in spans.items()}
        whole = _LENGTH_BYTES + header_bytes + max((int(end) for _, end in spans.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelRefused(f"{path} has a corrupt header; {_AGAIN}") from error
    if size != whole:
        raise _truncated(path, size, whole)
    return sizes


def _truncated(path: Path, size: int, whole: int) -> ModelRefused:
    what = "is truncated" if size < whole else "has more than its tensors"
    return ModelRefused(f"{path} {what}: it has {numbered(size, 'byte')}, its header describes {whole}; {_AGAIN}")


def locate(name: str) -> Path:
    """The folder of a local path or of a hub name (downloaded: safetensors, no code). Raises ModelRefused, or OSError.

    Of a model's folder in the hub's cache it is the only snapshot.
    """
    try:
        folder = Path(name).expanduser()
    except RuntimeError as error:
        raise ModelRefused(f"model {name}: {error}; give the whole path") from error
    if folder.is_dir():
        if not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        inside = [] if (folder / CONFIG).exists() else snapshots_of(folder)
        return (inside[0] if len(inside) == 1 else folder).resolve()
    if folder.suffix == ".gguf" and folder.exists():
        raise ModelRefused(Found(Kind.GGUF, folder.name).sentence(f"model {folder}"))
    if folder.exists():
        beside = (folder.parent / CONFIG).is_file()
        which = f"its folder {folder.parent}" if beside else "the folder with config.json and safetensors"
        raise ModelRefused(f"model {folder} is a file; give {which}")
    if address := _HUB_ADDRESS.match(name):
        raise ModelRefused(f"model {name} is an address; give the hub name {address[1]}, or the folder of a download")
    if name.startswith((".", "/", "~")):
        raise ModelRefused(f"model folder {name} does not exist; model is a folder or a hub name")
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    log.info("fetching %s from the hub, unless it is in the hub's cache already", name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    if not logs.can_draw():
        disable_progress_bars()

    neither = f"model {name} is neither a local folder nor reachable on the hub"
    hint = "check the spelling, or download it and give the folder"
    last_part = name.rpartition("/")[2]
    command = f"hf download {name} --local-dir {last_part}"
    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS, ignore_patterns=_UNREAD))
    except HFValidationError as error:
        raise ModelRefused(f"{neither}: a hub name has the form name or owner/name; {hint}") from error
    except RepositoryNotFoundError as error:
        raise ModelRefused(
            f"{neither}: the hub has no such model, or it is private; {hint} ({command}, after hf auth login)"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{neither}: {_first_cause(error)}; {hint} ({command}, where the hub is reached)") from error


def check_folder(folder: Path) -> None:
    """Raises ModelRefused for a folder without a complete model in safetensors, or with one that cannot be served."""
    if content := recognise(folder):
        raise ModelRefused(content.sentence(folder))
    read_settings(folder)
    find_weights(folder)


def read_settings(folder: Path) -> dict[str, Any]:
    """The contents of config.json. Raises ModelRefused, or OSError with the file's name."""
    path = folder / CONFIG
    if not path.is_file():
        raise ModelRefused(of_names(folder).sentence(folder))
    settings = read_json(path)
    if content := of_config(settings):
        raise ModelRefused(content.sentence(folder))
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
