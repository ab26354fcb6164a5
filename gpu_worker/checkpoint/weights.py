"""Finds the files of a model's weights and checks from their headers that they are complete.

Owns the refusal of every format except safetensors, and of files that links lead to outside the folders that may be
read. Knows nothing of torch or of the model's tensors.
"""

import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_CONFIGS = ("config.json", "generation_config.json")
# One of these makes a tokenizer.
VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.*", "*.model", "*.tiktoken")
# Every other file that AutoTokenizer may read, besides config.json.
_BESIDE = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("chat_template*", "additional_chat_templates/*.jinja"),
)
_MAX_FILES = 128
# Formats that are read by unpickling, which can run any code.
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# A safetensors file: the header's length in 8 bytes, the header in JSON, the tensors.
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_AGAIN = "download it again"


class ModelRefused(ValueError):
    """The model cannot be served; the message contains the reason and a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The files in order of their names, and the bytes of every tensor in them."""

    paths: tuple[Path, ...]
    tensor_bytes: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, as stored."""
        return sum(self.tensor_bytes.values())


def find_weights(folder: Path) -> WeightFiles:
    """The weights of a folder, in one file or in shards. Raises ModelRefused."""
    single, index = folder / _SINGLE, folder / _INDEX
    if single.is_file():
        return WeightFiles(paths=(single,), tensor_bytes=_tensor_bytes(single))
    if not index.is_file():
        _refuse_other_formats(folder)
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
        if not _open_into(view, resolved, _SINGLE, roots, stack):
            if not _open_into(view, resolved, _INDEX, roots, stack):
                _refuse_other_formats(resolved)
            # A shard that does not exist is refused when the view is read.
            for name in sorted(set(_read_index(view / _INDEX).values())):
                _open_into(view, resolved, name, roots, stack)
        of_tokenizer = [path.relative_to(resolved) for path in tokenizer_files(resolved)]
        if len(of_tokenizer) > _MAX_FILES:
            raise ModelRefused(f"{folder} has {len(of_tokenizer)} files of a tokenizer; the limit is {_MAX_FILES}")
        for name in (*_CONFIGS, *map(str, of_tokenizer)):
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
            f"{index} names {missing[0]}, which does not exist ({len(missing)} of {len(names)} shards are missing); "
            f"download {'it' if len(missing) == 1 else 'them'} again"
        )
    by_shard = {name: _tensor_bytes(folder / name) for name in names}
    absent = [tensor for tensor, name in shard_of.items() if tensor not in by_shard[name]]
    if absent:
        raise ModelRefused(
            f"{index} lists {absent[0]} in {shard_of[absent[0]]}, which does not contain it "
            f"({len(absent)} such tensors); index and shards are of different checkpoints, download them again"
        )
    return WeightFiles(
        paths=tuple(folder / name for name in names),
        tensor_bytes={tensor: size for sizes in by_shard.values() for tensor, size in sizes.items()},
    )


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


def _refuse_other_formats(folder: Path) -> NoReturn:
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        raise ModelRefused(
            f"{folder} has {others[0]}, but neither {_SINGLE} nor {_INDEX}; weights must have these names"
        )
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        raise ModelRefused(
            f"{folder} has {pickled[0]} and no safetensors; pickled weights can run code and are never read, "
            "save them with save_pretrained, which writes safetensors"
        )
    raise ModelRefused(f"{folder} has no weights: no {_SINGLE} and no {_INDEX}; {_AGAIN}")


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
        if start == b"version ":
            raise ModelRefused(f"{path} is a Git LFS pointer, not the weights; git lfs pull fetches them")
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
    return ModelRefused(f"{path} {what}: it has {size} bytes, its header describes {whole}; {_AGAIN}")
