"""The bundled model's papers: provenance.json, with versions, figures and the checksum of every other file.

Owns: what is recorded and how the checksums are made and checked. Knows nothing of training.
"""

import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

FILE_NAME = "provenance.json"


def file_checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in `folder` except the provenance itself."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != FILE_NAME
    }


def read_provenance(folder: Path) -> dict[str, Any]:
    """The recorded provenance of the model in `folder`; empty without a record."""
    path = folder / FILE_NAME
    return json.loads(path.read_text()) if path.exists() else {}


def write_provenance(
    folder: Path,
    *,
    corpus_sha256: str,
    recipe: dict[str, object],
    figures: dict[str, float],
    counts: dict[str, int],
    precision: str,
    threads: int,
) -> None:
    provenance = {
        "cpython_version": platform.python_version(),
        "packages": {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "safetensors")},
        "corpus_sha256": corpus_sha256,
        "recipe": recipe,
        "training_precision": precision,
        "training_threads": threads,
        **counts,
        **figures,
        "sha256": file_checksums(folder),
    }
    (folder / FILE_NAME).write_text(json.dumps(provenance, indent=2) + "\n")
