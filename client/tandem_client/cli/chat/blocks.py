"""Cuts growing Markdown into blocks that are finished and a rest that may still change its meaning. Does no I/O."""

from markdown_it import MarkdownIt

_PARSER = MarkdownIt().enable("strikethrough").enable("table")


def cut(text: str) -> tuple[str, str]:
    """Returns the finished blocks and the rest.

    Only whole lines are looked at, and the last block of them may still grow: a list gets items, a paragraph becomes a
    heading by its underline.
    """
    end = text.rfind("\n") + 1
    starts = [token.map[0] for token in _PARSER.parse(text[:end]) if token.level == 0 and token.map is not None]
    if not starts or starts[-1] == 0:
        return "", text
    place = 0
    for _ in range(starts[-1]):
        place = text.index("\n", place) + 1
    return text[:place], text[place:]
