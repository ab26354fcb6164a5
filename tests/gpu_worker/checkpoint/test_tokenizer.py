"""The tokenizer of a folder: through the worker's Join and the service's functions, AutoTokenizer's ids and texts."""

import asyncio
import itertools
import json
import random
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tandem.internal.v1 import frontend_pb2, worker_pb2
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from gpu_worker.checkpoint import tokenizer as subject
from gpu_worker.checkpoint.folder import ModelRefused
from gpu_worker.checkpoint.tokenizer import ModelTokenizer, read_tokenizer, source_hashes
from scheduler_svc.frontend import model
from scheduler_svc.frontend.text.detokenize import Detokenizer
from scheduler_svc.frontend.text.output import OutputPiece, SampleOutput, StopFinder
from scheduler_svc.frontend.text.tokenizer import Tokenizer as ServedTokenizer
from tests.rigs.tokenizer_folders import (
    NEW,
    VOCAB_SIZE,
    Folder,
    byte_level,
    folders,
    listed,
    unigram,
)

TABLE = folders()
TOKENS = [each["content"] for each in NEW]
TEXTS = (
    "hello world . don n't x , a ' b 's é",
    *(text for each in (*TOKENS, "<s>", "<pad>") for text in (
        each, f"a{each}b", f" a  {each}  b ", f"{each}{each}", f"x {each.lower()} {each.upper()}", f"{each}s.",
        f"\n{each} .",
    )),
)  # fmt: skip


def served(folder: Path) -> model.Model:
    """The front end's model, of what the worker sends of the folder."""
    made = read_tokenizer(folder, VOCAB_SIZE)
    chat = worker_pb2.ChatFiles(tokenizer_config_json=made.settings_json)
    state = frontend_pb2.ModelState(ready=True, tokenizer_json=made.backend_json, chat_files=chat.SerializeToString())
    state.info.vocab_size = VOCAB_SIZE
    return model.load(state)


@pytest.mark.parametrize("name", TABLE)
def test_ids_and_texts_are_those_of_auto_tokenizer(name: str, tmp_path: Path) -> None:
    folder = TABLE[name].write(tmp_path / "m")
    truth: Any = AutoTokenizer.from_pretrained(folder)
    ours = served(folder).tokenizer
    assert ours is not None
    rng, num_tokens = random.Random(name), len(truth)
    outputs: list[list[int]] = [rng.choices(range(num_tokens), k=12) for _ in range(40)]

    whole, [bare, *_] = truth("a")["input_ids"], truth("a", add_special_tokens=False)["input_ids"]
    added = whole[: whole.index(bare)]

    async def check() -> None:
        for text in TEXTS:
            expected = truth(text)["input_ids"]
            # A text that brings its BOS has it once.
            is_doubled = bool(added) and expected[: 2 * len(added)] == 2 * added
            assert await ours.encode(text, "") == expected[len(added) if is_doubled else 0 :], text
            outputs.append(expected)
        for ids in outputs:
            for skip in (False, True):
                expected = truth.decode(ids, skip_special_tokens=skip)
                assert await ours.decode(ids, "", skip_special_tokens=skip) == expected, ids

    asyncio.run(check())
    assert ours.special_tokens == {
        idx: each.content for idx, each in truth.added_tokens_decoder.items() if each.special
    }


def test_the_table_has_what_a_tokenizer_json_alone_does_not(tmp_path: Path) -> None:
    """Most folders differ from their tokenizer.json, or the table would prove nothing."""
    differ: set[str] = set()
    for idx, (name, each) in enumerate(TABLE.items()):
        folder = each.write(tmp_path / str(idx))
        alone = each.make()
        truth: Any = AutoTokenizer.from_pretrained(folder)
        if any(alone.encode(text).ids != truth(text)["input_ids"] for text in TEXTS):
            differ.add(name)
    assert len(differ) >= 20, differ


