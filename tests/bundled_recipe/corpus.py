"""The bundled model's corpus: the prose that CPython's standard library carries in its own source.

Owns: which files are read, how documentation strings and comments become documents, the split into
training and held-out documents, and the corpus hash. Knows nothing of tokens or models.

A document is a run of docstrings and comment blocks of one file in source order, closed at the first
top-level class or function boundary after it has MIN_DOCUMENT_CHARS characters; or one topic of
`pydoc_data.topics` (the language reference that `help()` prints). Everything is in sorted order and the split
follows the hash of the file's (or topic's) name, so that one CPython version always gives the same corpus.
"""

import ast
import hashlib
import inspect
import io
import re
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Folders that are code more than prose or that some distributions leave out, and fixtures; generated tables, one
# character name per line; files named after the platform they were built for; the topics, which are read separately.
_EXCLUDED = re.compile(
    r"(.*/)?(__phello__|__pycache__|dist-packages|idle_test|idlelib|lib2to3|site-packages|tests?|turtledemo)/"
    r"|encodings/(cp|iso8859|mac_|koi8)|_sysconfigdata|config-|__phello__\.foo\.py$|pydoc_data/topics\.py$"
)
TOPICS_FILE = "pydoc_data/topics.py"
MIN_DOCUMENT_CHARS = 600
MIN_COMMENT_WORDS = 4
MIN_REPEAT_CHARS = 60
HELD_OUT_PERCENT = 5

_LICENCE = re.compile(
    r"copyright|all rights reserved|licen[cs]ed? (to|under|agreement)|permission (to use|is hereby)"
    r"|without warranty|PSF license|see .*licen[cs]e",
    re.IGNORECASE,
)
_PRAGMA = re.compile(r"^\s*(!|-\*-|vim?:|coding[:=]|type:|noqa|pylint|pragma|flake8|Local Variables:)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Documents without any separator; `sha256` covers both splits and their order."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    sha256: str


def build_corpus(stdlib: Path | None = None) -> Corpus:
    """Read the standard library of the running CPython (or of `stdlib`)."""
    root = stdlib or Path(sysconfig.get_paths()["stdlib"])
    train: list[str] = []
    held_out: list[str] = []
    seen: set[str] = set()
    for name, document in _documents(root):
        if document := _without_repeats(document, seen):
            (held_out if is_held_out(name) else train).append(document)
    text = "".join("".join(f"{document}\0" for document in split) + "\0" for split in (train, held_out))
    return Corpus(train=tuple(train), held_out=tuple(held_out), sha256=hashlib.sha256(text.encode()).hexdigest())


def is_held_out(name: str) -> bool:
    """Split by the name of the file or topic, so that no file is on both sides."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % 100 < HELD_OUT_PERCENT


def _without_repeats(document: str, seen: set[str]) -> str:
    """Drop long paragraphs met before: topics quote each other, and held-out text must not be trained on."""
    kept: list[str] = []
    for paragraph in document.split("\n\n"):
        if len(paragraph) >= MIN_REPEAT_CHARS:
            key = " ".join(paragraph.split())
            if key in seen:
                continue
            seen.add(key)
        kept.append(paragraph)
    return "\n\n".join(kept).strip()


def _documents(root: Path) -> Iterator[tuple[str, str]]:
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    for name in names:
        if not _EXCLUDED.match(name):
            for document in _file_documents((root / name).read_bytes()):
                yield name, document
    yield from _topics(root / TOPICS_FILE)


def _topics(path: Path) -> Iterator[tuple[str, str]]:
    """The values of the one dictionary literal in the file; a CPython without it gives none."""
    if not path.is_file():
        return
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
            topics: dict[str, str] = ast.literal_eval(node.value)
            for key in sorted(topics):
                yield f"topic {key}", _tidy(topics[key])


def _file_documents(source: bytes) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            # Where a caller makes warnings errors, an old escape sequence must not cost the whole file.
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    parts = sorted(_docstrings(tree) + _comment_blocks(source))
    definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    boundaries = [node.end_lineno or node.lineno for node in tree.body if isinstance(node, definitions)]
    document: list[str] = []
    for line, text in parts:
        crossed = bool(boundaries) and boundaries[0] < line
        boundaries = [boundary for boundary in boundaries if boundary >= line]
        if crossed and sum(map(len, document)) >= MIN_DOCUMENT_CHARS:
            yield "\n\n".join(document)
            document = []
        document.append(text)
    if document:
        yield "\n\n".join(document)


def _docstrings(tree: ast.Module) -> list[tuple[int, str]]:
    """(line, text) of every documentation string of a module, class or function."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                text = _tidy(inspect.cleandoc(text))
                if text and not _LICENCE.search(text):
                    found.append((node.body[0].lineno, text))
    return found


def _comment_blocks(source: bytes) -> list[tuple[int, str]]:
    """(line, text) of every run of comment lines with the same indentation, without the hashes."""
    blocks: list[tuple[int, list[str]]] = []
    previous_line, previous_column = -1, -1
    try:
        for token in tokenize.tokenize(io.BytesIO(source).readline):
            line, column = token.start
            if token.type != tokenize.COMMENT or token.line[:column].strip():
                continue
            if line == previous_line + 1 and column == previous_column:
                blocks[-1][1].append(token.string)
            else:
                blocks.append((line, [token.string]))
            previous_line, previous_column = line, column
    except (tokenize.TokenError, SyntaxError):
        return []
    return [(line, text) for line, comments in blocks if (text := _comment_text(comments))]


def _comment_text(comments: list[str]) -> str:
    lines = [re.sub(r"^#+:? ?", "", comment) for comment in comments]
    lines = ["" if re.fullmatch(r"[\s#*=~_+-]*", line) else line for line in lines if not _PRAGMA.match(line)]
    text = _tidy(inspect.cleandoc("\n".join(lines)))
    if _LICENCE.search(text) or len(re.findall(r"[A-Za-z]{2,}", text)) < MIN_COMMENT_WORDS:
        return ""
    return text


def _tidy(text: str) -> str:
    """Plain newlines, no trailing blanks, no lone surrogates, at most one empty line in a row."""
    text = text.encode("utf-8", "replace").decode()
    text = "\n".join(line.rstrip() for line in text.expandtabs().splitlines())
    return re.sub(r"\n{3,}", "\n\n", text).strip()
