"""The bundled model matches its documentation: checksums, size, loading, tokenizer, held-out loss, corpus."""

import json
import math
import platform
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.bundled_recipe import corpus as corpus_module
from tests.bundled_recipe.chat_tokens import EOS_IDS, MARKS, TURN_TOKENS, add_chat
from tests.bundled_recipe.corpus import Corpus, build_corpus
from tests.bundled_recipe.evaluate import (
    MODEL_DIR,
    SUBSET_WINDOWS,
    TOLERANCE,
    file_checksums,
    held_out_windows,
    load_f32,
    token_losses,
    verify,
)
from tests.bundled_recipe.prompts import greedy, read_prompts
from tests.bundled_recipe.recipe import Recipe, batches, build_model, build_optimizers
from tests.bundled_recipe.tokenizer import EOS_ID, EOS_TOKEN, TRAINED_TOKENS, VOCAB_SIZE, train_tokenizer
from tests.bundled_recipe.train import load_checkpoint, save_checkpoint
from tests.bundled_recipe.unlikelihood import repeats

PROVENANCE = json.loads((MODEL_DIR / "provenance.json").read_text())


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_f32(MODEL_DIR)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return build_corpus()


def test_every_file_has_its_recorded_checksum() -> None:
    assert file_checksums(MODEL_DIR) == PROVENANCE["sha256"]


def test_the_model_loads_as_bf16_of_at_most_8_mib_with_a_context_of_at_least_1024() -> None:
    assert (MODEL_DIR / "model.safetensors").stat().st_size <= 8 << 20
    loaded = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    assert isinstance(loaded, Qwen3ForCausalLM)
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.max_position_embeddings >= 1_024
    assert sum(parameter.numel() for parameter in loaded.parameters()) == PROVENANCE["parameters"]


