"""The model's folder: found locally or on the hub, and refused with the cause first."""

import socket
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from gpu_worker.checkpoint.folder import ModelRefused, check_folder, locate
from tests.gpu_worker.saved_model import changed


def test_a_local_folder_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    assert locate("m") == tmp_path / "m"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/m") == tmp_path / "m"


def raised_by_the_hub(monkeypatch: pytest.MonkeyPatch, error: Exception, cause: Exception | None = None) -> str:
    def download(*_: object, **__: object) -> str:
        raise error from cause

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelRefused) as refused:
        locate("Qwen/Nope")
    return str(refused.value)


def test_an_unreachable_hub_is_reported_with_the_first_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    network = socket.gaierror(-2, "Name or service not known")
    wrapped = LocalEntryNotFoundError("Got: ConnectError: [Errno -2] Name or service not known\nAn error happened …")
    assert raised_by_the_hub(monkeypatch, wrapped, network) == (
        "model Qwen/Nope is neither a local folder nor reachable on the hub: Name or service not known; "
        "check the spelling, or download it and give the folder (hf download Qwen/Nope --local-dir Nope, where the hub "
        "is reached)"
    )


def test_an_unknown_hub_name_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    message = raised_by_the_hub(monkeypatch, HFValidationError("Repo id must be …, use `repo_type` argument"))
    assert "reachable on the hub: a hub name has the form name or owner/name; check the spelling" in message
    message = raised_by_the_hub(monkeypatch, ValueError("no space left."))
    assert "reachable on the hub: no space left; check the spelling" in message


def test_a_folder_with_a_config_that_is_not_json_is_refused(saved: Path, tmp_path: Path) -> None:
    check_folder(saved)
    folder = changed(saved, tmp_path / "m")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelRefused, match=r"config\.json is not JSON: .*; download it again"):
        check_folder(folder)


def test_a_download_has_every_file_of_a_tokenizer_and_no_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []
    left_out: list[str] = []

    def download(_: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        left_out.extend(ignore_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    locate("Qwen/Qwen3")

    def taken(name: str) -> bool:
        return [*filter_repo_objects([name], allow_patterns=asked, ignore_patterns=left_out)] == [name]

    tokenizers = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "qwen.tiktoken")
    assert all(map(taken, (*tokenizers, "tekken.json", "added_tokens.json", "chat_template.jinja", "a.safetensors")))
    assert not any(map(taken, ("modeling_evil.py", "pytorch_model.bin", "README.md")))
    assert all(map(taken, ("model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json")))
    unread = ("consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "original/model.safetensors")
    assert not any(map(taken, unread))
