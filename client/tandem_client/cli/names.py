"""The names of flags: which one sets a field of the API or a keyword of the library, and messages that name them.

A test compares the table with the flags of `tandem generate`.
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
_KEYWORDS_FIRST = re.compile(r"\A\w+(?: and \w+)*(?= )")
_INDEXED = re.compile(rf"({THE_PROMPT}|--[a-z-]+)\[(\d+)\]")


def refusal_in_flags(error: TandemError) -> str:
    """Returns the service's message with flags in place of fields, and the wrong flag before it if it names none."""
    message = with_names(error.service_message, FLAGS, field=error.field)
    flag = with_names(error.field, FLAGS, field=error.field) if error.field else ""
    names_one = flag in message or message.startswith("--")
    return _INDEXED.sub(_without_index, message if names_one else f"{flag}: {message}")


def keyword_in_flags(message: str) -> str:
    """Returns a message of `request`, which begins with keywords, with the flags in their places."""
    return _KEYWORDS_FIRST.sub(
        lambda found: " and ".join(_OF_KEYWORD.get(each, each) for each in found[0].split(" and ")), message, count=1
    )


def _without_index(found: re.Match[str]) -> str:
    """Drops the index, because a flag is repeated and not indexed. The index of a bias is its token id."""
    if found[1] == THE_PROMPT:
        return f"token {found[2]} of the prompt"
    return f"--logit-bias of token {found[2]}" if found[1] == "--logit-bias" else found[1]
