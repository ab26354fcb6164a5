"""The model's tokenizer as AutoTokenizer builds it, in the form that travels to the scheduler.

Owns what travels of it: its backend as the library `tokenizers` writes it, the chat templates, and the settings that
neither of them has. The scheduler must not import torch, which AutoTokenizer needs; so it loads what is made here.
Never runs code of a checkpoint.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from gpu_worker.checkpoint.folder import VOCABULARIES, ModelRefused, read_json, tokenizer_files
from gpu_worker.failures import first_line
from tandem_contract.plural import numbered

log = logging.getLogger(__name__)

# The most bytes of templates and settings, as the proto says.
MAX_CHAT_BYTES = 1 << 20
_JSON = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/=]+ \d+\n")
# What Transformers replaces in decoded texts (`clean_up_tokenization`), in this order.
_CLEAN_UP = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'")),
    *((" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)
# No token begins with it.
_NO_PREFIX = "\U0010ffff"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTokenizer:
    """What a Join says of the tokenizer and of chats; JSON as text. All is empty without a tokenizer."""

    backend_json: bytes = b""
    template: str = ""
    named_templates: dict[str, str] = field(default_factory=dict[str, str])
    settings_json: str = ""
    response_template_json: str = ""


def source_hashes(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Names and SHA-256 of the files that a tokenizer and its chats are made of, in a fixed order.

    The form that travels differs between versions of the libraries, these do not.
    """
    for path in tokenizer_files(folder):
        with path.open("rb") as file:
            yield path.relative_to(folder).as_posix(), hashlib.file_digest(file, "sha256").digest()


def read_tokenizer(folder: Path, vocab_size: int, config: PreTrainedConfig | None = None) -> ModelTokenizer:
    """Builds the tokenizer of a folder; an empty one if none can be served.

    config: the model's, if it was read before; else Transformers reads config.json again.
    Raises ModelRefused if its files cannot be used, belong to a model with a larger vocabulary, or are too large.
    """
    if not any(path.is_file() for pattern in VOCABULARIES for path in folder.glob(pattern)):
        return ModelTokenizer()
    tokenizer = _built(folder, config)
    if tokenizer is None:
        return ModelTokenizer()
    backend: Tokenizer = tokenizer.backend_tokenizer
    # A prompt that is too long is refused; it is never cut.
    backend.no_truncation()
    backend.no_padding()
    _add_clean_up(tokenizer, backend)
    templates = tokenizer.chat_template or ""
    named = dict(templates) if isinstance(templates, dict) else {"default": templates}
    response = _given(tokenizer, "response_template")
    made = ModelTokenizer(
        backend_json=_serialized(folder, backend, vocab_size).encode(),
        template=named.pop("default", ""),
        named_templates=named,
        settings_json=_json(_settings(tokenizer)),
        response_template_json=_json(response) if isinstance(response, dict) else "",
    )
    texts = (made.template, *named, *named.values(), made.settings_json, made.response_template_json)
    if (num_bytes := sum(len(text.encode()) for text in texts)) > MAX_CHAT_BYTES:
        raise ModelRefused(
            f"the chat templates and settings in {folder} have {num_bytes} bytes; the limit is {MAX_CHAT_BYTES}: "
            "serve the model with smaller ones"
        )
    return made


def _built(folder: Path, model_config: PreTrainedConfig | None) -> Any:
    """AutoTokenizer's tokenizer. If that one cannot travel, tokenizer.json's, or None without that file."""
    config = {name: read_json(folder / name) for name in _JSON if (folder / name).is_file()}
    has_own_code = bool(config.get("tokenizer_config.json", {}).get("auto_map"))
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    if model_config is not None:
        options["config"] = model_config
    try:
        # mistral-common's tokenizer has no backend that could travel.
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, mistral_format=False, **options)
        own_text = not isinstance(tokenizer, PreTrainedTokenizerFast) or (
            type(tokenizer)._decode is not PreTrainedTokenizerFast._decode
        )
        why = f"{type(tokenizer).__name__} makes texts by code of its own" if own_text else ""
    except Exception as error:  # any error of a tokenizer class of Transformers
        if not has_own_code:
            raise _unusable(folder, error) from error
        why = "tokenizer_config.json names code of its own (auto_map), which is never run"
    if not why:
        return tokenizer
    has_json = (folder / "tokenizer.json").is_file()
    served = "tokenizer.json is served as it is" if has_json else "there is no tokenizer.json to serve instead"
    log.warning("the tokenizer in %s is not AutoTokenizer's: %s; %s", folder, why, served)
    return PreTrainedTokenizerFast.from_pretrained(folder, **options) if has_json else None


