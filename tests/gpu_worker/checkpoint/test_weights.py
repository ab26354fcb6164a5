"""Weights by their headers: complete in one file or in shards, or refused with the reason."""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.checkpoint.folder import ModelRefused, find_weights, opened_weights, resolve_folder
from tests.gpu_worker.saved_model import changed
from tests.rigs.descriptors import open_descriptors

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
        (struct.pack("<Q", 4) + b"none", "has a corrupt header"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "has a corrupt header"),
        (struct.pack("<Q", 2) + b"{}data", "has more than its tensors"),
    ],
)
def test_files_that_are_not_safetensors_are_refused(folder: Path, content: bytes, problem: str) -> None:
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


@pytest.mark.parametrize("named", [0, 1])
def test_a_tensor_in_two_shards_is_refused_with_both(sharded: Path, tmp_path: Path, named: int) -> None:
    folder = changed(sharded, tmp_path / "m")
    shards = sorted(folder.glob("*.safetensors"))[:2]
    weights = load_file(shards[1 - named])
    [name, *_] = load_file(shards[named])
    save_file(weights | {name: torch.zeros(2)}, shards[1 - named])
    with pytest.raises(ModelRefused, match=f"{name} is in both {shards[0]} and {shards[1]}; download them again"):
        find_weights(folder)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        *(
            (json.dumps({"weight_map": {"a": name}}), "must be .*safetensors files beside it")
            for name in ("../model.safetensors", "/etc/passwd", "model.bin", 3)
        ),
        *(
            (content, f"{INDEX} (is not an index|names no tensors)")
            for content in ("[]", '{"weight_map": {}}', '{"weight_map": []}', "{", "{}")
        ),
    ],
)
def test_a_broken_index_is_refused(sharded: Path, tmp_path: Path, content: str, problem: str) -> None:
    """It may name only safetensors in its folder."""
    folder = changed(sharded, tmp_path / "m")
    (folder / INDEX).write_text(content)
    with pytest.raises(ModelRefused, match=problem):
        find_weights(folder)


def test_only_folders_below_the_roots_are_read(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    for folder in (root / "v1", other):
        folder.mkdir(parents=True)
    (root / "link").symlink_to(other)
    (root / "file").touch()
    assert resolve_folder(str(root / "v1"), [str(other), str(root)]) == root / "v1"
    for folder, why in (
        (str(other), "is not in one of"),
        (str(root / "link"), "is not in one of"),
        (str(root / ".." / "other"), "is not in one of"),
        (str(root / "none"), "cannot be opened"),
        (str(root / "file"), "is not a folder"),
        ("v1", "is not an absolute path"),
    ):
        with pytest.raises(ModelRefused, match=why):
            resolve_folder(folder, [str(root)])


@pytest.mark.parametrize("kind", ["saved", "sharded"])
def test_every_file_of_weights_may_be_a_link_inside_the_roots_and_no_other(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    original: Path = request.getfixturevalue(kind)
    root, outside = tmp_path / "root", tmp_path / "outside"
    shutil.copytree(original, outside)
    shutil.copytree(original, root / "blobs")
    names = [path.name for path in (*original.glob("*.safetensors"), *original.glob(INDEX))]
    for linked in names:
        folder = root / f"v-{linked}"
        folder.mkdir()
        for name in names:
            (folder / name).symlink_to(f"../blobs/{name}")
        with opened_weights(str(folder), [str(root)]) as view:
            assert find_weights(view).tensor_bytes == find_weights(original).tensor_bytes
        # Through a second link, and through a folder that is one.
        (root / f"way-{linked}").symlink_to(outside)
        (folder / linked).unlink()
        (folder / linked).symlink_to(root / f"way-{linked}" / linked)
        with pytest.raises(
            ModelRefused, match=rf"{linked} leads to {outside}/{linked}, which is not in one of: {root}"
        ):
            opened_weights(str(folder), [str(root)]).__enter__()
        # The other folder may be allowed too.
        with opened_weights(str(folder), [str(root), str(outside)]) as view:
            find_weights(view)


def test_a_link_that_changes_after_the_check_changes_nothing(saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(saved, root / "v1")
    file, other = root / "v1" / "model.safetensors", tmp_path / "other"
    other.write_bytes(b"secret")
    file.rename(root / "blob")
    file.symlink_to(root / "blob")
    with opened_weights(str(root / "v1"), [str(root)]) as view:
        file.unlink()
        file.symlink_to(other)
        (root / "v1").rename(root / "moved")
        assert find_weights(view).tensor_bytes == find_weights(saved).tensor_bytes
        assert (view / "model.safetensors").read_bytes() == (root / "blob").read_bytes()


def test_what_is_no_weights_file_is_refused_and_every_file_is_closed(tmp_path: Path) -> None:
    before = open_descriptors()
    for name, make, why in (
        ("pipe", lambda folder: os.mkfifo(folder / "model.safetensors"), "is not a file"),
        ("folder", lambda folder: (folder / "model.safetensors").mkdir(), "is not a file"),
        ("nothing", lambda folder: None, "is empty"),
        ("pickled", lambda folder: (folder / "model.bin").touch(), "pickled weights can run code"),
    ):
        (tmp_path / name).mkdir()
        make(tmp_path / name)
        with pytest.raises(ModelRefused, match=why):
            opened_weights(str(tmp_path / name), [str(tmp_path)]).__enter__()
    assert open_descriptors() == before
