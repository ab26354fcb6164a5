"""A copy of the tree in which a recipe is followed, and runs of pytest there.

A run costs the imports of the product and its tests, because `forks.py` has imported the libraries. The checkout never
changes: the copy's files are links to it until a step replaces one.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.recipes.recipe import ROOT

_FOLDERS = ("scheduler_svc", "gpu_worker", "client", "protos", "tests")
_PAGES = ("README.md", "pyproject.toml", "Makefile")
# What the tests and the product import, of what others wrote.
_LIBRARIES = (
    *("grpc", "hypothesis", "numpy", "prompt_toolkit", "pydantic", "pytest", "rich", "tokenizers", "typer", "zmq"),
    *("torch", "transformers.modeling_utils", "transformers.generation.logits_process"),
)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # Another file system.
        shutil.copy2(source, target)


class Copy:
    """A copy of the tree in `folder`, which does not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in _FOLDERS:
            shutil.copytree(ROOT / name, folder / name, copy_function=_link)
        for name in _PAGES:
            _link(str(ROOT / name), str(folder / name))
        (folder / ".stubs").symlink_to(ROOT / ".stubs")

    def write(self, texts: Mapping[str, str]) -> None:
        """Replaces files, or makes them."""
        for file, text in texts.items():
            path = self.folder / file
            path.unlink(missing_ok=True)
            path.write_text(text, "utf-8")
        self._make_stubs(texts)

    def take_back(self, files: Collection[str]) -> None:
        """Makes files again what they are in the checkout, or removes them."""
        for file in files:
            (self.folder / file).unlink(missing_ok=True)
            if (ROOT / file).exists():
                _link(str(ROOT / file), str(self.folder / file))
        self._make_stubs(files)

    def _make_stubs(self, changed: Iterable[str]) -> None:
        """Makes stubs of the copy's own protos, if one has changed."""
        if not any(file.endswith(".proto") for file in changed):
            return
        stubs = self.folder / ".stubs"
        if stubs.is_symlink():
            stubs.unlink()
        done = subprocess.run(
            [sys.executable, "protos/build_hook.py"], cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


class Runs:
    """The process of `forks.py`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("forks.py")), *_LIBRARIES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHONPATH"))},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def outcomes(self, copy: Copy, tests: Sequence[str]) -> tuple[dict[str, str], str]:
        """Runs tests in the copy. Returns "passed", "failed" or "skipped" by test, without parameters, the worst of
        all; and the output. A file that cannot be imported has failed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        output, result = copy.folder / "output", copy.folder / "outcomes"
        result.unlink(missing_ok=True)
        order = {"folder": str(copy.folder), "output": str(output), "result": str(result), "tests": list(tests)}
        print(json.dumps(order), file=self._process.stdin, flush=True)
        assert self._process.stdout.readline(), "the process that forks has ended"
        said = output.read_text(errors="replace")
        assert result.exists(), said
        return json.loads(result.read_text()), said