@pytest.mark.parametrize("name", TABLE)
def test_streams_have_the_whole_text(name: str, tmp_path: Path) -> None:
    """The prompts are ordinary; what a decoder replaces in a text that was sent stays."""
    ours = served(TABLE[name].write(tmp_path / "m")).tokenizer
    assert ours is not None

    async def check() -> None:
        for text in TEXTS:
            ids = await ours.encode(text, "")
            whole = await ours.decode(ids, "", skip_special_tokens=False)
            assert output_of(ours, ids).text.strip() == whole.strip(), text

    asyncio.run(check())


def output_of(ours: ServedTokenizer, ids: list[int], *stops: str) -> OutputPiece:
    """What a stream of these tokens has in all."""
    decode = ours.decoder(skip_special_tokens=False)
    output = SampleOutput(
        detokenizer=Detokenizer(decode, (), ours.token_bytes.anchor, ours.replacements),
        stop_finder=StopFinder(stops, include_stop=False) if stops else None,
        stop_token_ids=frozenset(), min_new_tokens=0, include_stop=False,
    )  # fmt: skip
    text = ""
    for token_id in ids:
        piece = output.push([token_id])
        text += piece.text
        if piece.stop_string:
            return piece._replace(text=text)
    piece = output.finish([], stop_token_id=None)
    return piece._replace(text=text + piece.text)


def test_clean_up_of_a_stream_is_that_of_the_whole_wherever_a_token_ends(tmp_path: Path) -> None:
    """Every beginning of each pattern before each pattern, in tokens of one byte."""
    folder = TABLE["clean-up of a BPE"].write(tmp_path / "m")
    truth: Any = AutoTokenizer.from_pretrained(folder)
    ours = served(folder).tokenizer
    assert ours is not None
    patterns = [old for old, _ in ours.replacements]
    assert len(patterns) == 10 and len(ours.pieces([], skip_special_tokens=False)._texts._pairs) == 10
    spelled = {char: truth(char, add_special_tokens=False)["input_ids"] for char in {*"".join(patterns), *"ab😀"}}
    begun = {pattern[:size] for pattern in patterns for size in range(1, len(pattern) + 1)}
    for first, second in itertools.product(sorted(begun), patterns):
        text = f"a{first}{second}b{second}😀{first}"
        ids = [token_id for char in text for token_id in spelled[char]]
        whole = truth.decode(ids)
        assert whole != text and output_of(ours, ids).text == whole
        reader = ours.pieces([], skip_special_tokens=False)
        pieces = [*map(reader.push, ids), reader.rest()]
        assert "".join(piece.text for piece in pieces) == whole
        assert b"".join(piece.data for piece in pieces).decode() == whole
        found = output_of(ours, ids, stop := whole[1:3])
        assert (found.text, found.stop_string) == ("a", stop)


def with_new(make: Any = byte_level, **config: Any) -> Folder:
    return Folder(make=make, config={"added_tokens_decoder": listed(make, *NEW)} | config)


def test_tokens_beyond_the_models_vocabulary_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_new().write(tmp_path / "m")
    size = byte_level().get_vocab_size() + 2
    made = Tokenizer.from_str(read_tokenizer(folder, size).backend_json.decode())
    assert (made.get_vocab_size(), made.token_to_id("<|end|>"), made.token_to_id("[left]")) == (size, size - 1, None)
    assert f"5 added tokens of {folder} ([left], [right], city, <É>, <mask>) are left out" in caplog.text


def test_a_vocabulary_or_a_prompt_beyond_the_models_is_refused(tmp_path: Path) -> None:
    whole = with_new().write(tmp_path / "whole")
    size = byte_level().get_vocab_size()
    with pytest.raises(ModelRefused, match=rf"tokenizer.json has token {size - 1} \('</s>'\); .* ends at {size - 2}"):
        read_tokenizer(whole, size - 1)
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<new>", "add_bos_token": True, "unk_token": "a"}
    parts = Folder(make=byte_level, is_in_parts=True, config=config | {"eos_token": "a"}).write(tmp_path / "parts")
    assert read_tokenizer(parts, size + 1).backend_json
    with pytest.raises(ModelRefused, match=rf"has token {size} \('<new>'\)"):
        read_tokenizer(parts, size)


