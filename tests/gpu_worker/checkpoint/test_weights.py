"""Weights by their headers: complete in one file or in shards, or refused with the reason."""

import json
import struct
from pathlib import Path

import pytest

from gpu_worker.checkpoint.weights import ModelRefused, find_weights
from tests.gpu_worker.saved_model import changed

INDEX = "model.safetensors.index.json"


def test_one_file_and_shards_have_the_same_tensors(saved: Path, sharded: Path) -> None:
    one, several = find_weights(saved), find_weights(sharded)
    assert [path.name for path in one.paths] == ["model.safetensors"]
    assert len(several.paths) > 2
    assert one.tensor_bytes == several.tensor_bytes
    # Embedding and head of 40 × 32; q and o of 32 × 32, k and v of 32 × 16; three of 32 × 48; three norms of 32.
    assert one.num_bytes == 4 * (2 * 1280 + 2 * 1024 + 2 * 512 + 3 * 1536 + 3 * 32)


def test_a_missing_shard_is_named(sharded: Path, tmp_path: Path) -> None:
    folder = changed(sharded, tmp_path / "m")
    shards = sorted(folder.glob("*.safetensors"))
    shards[1].unlink()
    problem = rf"{INDEX} names {shards[1].name}, which does not exist \(1 of {len(shards)} shards are missing\)"
    with pytest.raises(ModelRefused, match=problem):
        find_weights(folder)


def test_a_truncated_shard_is_named_with_its_sizes(sharded: Path, tmp_path: Path) -> None:
    folder = changed(sharded, tmp_path / "m")
    shard = sorted(folder.glob("*.safetensors"))[0]
    whole = shard.read_bytes()
    for kept in (len(whole) - 1, 40):
        shard.write_bytes(whole[:kept])
        with pytest.raises(
            ModelRefused, match=f"{shard.name} is truncated: it has {kept} bytes, its header describes .*; down"
        ):
            find_weights(folder)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not a safetensors file"),
        (b"\x80\x02}q\x00.padded", "is not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        (struct.pack("<Q", 4) + b"none", "has a corrupt header"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "has a corrupt header"),
        (struct.pack("<Q", 2) + b"{}data", "has more than its tensors"),
    ],
)
def test_files_that_are_not_safetensors_are_refused(saved: Path, tmp_path: Path, content: bytes, problem: str) -> None:
    folder = changed(saved, tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelRefused, match=problem):
        find_weights(folder)


def test_an_index_of_other_shards_is_refused(sharded: Path, tmp_path: Path) -> None:
    folder = changed(sharded, tmp_path / "m")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.ghost.weight"] = sorted(index["weight_map"].values())[0]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelRefused, match=r"lists model.ghost.weight in .*, which does not contain it"):
        find_weights(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "model.bin", 3])
def test_an_index_may_name_only_safetensors_in_its_folder(sharded: Path, tmp_path: Path, name: object) -> None:
    folder = changed(sharded, tmp_path / "m")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelRefused, match=r"must be .*safetensors files beside it"):
        find_weights(folder)


@pytest.mark.parametrize("content", ["[]", '{"weight_map": {}}', '{"weight_map": []}', "{", "{}"])
def test_a_broken_index_is_refused(sharded: Path, tmp_path: Path, content: str) -> None:
    folder = changed(sharded, tmp_path / "m")
    (folder / INDEX).write_text(content)
    with pytest.raises(ModelRefused, match=f"{INDEX} (is not an index|names no tensors)"):
        find_weights(folder)


def test_other_formats_are_refused(saved: Path, tmp_path: Path) -> None:
    folder = changed(saved, tmp_path / "m")
    weights = (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    with pytest.raises(ModelRefused, match=r"has consolidated\.safetensors, but neither model\.safetensors nor"):
        find_weights(folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match=r"has pytorch_model\.bin and no safetensors; pickled weights can run code"):
        find_weights(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelRefused, match="has no weights"):
        find_weights(folder)
