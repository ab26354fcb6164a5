"""The blocks of commands and programs of a page, as they stand there.

A block is fenced as `sh` or `python`; other fences show something. A line before it may say why it is not run:
`<!-- not run: needs a GPU -->`.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "scheduler_svc/deploy/README.md")
REASONS = ("installs packages", "needs a GPU", "needs a model", "needs a second host", "takes minutes")
_FENCE = re.compile(r"(?:<!-- not run: (?P<reason>.*?) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """`line` is that of its first command in the page; `reason` is empty for one that is run."""

    page: str
    line: int
    kind: str
    text: str
    reason: str

    @property
    def name(self) -> str:
        """The page and the first line, for a reader of the tests' names."""
        return f"{self.page}:{self.line}: {self.text.splitlines()[0]}"


def blocks(page: str) -> list[Block]:
    """Every block of commands or of a program, in order. Raises ValueError for a mark without a block of them."""
    text = (ROOT / page).read_text()
    found = [
        Block(
            page=page,
            line=text.count("\n", 0, match.start("text")) + 1,
            kind=match["kind"],
            text=match["text"],
            reason=match["reason"] or "",
        )
        for match in _FENCE.finditer(text)
        if match["kind"] in ("sh", "python")
    ]
    if sum(bool(block.reason) for block in found) != text.count("<!-- not run:"):
        raise ValueError(f"{page}: a mark does not stand before a block of commands")
    return found
