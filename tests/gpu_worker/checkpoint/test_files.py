"""The model's folder: its description in Join, refusals, and its identity."""

import json
import shutil
from dataclasses import replace
from io import BufferedReader
from pathlib import Path

import pytest

from gpu_worker.checkpoint.files import ModelRefused, identity, read_files
from gpu_worker.checkpoint.tokenizer import ModelTokenizer
from tests.gpu_worker.checkpoint.test_generation import GREEDY
from tests.gpu_worker.saved_model import VOCAB_SIZE, changed, save_model, tokenizer_json


def test_read_files_returns_the_fields_of_join(saved: Path) -> None:
    files = read_files(saved)
    assert files.eos_token_ids == (3, 5)
    drawn = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0}
    assert (files.generation.defaults, files.generation.unsupported) == (drawn, ())
    written = json.loads((saved / "tokenizer.json").read_bytes())
    assert json.loads(files.tokenizer.backend_json)["model"] == written["model"]
    assert files.tokenizer.template == "{{ messages }}"


@pytest.mark.parametrize(
    ("written", "defaults", "unsupported"),
    [
        (None, {}, ()),
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}, ()),
        (
            {"no_repeat_ngram_size": 3, "suppress_tokens": [7], "num_beams": 1, "top_p": 0.5, "max_length": 20},
            {},
            ("no_repeat_ngram_size 3", "suppress_tokens [7]"),
        ),
    ],
)
def test_without_do_sample_the_default_is_greedy(
    folder: Path, written: dict[str, object] | None, defaults: dict[str, float], unsupported: tuple[str]
) -> None:
    """With a repetition penalty all the same; what cannot be served is listed. None: without the file."""
    (folder / "generation_config.json").unlink()
    if written is not None:
        (folder / "generation_config.json").write_text(json.dumps(written))
    files = read_files(folder)
    assert files.generation.defaults == GREEDY | defaults
    assert files.generation.unsupported == unsupported
    assert files.eos_token_ids == (3,)


def test_read_files_turns_off_outputs_other_than_logits(saved: Path, tmp_path: Path) -> None:
    wants = {"return_dict": False, "output_attentions": True, "output_hidden_states": True}
    config = read_files(changed(saved, tmp_path / "m", **wants)).config
    assert config.return_dict
    assert not (config.output_attentions or config.output_hidden_states)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {"model_type": "llama9", "transformers_version": "9.1.0"},
            r"model type llama9 is unknown to the installed Transformers [\d.]+, config.json was written by 9.1.0; ",
        ),
        (
            {"model_type": "llama9", "auto_map": {"AutoConfig": "configuration_llama9.Llama9Config"}},
            r"model type llama9 needs its own code \(auto_map\), which is never run; serve",
        ),
        # Known to Transformers, but not as a language model.
        (
            {"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "modeling_vit.VitLM"}},
            "model type vit needs its own code",
        ),
        ({"model_type": None}, "has no model_type"),
        ({"hidden_size": "wide"}, "config.json cannot be used: .*hidden_size"),
    ],
)
def test_unusable_configs_are_refused_with_the_reason(
    saved: Path, tmp_path: Path, config: dict[str, object], problem: str
) -> None:
    with pytest.raises(ModelRefused, match=problem):
        read_files(changed(saved, tmp_path / "m", **config))


def test_code_in_the_folder_of_a_known_model_is_ignored(saved: Path, tmp_path: Path) -> None:
    folder = changed(saved, tmp_path / "m", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.LM"})
    (folder / "evil.py").write_text("raise SystemExit('code of a checkpoint was run')")
    assert type(read_files(folder).config).__module__.startswith("transformers.")


@pytest.mark.parametrize("text", ['{"a": ', '{"a": ' + "[" * 200_000], ids=["cut", "nested too deeply"])
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "added_tokens.json", "generation_config.json"]
)
def test_a_refusal_of_invalid_json_names_the_file(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(ModelRefused, match=f"{name} is not JSON"):
        read_files(folder)


def test_tokenizers_of_other_models_are_refused(folder: Path) -> None:
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer_json(VOCAB_SIZE - 4))
    read_files(folder)
    tokenizer.write_text(tokenizer_json(VOCAB_SIZE, added="<extra>"))
    with pytest.raises(ModelRefused, match=r"has token 40 \('<extra>'\); the model's vocabulary ends at 39"):
        read_files(folder)
    tokenizer.write_text('{"version": "1.0"}')
    with pytest.raises(ModelRefused, match=r"AutoTokenizer cannot build the tokenizer in .*: .*; download"):
        read_files(folder)
    tokenizer.unlink()
    assert read_files(folder).tokenizer == ModelTokenizer()


@pytest.mark.parametrize("token", [VOCAB_SIZE, -1])
def test_stop_tokens_outside_the_vocabulary_are_refused(folder: Path, token: int) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, token]}))
    with pytest.raises(ModelRefused, match=rf"eos_token_id in .*generation_config.json is {token}; it must be 0 to 39"):
        read_files(folder)


def test_identity_follows_weights_config_tokenizer_and_page_size(saved: Path, tmp_path: Path) -> None:
    def identity_of(folder: Path, page_size: int = 64) -> str:
        return identity(read_files(folder), page_size)

    base = identity_of(saved)
    assert base == identity_of(saved)
    assert base != identity_of(saved, page_size=128)
    folder = changed(saved, tmp_path / "m")
    assert identity_of(folder) == base
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-5] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert identity_of(folder) != base
    shutil.copy(saved / "model.safetensors", folder)
    assert identity_of(folder) == base
    (folder / "tokenizer.json").write_text(tokenizer_json(VOCAB_SIZE - 1))
    assert identity_of(folder) != base
    shutil.copy(saved / "tokenizer.json", folder)
    assert identity_of(folder) == base
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    assert identity_of(folder) != base


def test_identity_reads_every_shard_of_a_small_model(sharded: Path, tmp_path: Path) -> None:
    base = identity(read_files(sharded), 64)
    shards = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(shards) > 2
    for name in shards:
        folder = changed(sharded, tmp_path / name)
        weights = bytearray((folder / name).read_bytes())
        weights[-5] ^= 1
        (folder / name).write_bytes(weights)
        assert identity(read_files(folder), 64) != base


def test_identity_reads_as_many_bytes_of_many_shards_as_of_one(tmp_path: Path) -> None:
    """The shards of 1 GiB together are read as little as one file."""
    folder = save_model(tmp_path / "m")
    files = read_files(folder)
    paths = [folder / f"model-{i}.safetensors" for i in range(64)]
    for path in paths:
        shutil.copy(folder / "model.safetensors", path)
        with path.open("r+b") as file:
            file.truncate(1 << 30)
    reads = 0
    real_open = Path.open

    class Counted(BufferedReader):
        def read(self, size: int | None = -1) -> bytes:
            nonlocal reads
            reads += 1
            return super().read(size)

    def counted_open(path: Path, mode: str = "r", *arguments: object, **keywords: object) -> object:
        file = real_open(path, mode, *arguments, **keywords)
        return Counted(file.detach()) if mode == "rb" else file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", counted_open)
        identity(replace(files, weights=replace(files.weights, paths=tuple(paths))), 64)
    # Each shard's header takes two, and its samples may end on one more.
    assert 1024 <= reads <= 1024 + 64 * 4