def _unusable(folder: Path, error: Exception) -> ModelRefused:
    """The refusal that names the missing library, or Transformers' reason."""
    if not (folder / "tokenizer.json").is_file():
        for path in sorted((*folder.glob("*.model"), *folder.glob("*.tiktoken"))):
            with path.open("rb") as file:
                library = "tiktoken" if _TIKTOKEN_LINE.match(file.read(4096)) else "sentencepiece"
            if find_spec(library) is None:
                return ModelRefused(
                    f"{path} can only be converted with {library}, which is not installed beside the worker: "
                    f"pip install {library}, add a tokenizer.json, or remove the file to serve token ids alone"
                )
    return ModelRefused(
        f"AutoTokenizer cannot build the tokenizer in {folder}: {first_line(error)}; download its files again, remove "
        "them to serve token ids alone, or, if tokenizer.json is right as it is, set tokenizer_class in "
        "tokenizer_config.json to PreTrainedTokenizerFast"
    )


def _add_clean_up(tokenizer: Any, backend: Tokenizer) -> None:
    """Makes what Transformers does with a decoded text a part of the backend's decoder."""
    is_bpe = type(backend.model).__name__ == "BPE"
    also_bpe = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    if not tokenizer.clean_up_tokenization_spaces or (is_bpe and not also_bpe):
        return
    # Without a decoder there is a space between tokens.
    before = backend.decoder or decoders.WordPiece(prefix=_NO_PREFIX, cleanup=False)
    cleaned = (decoders.Replace(old, new) for old, new in _CLEAN_UP)
    backend.decoder = decoders.Sequence([before, decoders.Fuse(), *cleaned])


def _serialized(folder: Path, backend: Tokenizer, vocab_size: int) -> str:
    """The backend as JSON, without added tokens for which the model has no embedding. Raises ModelRefused."""
    text, vocabulary = backend.to_str(), backend.get_vocab(with_added_tokens=True)
    beyond = {token: idx for token, idx in vocabulary.items() if idx >= vocab_size}
    if beyond:
        _check_vocabulary(folder, backend, vocab_size)
        shown = ", ".join(sorted(beyond, key=beyond.__getitem__)[:8])
        many = f"{numbered(len(beyond), 'added token')} of {folder} ({shown})"
        log.warning("%s are left out: the model's vocabulary ends at %d", many, vocab_size - 1)
        parsed = json.loads(text)
        parsed["added_tokens"] = [token for token in parsed["added_tokens"] if token["id"] < vocab_size]
        text = json.dumps(parsed, ensure_ascii=False, separators=(",", ":"))
    # What the scheduler will have.
    if Tokenizer.from_str(text).get_vocab(with_added_tokens=True) != {
        token: idx for token, idx in vocabulary.items() if token not in beyond
    }:
        raise ModelRefused(f"the installed tokenizers cannot read what it wrote of the tokenizer in {folder}")
    return text


def _check_vocabulary(folder: Path, backend: Tokenizer, vocab_size: int) -> None:
    """Raises ModelRefused if the files with the vocabulary exceed the model's, or every prompt would.

    A smaller tokenizer passes, as vocabularies are padded.
    """
    path = folder / "tokenizer.json"
    vocabulary = Tokenizer.from_file(str(path)).get_vocab() if path.is_file() else backend.get_vocab(False)
    in_every_prompt = {backend.id_to_token(idx) or "": idx for idx in backend.encode("").ids}
    token, largest = max((vocabulary | in_every_prompt).items(), key=lambda item: item[1], default=("", -1))
    if largest >= vocab_size:
        where = path if path.is_file() else folder
        raise ModelRefused(
            f"{where} has token {largest} ({token!r}); the model's vocabulary ends at {vocab_size - 1}: "
            "tokenizer and model do not belong together, download both again"
        )


def _settings(tokenizer: Any) -> dict[str, Any]:
    """The settings of chats that the backend does not have, as arguments of PreTrainedTokenizerFast."""
    standard = PreTrainedTokenizerFast.SPECIAL_TOKENS_ATTRIBUTES
    names = tokenizer.special_tokens_map
    settings = {name: text for name, text in names.items() if name in standard} | {
        "model_specific_special_tokens": {name: text for name, text in names.items() if name not in standard},
        "extra_special_tokens": [str(token) for token in tokenizer.extra_special_tokens],
        "chat_control_tokens": _given(tokenizer, "chat_control_tokens"),
        "split_special_tokens": tokenizer.split_special_tokens,
    }
    return {name: value for name, value in settings.items() if value not in (None, False, {}, [])}


def _given(tokenizer: Any, name: str) -> Any:
    """A setting of tokenizer_config.json that the installed Transformers may not know."""
    return getattr(tokenizer, name, tokenizer.init_kwargs.get(name))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
