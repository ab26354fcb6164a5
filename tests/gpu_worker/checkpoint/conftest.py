"""A small checkpoint in shards. Tests do not change it."""

from pathlib import Path

import pytest

from tests.gpu_worker.saved_model import save_model


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("sharded"), shard_bytes=8000)
