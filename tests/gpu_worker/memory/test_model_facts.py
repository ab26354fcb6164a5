"""The file of a model's facts: the same facts as the meta model's, and ignored whenever it is not as it was written."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from gpu_worker.checkpoint.files import ModelRefused
from gpu_worker.memory import model_facts as module
from gpu_worker.memory.model_facts import ModelFacts, examine, model_facts
from tests.census.shrink import tiny_config

CONFIG = tiny_config(LlamaConfig, {})


def facts(folder: Path, config: LlamaConfig = CONFIG, dtype: torch.dtype = torch.float32) -> ModelFacts:
    return model_facts(config, dtype=dtype, packs=True, folder=folder)


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The configs that were examined."""
    seen: list[object] = []

    def note(config: LlamaConfig, **keywords: object) -> ModelFacts:
        seen.append(config)
        return examine(config, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "examine", note)
    return seen


def test_a_second_start_reads_the_same_facts_from_a_file_of_the_user_alone(
    tmp_path: Path, examined: list[object]
) -> None:
    folder = tmp_path / "models"
    first = facts(folder)
    assert facts(folder) == first == examine(CONFIG, dtype=torch.float32, packs=True)
    assert len(examined) == 1
    [file] = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o777 == 0o600


def test_another_config_dtype_or_source_is_examined_again(
    tmp_path: Path, examined: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts(tmp_path)
    wide = LlamaConfig(**{**CONFIG.to_dict(), "head_dim": 16})
    assert facts(tmp_path, wide).layers.kinds[0].key_dim == 16
    assert facts(tmp_path, dtype=torch.bfloat16).costs.dtype == "bfloat16"
    monkeypatch.setattr(module, "_sources", lambda: [Path(module.__file__)])
    facts(tmp_path)
    assert len(examined) == 4


def link(file: Path) -> None:
    file.rename(file.with_suffix(".real"))
    file.symlink_to(file.with_suffix(".real"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "another digit": lambda file: file.write_bytes(file.read_bytes().replace(b'"num_heads":4', b'"num_heads":8', 1)),
    "others may write": lambda file: file.chmod(0o622),
    "a link": link,
    "others may write to the folder": lambda file: file.parent.chmod(0o777),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_file_that_is_not_as_it_was_written_is_ignored(
    damage: Callable[[Path], None], tmp_path: Path, examined: list[object]
) -> None:
    folder = tmp_path / "models"
    first = facts(folder)
    damage(next(folder.glob("*.json")))
    assert facts(folder) == first
    assert len(examined) == 2


def test_the_oldest_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_FILES", 2)
    tmp_path.chmod(0o700)
    for size in (32, 48, 64):
        facts(tmp_path, LlamaConfig(**{**CONFIG.to_dict(), "intermediate_size": size}))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_refusal_is_not_kept(tmp_path: Path) -> None:
    refused = LlamaConfig(**{**CONFIG.to_dict(), "head_dim": 1024})
    for _ in range(2):
        with pytest.raises(ModelRefused):
            facts(tmp_path / "models", refused)
    assert not (tmp_path / "models").exists()
