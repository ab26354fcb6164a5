"""What a checkpoint's folder says of chats: templates, the settings that travel, and their limit."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.checkpoint.chat_files import ChatFiles, read_chat_files
from gpu_worker.checkpoint.weights import ModelRefused

FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
TOKENIZER = json.dumps({"added_tokens": [{"id": 7, "content": "<s>", **FLAGS}]}).encode()


def read(folder: Path, tokenizer_json: bytes = TOKENIZER, **config: Any) -> ChatFiles:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return read_chat_files(folder, tokenizer_json)


def test_a_folder_without_files_of_chats_has_none(tmp_path: Path) -> None:
    assert read_chat_files(tmp_path, b"") == ChatFiles()


@pytest.mark.parametrize(
    "given",
    [
        [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}],
        {"default": "d", "tool_use": "t"},
    ],
)
def test_templates_of_the_config_may_have_names(tmp_path: Path, given: object) -> None:
    files = read(tmp_path, chat_template=given)
    assert (files.template, files.named_templates) == ("d", {"tool_use": "t"})


def test_files_of_templates_win_over_the_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("häuptling")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
    files = read(tmp_path, chat_template="older")
    assert (files.template, files.named_templates) == ("häuptling", {"rag": "r"})


def test_the_settings_that_rendering_depends_on_travel(tmp_path: Path) -> None:
    files = read(
        tmp_path,
        bos_token={"__type": "AddedToken", "content": "<s>"},
        eos_token="</s>",
        unk_token=None,
        additional_special_tokens=["<a>", {"content": "<b>"}],
        chat_control_tokens=["<c>"],
        model_max_length=5,
        auto_map={"AutoTokenizer": "evil"},
        response_template={"fields": {}},
    )
    assert json.loads(files.tokenizer_config_json) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "extra_special_tokens": ["<a>", "<b>"],
        "chat_control_tokens": ["<c>"],
    }
    assert json.loads(files.response_template_json) == {"fields": {}}


def test_added_tokens_travel_if_tokenizer_json_says_otherwise(tmp_path: Path) -> None:
    listed = {"7": {"content": "<s>", **FLAGS}, "8": {"content": "<t>", **FLAGS}}
    files = read(tmp_path, added_tokens_decoder=listed)
    assert json.loads(files.tokenizer_config_json) == {"added_tokens_decoder": {"8": listed["8"]}}


def test_the_older_map_of_special_tokens_counts_without_a_list_of_added_tokens(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<s>", "lstrip": false}}')
    assert json.loads(read(tmp_path, eos_token="</s>").tokenizer_config_json) == {"eos_token": "<s>"}
    files = read(tmp_path, eos_token="</s>", added_tokens_decoder={})
    assert json.loads(files.tokenizer_config_json) == {"eos_token": "</s>"}


def test_too_large_templates_are_refused_with_size_and_limit(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"have 1048\d\d\d bytes; the limit is 1048576"):
        read(tmp_path, chat_template="x" * (1 << 20))


def test_the_identity_follows_all_files_but_not_the_order_of_names() -> None:
    files = [
        ChatFiles(named_templates={"a": "1", "b": "2"}),
        ChatFiles(named_templates={"a": "1"}),
        ChatFiles(tokenizer_config_json="{}"),
        ChatFiles(response_template_json="{}"),
    ]
    assert len({each.identity() for each in files}) == len(files)
    assert ChatFiles(named_templates={"b": "2", "a": "1"}).identity() == files[0].identity()