def test_eos_is_declared_everywhere(model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    assert tokenizer.token_to_id(EOS_TOKEN) == EOS_ID
    assert model.config.vocab_size == VOCAB_SIZE
    assert model.config.eos_token_id == EOS_ID
    assert model.generation_config is not None
    assert model.generation_config.eos_token_id == EOS_IDS == [EOS_ID, tokenizer.token_to_id("<|im_end|>")]
    assert AutoTokenizer.from_pretrained(MODEL_DIR).eos_token_id == EOS_ID


@pytest.mark.parametrize(
    "text",
    [
        "Return the number of bytes.\n\n    >>> f(x)\n",
        "  leading, trailing  \t\r\n",
        "Grüße, привет, 漢字, עברית",
        "👩‍👩‍👧 e\u0301 \ufeff \x00 \x7f \u2028",
        "".join(map(chr, range(0x250))),
    ],
)
def test_text_is_encoded_and_decoded_without_a_change(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert AutoTokenizer.from_pretrained(MODEL_DIR).encode(text) == ids


def test_the_end_token_can_be_written_in_a_prompt(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(f"a{EOS_TOKEN}b").ids.count(EOS_ID) == 1


def test_the_tokens_of_chats_come_after_the_trained_ones(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_to_id(token) for token in (*TURN_TOKENS, *MARKS)]
    assert ids == list(range(TRAINED_TOKENS, tokenizer.get_vocab_size()))
    text = "".join((*TURN_TOKENS, *MARKS))
    assert tokenizer.encode(text).ids == ids
    assert tokenizer.decode(ids) == "".join(MARKS)


def test_rows_of_tokens_that_were_not_trained_are_the_mean_of_the_others(model: PreTrainedModel) -> None:
    rows = model.get_input_embeddings().weight
    mean = rows[:TRAINED_TOKENS].mean(0).to(torch.bfloat16).float()
    assert torch.allclose(rows[TRAINED_TOKENS:], mean.expand(VOCAB_SIZE - TRAINED_TOKENS, -1), atol=1e-6)


def test_chat_tokens_are_added_once(tmp_path: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json", "config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((MODEL_DIR / name).read_bytes())
    with pytest.raises(ValueError, match=r"has 4112 rows; a model without the tokens of chats has 4096"):
        add_chat(tmp_path)


def test_a_trained_folder_gets_the_committed_files(tmp_path: Path) -> None:
    weights = load_file(MODEL_DIR / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:TRAINED_TOKENS].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    saved = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    saved["added_tokens"] = saved["added_tokens"][:1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((MODEL_DIR / name).read_bytes())
    add_chat(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        assert path.read_bytes() == (MODEL_DIR / path.name).read_bytes(), path.name
    assert (tmp_path / "chat_template.jinja").exists()


@pytest.mark.long
def test_the_held_out_loss_is_the_recorded_one(model: PreTrainedModel, tokenizer: Tokenizer, corpus: Corpus) -> None:
    windows = held_out_windows(tokenizer, corpus)[:SUBSET_WINDOWS]
    loss = token_losses(model, windows).mean().item()
    if platform.python_version() == PROVENANCE["cpython_version"]:
        assert loss == pytest.approx(PROVENANCE["held_out_loss_subset"], rel=TOLERANCE)
    else:
        # The texts of another version: the loss is still far below ln(vocabulary), that of an untrained model.
        assert loss < 0.65 * math.log(VOCAB_SIZE)


@pytest.mark.long
def test_the_corpus_of_the_recorded_version_has_the_recorded_hash(corpus: Corpus) -> None:
    if platform.python_version() != PROVENANCE["cpython_version"]:
        pytest.skip(f"the corpus is CPython {PROVENANCE['cpython_version']}'s")
    assert corpus.sha256 == PROVENANCE["corpus_sha256"]


def write_library(root: Path) -> None:
    for index in range(60):
        (root / f"module_{index:02}.py").write_text(
            f'"""Documentation {index} of a module."""\n# A comment of more than {index} words,\n# on two lines.\n'
        )
    (root / "test").mkdir()
    (root / "test" / "test_x.py").write_text('"""Not to be read."""\n')
    (root / "broken.py").write_text("def (:\n")


def test_the_corpus_is_deterministic_and_depends_on_the_source(tmp_path: Path) -> None:
    write_library(tmp_path)
    first = build_corpus(tmp_path)
    assert build_corpus(tmp_path) == first
    assert len(first.train) + len(first.held_out) == 60
    assert 0 < len(first.held_out) < 15
    assert (
        "Documentation 7 of a module.\n\nA comment of more than 7 words,\non two lines." in first.train + first.held_out
    )
    (tmp_path / "module_07.py").write_text('"""Another text."""\n')
    assert build_corpus(tmp_path).sha256 != first.sha256


def test_licences_pragmas_repeats_and_bare_lines_are_left_out(tmp_path: Path) -> None:
    paragraph = "A paragraph that two files share word for word, long enough to count as a repeat."
    (tmp_path / "a.py").write_text(
        f'#!/usr/bin/env python3\n# Copyright 2001 by Somebody, who keeps all rights\n"""{paragraph}"""\n#####\nx = 1\n'
    )
    (tmp_path / "b.py").write_text(f'"""{paragraph}\n\nThe second file says more."""\n')
    # A file with a warning of its syntax is kept.
    (tmp_path / "c.py").write_text('"""Words with \\d an old escape."""\n')
    documents = (built := build_corpus(tmp_path)).train + built.held_out
    assert documents == (paragraph, "The second file says more.", "Words with \\d an old escape.")


def test_the_split_never_divides_a_file() -> None:
    assert corpus_module.is_held_out("json/decoder.py") == corpus_module.is_held_out("json/decoder.py")
    assert 0 < sum(corpus_module.is_held_out(f"module_{index}.py") for index in range(1_000)) < 100


@pytest.mark.long
def test_the_tokenizer_recipe_is_deterministic(tmp_path: Path, corpus: Corpus, tokenizer: Tokenizer) -> None:
    if corpus.sha256 != PROVENANCE["corpus_sha256"]:
        pytest.skip(f"the corpus is CPython {PROVENANCE['cpython_version']}'s")
    trained = train_tokenizer(corpus.train)
    assert json.loads(trained.to_str())["model"] == json.loads(tokenizer.to_str())["model"]


def test_the_steps_of_a_training_are_deterministic() -> None:
    documents = [torch.arange(700) + 1_000 * index for index in range(20)]
    recipe = Recipe(num_steps=10)
    steps = list(batches(documents, recipe))
    assert all(torch.equal(a, b) for a, b in zip(steps, batches(documents, recipe), strict=True))
    assert [tuple(step.shape) for step in steps] == [(8, 256)] * 8 + [(2, 1_024)] * 2


def test_repeats_marks_every_token_of_an_n_gram_met_before() -> None:
    ids = torch.tensor([[1, 2, 3, 4, 9, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]])
    assert repeats(ids, 4).tolist() == [[False, True, True, True, True, False], [False] * 6]


def test_the_recipe_builds_the_models_parameters(model: PreTrainedModel) -> None:
    built, loaded = ({name: each.shape for name, each in m.named_parameters()} for m in (build_model(Recipe()), model))
    embedding = "model.embed_tokens.weight"
    # Texts of control tokens are added after the training.
    assert built.pop(embedding)[0] == TRAINED_TOKENS <= loaded.pop(embedding)[0]
    assert built == loaded


def test_training_continues_identically_from_a_checkpoint(tmp_path: Path) -> None:
    def step(model: PreTrainedModel, optimizers: tuple[torch.optim.Optimizer, ...], first_id: int) -> None:
        ids = torch.arange(first_id, first_id + 16)[None]
        model(ids, labels=ids).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    # Muon multiplies in bfloat16, which takes seconds for the recipe's own sizes on a CPU without it.
    config = Qwen3Config(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    whole, resumed = Qwen3ForCausalLM(config), Qwen3ForCausalLM(config)
    whole_optimizers, resumed_optimizers = (build_optimizers(m, Recipe()) for m in (whole, resumed))
    step(whole, whole_optimizers, 0)
    save_checkpoint(tmp_path / "checkpoint.safetensors", whole, whole_optimizers, 1)
    assert load_checkpoint(tmp_path / "checkpoint.safetensors", resumed, resumed_optimizers) == 1
    step(whole, whole_optimizers, 100)
    step(resumed, resumed_optimizers, 100)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.long
def test_verify_prints_its_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source in MODEL_DIR.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / "provenance.json").write_text(json.dumps(PROVENANCE | {"held_out_loss": 1.0, "corpus_sha256": "0"}))
    assert not verify(tmp_path)
    said = capsys.readouterr().out
    assert "NOTE: this CPython's corpus" in said
    assert "DIFFERS" in said


def test_prompts_have_clear_greedy_choices_and_distinct_outputs(model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    prompts = read_prompts()
    assert len(prompts) == len(set(prompts)) >= 96
    completions = [greedy(model, tokenizer.encode(prompt).ids) for prompt in prompts[::16]]
    assert min(completion.min_margin for completion in completions) >= 1e-3
    assert len({completion.token_ids for completion in completions}) == len(completions)
