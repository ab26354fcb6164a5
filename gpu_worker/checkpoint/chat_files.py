"""Reads what a chat needs of a checkpoint besides its weights: templates, special tokens, the form of answers.

Owns which settings of tokenizer_config.json travel to the scheduler: those on which a rendered chat and its token ids
depend, so that the scheduler's tokenizer equals AutoTokenizer's. Imports neither torch nor Transformers.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_worker.checkpoint.locate import read_json
from gpu_worker.checkpoint.weights import ModelRefused

# As the proto says.
MAX_BYTES = 1 << 20
_SETTINGS = ("chat_control_tokens", "split_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFiles:
    """The files of chats; JSON as text. Empty strings stand for missing files."""

    template: str = ""
    named_templates: dict[str, str] = field(default_factory=dict[str, str])
    tokenizer_config_json: str = ""
    response_template_json: str = ""

    def identity(self) -> bytes:
        """The content as bytes, the same for the same content."""
        named = dict(sorted(self.named_templates.items()))
        return json.dumps([named, self.tokenizer_config_json, self.response_template_json]).encode()


def read_chat_files(folder: Path, tokenizer_json: bytes) -> ChatFiles:
    """Reads the folder as Transformers does. Raises ModelRefused if a file cannot be used or all are too large."""
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    templates = _templates(folder, config)
    response = config.get("response_template")
    files = ChatFiles(
        template=templates.pop("default", ""),
        named_templates=templates,
        tokenizer_config_json=_json(_settings(folder, config, tokenizer_json)) if tokenizer_json else "",
        response_template_json=_json(response) if isinstance(response, dict) else "",
    )
    num_bytes = len(files.template.encode()) + len(files.identity())
    if num_bytes > MAX_BYTES:
        raise ModelRefused(
            f"the chat templates and settings in {folder} have {num_bytes} bytes; the limit is {MAX_BYTES}: "
            "serve the model with smaller ones"
        )
    return files


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name; "default" is the one without a name. Files win over tokenizer_config.json."""
    found: dict[str, str] = {}
    if (folder / "chat_template.jinja").is_file():
        found["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.name.removesuffix(".jinja")] = path.read_text(encoding="utf-8")
    if found:
        return found
    given = config.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        given = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
    named = given.items() if isinstance(given, dict) else ()
    return {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}


def _settings(folder: Path, config: dict[str, Any], tokenizer_json: bytes) -> dict[str, Any]:
    """The settings that travel. Tokens are given as their texts, because tokenizer.json says what else they are."""
    older = folder / "special_tokens_map.json"
    # Transformers reads this file only beside a config without a list of added tokens.
    names = config if "added_tokens_decoder" in config or not older.is_file() else config | read_json(older)
    settings = {name: _text(value) for name, value in names.items() if name.endswith("_token") and _text(value)}
    settings |= {name: config[name] for name in _SETTINGS if config.get(name) is not None}
    extra = names.get("extra_special_tokens") or names.get("additional_special_tokens")
    if isinstance(extra, dict):
        settings["extra_special_tokens"] = {name: _text(value) for name, value in extra.items()}
    elif isinstance(extra, list):
        settings["extra_special_tokens"] = [text for value in extra if (text := _text(value))]
    other = _other_tokens(config.get("added_tokens_decoder"), tokenizer_json)
    return settings | ({"added_tokens_decoder": other} if other else {})


def _text(value: object) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _other_tokens(listed: object, tokenizer_json: bytes) -> dict[str, dict[str, Any]]:
    """Those added tokens of tokenizer_config.json that tokenizer.json has not, or not with the same flags."""
    if not isinstance(listed, dict):
        return {}
    known = {
        str(token["id"]): _token(token)
        for token in json.loads(tokenizer_json).get("added_tokens", ())
        if isinstance(token, dict) and "id" in token
    }
    tokens = {idx: _token(token) for idx, token in listed.items() if isinstance(token, dict)}
    return {idx: token for idx, token in tokens.items() if known.get(idx) != token}


def _token(token: dict[str, Any]) -> dict[str, Any]:
    return {"content": token.get("content", "")} | {flag: bool(token.get(flag)) for flag in _FLAGS}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
