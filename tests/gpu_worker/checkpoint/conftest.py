"""A small checkpoint in shards, which tests do not change, and a copy of the other one, which they may."""

from pathlib import Path

import pytest

from tests.gpu_worker.saved_model import changed, save_model


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("sharded"), shard_bytes=8000)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return changed(saved, tmp_path / "m")
