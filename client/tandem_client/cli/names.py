"""The names of flags: which one sets a field of the API or a keyword of the library, and messages that name them.

A message of the service names fields by their paths, one of the library names keywords. Each becomes what the help of
the command shows: a flag, or the placeholder of an argument. A test compares the tables with the flags of all commands.
"""

import re
from collections.abc import Mapping

from tandem_client.cli.flags import OTHER_NAMES, THE_PROMPT
from tandem_client.errors import TandemError
from tandem_client.wire.request import FIELD_KEYWORDS
from tandem_client.wire.rpc_errors import with_names

# Keywords that the command never sets.
_WITHOUT_FLAG = frozenset({"parallel_tool_calls", "continue_final_message", "add_generation_prompt"})
_OF_KEYWORD = {
    keyword: OTHER_NAMES.get(keyword, f"--{keyword.replace('_', '-')}")
    for keyword in FIELD_KEYWORDS.values()
    if keyword not in _WITHOUT_FLAG
}
FLAGS: Mapping[str, str] = {
    path: _OF_KEYWORD[keyword] for path, keyword in FIELD_KEYWORDS.items() if keyword in _OF_KEYWORD
}
"""By field: the flags of `tandem generate` and of the one turn of `tandem chat`."""
_OF_OTHERS = {
    "text": "TEXT",
    "token_ids": "ID",
    "request_ids": "ID",
    "keys": "KEY",
    "worker": "WORKER",
    "folder": "FOLDER",
    "version": "--version",
    "running": "--running",
    "in_turn": "--in-turn",
    "max_seconds": "--max",
    "force": "--force",
    "skip_special_tokens": "--skip-special-tokens",
}
FLAGS_OF_OTHERS: Mapping[str, str] = {**FLAGS, "chat": "TEXT", **_OF_OTHERS}
"""By field or keyword: the words of the commands that ask one thing."""
# Keywords of a client, in the words of its own errors.
_OF_CLIENT = {
    "tls=TlsSettings()": "--tls",
    "tls.server_name": "--tls-server-name",
    "tls.cert": "--tls-cert",
    "tls.key": "--tls-key",
    "tls.ca": "--tls-ca",
    "leave tls out": "leave --tls and TANDEM_TLS out",
}
_CLIENT_WORDS = re.compile("|".join(map(re.escape, _OF_CLIENT)))
_KEYWORDS_FIRST = re.compile(r"\A\w+(?: and \w+)*(?=(?:\[\d+\])? )")
# The index of a repeated flag, or of an argument.
_INDEXED = re.compile(rf"({THE_PROMPT}|--[a-z-]+|\b[A-Z]+)\[(\d+)\]")


def refusal_in_flags(error: TandemError, *, of_generate: bool) -> str:
    """Returns the service's message with flags in place of fields, and the wrong flag before it if it names none."""
    names = FLAGS if of_generate else FLAGS_OF_OTHERS
    message = with_names(error.service_message, names, field=error.field)
    flag = with_names(error.field, names, field=error.field) if error.field else ""
    names_one = flag in message or message.startswith("--")
    return _INDEXED.sub(_without_index, message if names_one else f"{flag}: {message}")


def keyword_in_flags(message: str, *, of_generate: bool) -> str:
    """Returns a message of `request`, which begins with keywords, with the flags in their places."""
    names = _OF_KEYWORD if of_generate else {**_OF_KEYWORD, **_OF_OTHERS}
    named = _KEYWORDS_FIRST.sub(
        lambda match: " and ".join(names.get(word, word) for word in match[0].split(" and ")), message, count=1
    )
    return _INDEXED.sub(_without_index, named)


def client_in_flags(message: str) -> str:
    """Returns a message about the connection with flags in place of a client's keywords."""
    return _CLIENT_WORDS.sub(lambda match: _OF_CLIENT[match[0]], message)


def _without_index(match: re.Match[str]) -> str:
    """Drops the index, because a flag is repeated and not indexed. The index of a bias is its token id."""
    if match[1] == THE_PROMPT:
        return f"token {match[2]} of the prompt"
    if match[1].startswith("--"):
        return f"--logit-bias of token {match[2]}" if match[1] == "--logit-bias" else match[1]
    # Arguments are counted from 1, as people do.
    return f"{match[1]} number {int(match[2]) + 1}"
