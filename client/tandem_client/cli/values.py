"""Reads prompts, token ids, biases and JSON, for which typer has no type.

Owns their syntax, their error messages and the decoding of standard input.
"""

import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem_client.wire.request import Prompt

_JSON_NAMES: Mapping[Any, str] = {list: "a JSON list", dict: "a JSON object", (dict, bool): "a JSON schema"}


def parse_token_ids(text: str) -> Sequence[int]:
    """Reads numbers separated by blanks or commas, with or without brackets. Raises ValueError."""
    words = text.strip().strip("[]").replace(",", " ").split()
    wrong = next((word for word in words if not word.isdecimal()), None)
    if wrong is not None:
        raise ValueError(f"a token id is {wrong[:40]!r}; it must be a whole number, 0 or greater")
    return [int(word) for word in words]


def parse_biases(given: Sequence[str]) -> dict[int, float]:
    """Reads words like 17=-2.5. Raises ValueError."""
    biases: dict[int, float] = {}
    for word in given:
        token, is_pair, bias = word.partition("=")
        try:
            if not is_pair:
                raise ValueError
            token_id, value = int(token), float(bias)
        except ValueError:
            raise ValueError(f"--logit-bias is {word[:40]!r}; it must be ID=X, like 17=-2.5") from None
        if token_id in biases:
            raise ValueError(f"--logit-bias names token {token_id} twice; each token has one bias")
        biases[token_id] = value
    return biases


def read_prompt(argument: str, *, token_ids: bool) -> Prompt:
    """Returns the prompt of the argument, or standard input if the argument is -. Raises ValueError."""
    # The shell's last line break is not part of the text.
    text = read_text().removesuffix("\n") if argument == "-" else argument
    if not text:
        raise ValueError("the prompt is empty; at least 1 character is needed")
    return parse_token_ids(text) if token_ids else text


def read_chat(prompt: Prompt, system: str | None) -> list[dict[str, str]]:
    """Returns the conversation of one message of the user. Raises ValueError."""
    if not isinstance(prompt, str):
        raise ValueError("--chat and --token-ids exclude each other; a chat is text")
    messages = [{"role": "user", "content": prompt}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def read_json(flag: str, given: str | None, kinds: type | tuple[type, ...]) -> Any:
    """Returns the JSON value of a flag: its text, or the file that it names. Raises ValueError.

    `kinds`: the Python types that the value may have.
    """
    if given is None:
        return None
    is_text = given.lstrip()[:1] in ("{", "[") or given in ("true", "false")
    text = given if is_text else read_file(given, flag)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"{flag} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{flag} is no JSON: {error}") from None
    if not isinstance(value, kinds):
        raise ValueError(f"{flag} is {str(value)[:40]!r}; it must be {_JSON_NAMES[kinds]}")
    return value


def read_file(path: str, flag: str) -> str:
    """Returns the text of the file that a flag names. Raises ValueError if it cannot be read or is not UTF-8."""
    try:
        return Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag}: {path} is not UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise ValueError(f"{flag}: {path[:200]}: {error.strerror}") from None


def read_text() -> str:
    """Reads all of standard input, with \\n as line break. Raises ValueError if it is not UTF-8, in every locale."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 (byte {error.start})") from None
    return io.StringIO(text, newline=None).read()