@pytest.mark.parametrize("has_json", [True, False])
def test_a_tokenizer_with_code_of_its_own_is_never_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_json: bool
) -> None:
    # A model of which Transformers has no tokenizer class.
    own = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.Slow", "evil.Evil"]}}
    folder = replace(with_new(**own), model_type="unheard_of").write(tmp_path / "m")
    (folder / "evil.py").write_text("raise SystemExit('code of a checkpoint was run')")
    if not has_json:
        (folder / "tokenizer.json").rename(folder / "vocab.json")
    made = read_tokenizer(folder, VOCAB_SIZE)
    assert "tokenizer_config.json names code of its own (auto_map), which is never run" in caplog.text
    assert (made == ModelTokenizer()) is not has_json
    if has_json:
        assert Tokenizer.from_str(made.backend_json.decode()).token_to_id("<tool>") is not None


@pytest.mark.parametrize("has_json", [True, False])
def test_a_tokenizer_without_a_backend_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_json: bool
) -> None:
    folder = Folder(make=byte_level, model_type="ctrl", config={"tokenizer_class": "CTRLTokenizer"}).write(
        tmp_path / "m"
    )
    (folder / "vocab.json").write_text(json.dumps(byte_level().get_vocab() | {"<unk>": 300}))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\n")
    if not has_json:
        (folder / "tokenizer.json").unlink()
    made = read_tokenizer(folder, VOCAB_SIZE)
    assert "CTRLTokenizer makes texts by code of its own" in caplog.text
    assert bool(made.backend_json) is has_json


@pytest.mark.parametrize(
    ("content", "library"), [(b"\n\x0e\n\x05<unk>\x15\x00\x00", "sentencepiece"), (b"IQ== 0\nIg== 1\n", "tiktoken")]
)
def test_a_missing_library_of_conversions_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, library: str
) -> None:
    folder = Folder(make=unigram, model_type="llama", config={"tokenizer_class": "LlamaTokenizer"}).write(
        tmp_path / "m"
    )
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(content)
    monkeypatch.setattr(subject, "find_spec", lambda name: None)
    fails = Mock(side_effect=ValueError("`tiktoken` is required"))
    monkeypatch.setattr(subject.AutoTokenizer, "from_pretrained", fails)
    with pytest.raises(ModelRefused, match=rf"tokenizer.model can only be converted with {library}, which is not inst"):
        read_tokenizer(folder, VOCAB_SIZE)


def test_a_sentencepiece_model_alone_is_served_if_its_library_is_there(tmp_path: Path) -> None:
    spm = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3}
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "e", "he", "▁he", "<tool>"]
    proto = spm.ModelProto()
    for idx, piece in enumerate(pieces):
        kind = kinds.get(piece, 6 if piece.startswith("<0x") else 4 if piece == "<tool>" else 1)
        proto.pieces.add(piece=piece, score=-float(idx), type=kind)
    proto.trainer_spec.model_type, proto.trainer_spec.unk_id = 2, 0
    proto.trainer_spec.byte_fallback = True
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    folder = Folder(make=unigram, model_type="llama", config=config).write(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    truth: Any = AutoTokenizer.from_pretrained(folder)
    ours = served(folder).tokenizer
    assert ours is not None
    for text in ("he he", "he<tool>he", "é </s>"):
        ids = truth(text)["input_ids"]
        assert asyncio.run(ours.encode(text, "")) == ids and ids[0] == 1
        assert asyncio.run(ours.decode(ids, "", skip_special_tokens=True)) == truth.decode(
            ids, skip_special_tokens=True
        )


@cache
def sources(folder: Path) -> dict[str, bytes]:
    return dict(source_hashes(folder))


def test_the_identity_follows_every_file_and_nothing_else(tmp_path: Path) -> None:
    folder = with_new(chat_template="{{ messages }}").write(tmp_path / "m")
    before = sources(folder)
    assert before.keys() == {"tokenizer.json", "tokenizer_config.json"}
    for idx, name in enumerate((
        *("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "tokenizer.model"),
        *("vocab.json", "vocab.txt", "merges.txt", "qwen.tiktoken", "tekken.json", "chat_template.jinja"),
        "additional_chat_templates/tool_use.jinja",
    )):  # fmt: skip
        other = shutil.copytree(folder, tmp_path / str(idx))
        (other / name).parent.mkdir(exist_ok=True)
        with (other / name).open("a") as file:
            file.write(" ")
        changed = {each for each, hashed in sources(other).items() if before.get(each) != hashed}
        assert changed == {name}
    (folder / "README.md").write_text("x")
    assert dict(source_hashes(folder)) == before


def test_the_identity_does_not_follow_the_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_new().write(tmp_path / "m")
    before = read_tokenizer(folder, VOCAB_SIZE), dict(source_hashes(folder))
    monkeypatch.setattr(subject, "_serialized", lambda *_: "another form")
    assert read_tokenizer(folder, VOCAB_SIZE) != before[0]
    assert dict(source_hashes(folder)) == before[1]


@pytest.mark.parametrize(
    "given",
    [
        [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}],
        {"default": "d", "tool_use": "t"},
    ],
)
def test_templates_of_the_config_may_have_names(tmp_path: Path, given: object) -> None:
    made = read_tokenizer(with_new(chat_template=given).write(tmp_path / "m"), VOCAB_SIZE)
    assert (made.template, made.named_templates) == ("d", {"tool_use": "t"})


def test_files_of_templates_win_over_the_config(tmp_path: Path) -> None:
    folder = with_new(chat_template="older").write(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("häuptling", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("r")
    made = read_tokenizer(folder, VOCAB_SIZE)
    assert (made.template, made.named_templates) == ("häuptling", {"rag": "r"})


def test_the_settings_that_rendering_depends_on_travel(tmp_path: Path) -> None:
    made = read_tokenizer(
        with_new(
            bos_token={"__type": "AddedToken", "content": "<tool>"},
            eos_token="<|end|>",
            image_token="[left]",
            unk_token=None,
            additional_special_tokens=["[right]"],
            chat_control_tokens=["<tool>"],
            split_special_tokens=True,
            model_max_length=5,
            response_template={"fields": {}},
        ).write(tmp_path / "m"),
        VOCAB_SIZE,
    )
    assert json.loads(made.settings_json) == {
        "bos_token": "<tool>",
        "eos_token": "<|end|>",
        "model_specific_special_tokens": {"image_token": "[left]"},
        "extra_special_tokens": ["[right]"],
        "chat_control_tokens": ["<tool>"],
        "split_special_tokens": True,
    }
    assert json.loads(made.response_template_json) == {"fields": {}}


def test_too_large_templates_are_refused_with_size_and_limit(tmp_path: Path) -> None:
    folder = with_new(chat_template="x" * (1 << 20)).write(tmp_path / "m")
    with pytest.raises(ModelRefused, match=r"have 1048\d\d\d bytes; the limit is 1048576"):
        read_tokenizer(folder, VOCAB_SIZE)


def test_a_prompt_is_never_cut_or_padded(tmp_path: Path) -> None:
    made = byte_level()
    made.enable_truncation(4)
    made.enable_padding(length=4)
    ours = served(Folder(make=lambda: made).write(tmp_path / "m")).tokenizer
    assert ours is not None
    for text in ("a", "a" * 99):
        assert len(asyncio.run(ours.encode(text, ""))) == len(text) + 1


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path, VOCAB_SIZE) == ModelTokenizer()
