"""The law of updates: the worker then computes what a start with the folder computes, or has refused it by name."""

import copy
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from typing import cast as of_type
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from tandem.internal.v1 import worker_pb2 as pb
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gpu_worker.checkpoint.files import ModelFiles, read_files
from gpu_worker.checkpoint.loading import load_plain, prepare
from gpu_worker.compatibility.independence import pin
from gpu_worker.compatibility.new_weights import WeightsLoader
from gpu_worker.compatibility.probe import attending
from gpu_worker.memory import model_facts
from gpu_worker.memory.model_facts import check_same_computation, examine
from gpu_worker.step.runner import Runner
from tests.census.hints import HINTS
from tests.census.shrink import HIDDEN_SIZE, MAX_LENGTH, VOCAB_SIZE, tiny_config
from tests.census.weights import randomize
from tests.gpu_worker.compatibility.rope_configs import dynamic, phi3
from tests.gpu_worker.saved_model import changed, tokenizer_json, with_tensors

CPU, DTYPE = torch.device("cpu"), torch.float32
# Longer than every window.
TEXT = [(7 * i) % 120 + 2 for i in range(60)]
OPTIONS_FILE, EMBEDDING = "generation_config.json", "model.embed_tokens.weight"
EXPERT = "model.layers.0.mlp.experts.1.gate_proj.weight"
OPTIONS = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [3, 5]}
CHAT = {"chat_template": "{{ messages }}", "tokenizer_class": "PreTrainedTokenizerFast"}
OTHER_TEMPLATE = {"chat_template": "{{ tools }}"}
# A trainer's save_pretrained changes these, and they compute nothing.
HARMLESS: dict[str, Any] = {
    "use_cache": False, "dtype": "bfloat16", "transformers_version": "4.40.0", "architectures": ["PeftModel"],
    "initializer_range": 0.5, "bos_token_id": 4, "pad_token_id": 3, "attention_dropout": 0.25, "eos_token_id": 9,
}  # fmt: skip


def config_of(family: str) -> PreTrainedConfig:
    if family in ("longrope", "dynamic"):
        return phi3(threshold=64) if family == "longrope" else dynamic(length=60)
    return tiny_config(CONFIG_MAPPING[family], HINTS.get(family, {}))


def save(config: PreTrainedConfig, folder: Path, seed: int) -> Path:
    """A checkpoint as published, with a tokenizer."""
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=DTYPE)
    randomize(model, seed)
    model.save_pretrained(folder)
    config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(OPTIONS))
    (folder / "tokenizer.json").write_text(tokenizer_json(VOCAB_SIZE))
    (folder / "tokenizer_config.json").write_text(json.dumps(CHAT))
    return folder


class Family:
    """Two checkpoints of one family, and the facts of its configs, which are examined once."""

    def __init__(self, name: str, folder: Path) -> None:
        config = config_of(name)
        self.folder, self.old, self.new = folder, *(save(config, folder / f"v{i}", i) for i in (1, 2))
        self.settings: dict[str, Any] = json.loads((self.old / "config.json").read_text())

    def changed(self, **fields: Any) -> Path:
        """The new checkpoint with other fields in config.json."""
        folder = self.folder / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        return changed(self.new, folder, **fields)


def start(folder: Path, *, dtype: torch.dtype = DTYPE, packs: bool = True) -> tuple[PreTrainedModel, ModelFiles]:
    """As startup.py does."""
    files = read_files(folder)
    facts = model_facts.model_facts(files.config, dtype=dtype, packs=packs)
    model = load_plain(files, dtype=dtype)
    if packs:
        model = prepare(model, device=CPU, dtype=dtype, merged=facts.merged)
    else:
        model.eval().requires_grad_(False)
    pin(model, min(MAX_LENGTH, facts.costs.length_limit))
    return model, files


def update(
    model: PreTrainedModel, files: ModelFiles, folder: Path, *, dtype: torch.dtype = DTYPE, packs: bool = True
) -> pb.WeightsLoaded:
    # The rows stay, so that nothing runs on the runner.
    runner = of_type(Runner, SimpleNamespace(labels=mock.Mock(), device=CPU))
    check = partial(check_same_computation, files.config, dtype=dtype, packs=packs)
    loader = WeightsLoader(model, files, runner, dtype=dtype, layers=mock.Mock(), check_config=check)
    return loader.load(pb.LoadWeights(version="v2", folder=str(folder), roots=[str(folder.parent)], keep_rows=True))


@torch.inference_mode()
def logits(model: PreTrainedModel) -> Tensor:
    with attending(model, "eager"):
        positions = torch.arange(len(TEXT))[None]
        return model(input_ids=torch.tensor([TEXT]), position_ids=positions, use_cache=False).logits[0]


# Started models with their logits. A refused folder changes nothing, so the next test has the model too.
STARTED: dict[object, tuple[PreTrainedModel, ModelFiles, Tensor]] = {}


def law(old: Path, folder: Path, *, dtype: torch.dtype = DTYPE, packs: bool = True) -> pb.WeightsLoaded:
    """Updates a worker of `old` with the folder, and checks the law. Returns the worker's answer."""
    key = old, dtype, packs
    if key not in STARTED:
        model, files = start(old, dtype=dtype, packs=packs)
        STARTED[key] = model, files, logits(model)
    model, files, before = STARTED.pop(key)
    answer = update(model, files, folder, dtype=dtype, packs=packs)
    if not answer.ok:
        assert torch.equal(logits(model), before), "a refused folder changes nothing"
        STARTED[key] = model, files, before
        return answer
    fresh, described = start(folder, dtype=dtype, packs=packs)
    assert torch.equal(logits(model), logits(fresh))
    assert set(files.eos_token_ids) == set(described.eos_token_ids)
    assert files.generation.defaults == described.generation.defaults
    assert files.tokenizer == described.tokenizer
    return answer


@pytest.fixture(autouse=True, scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Facts are kept for this module only."""
    folder = tmp_path_factory.mktemp("facts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_facts, "cache_dir", lambda _: folder)
        # They do not change meanwhile.
        patch.setattr(model_facts, "_sources", list)
        yield
    STARTED.clear()


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    known: dict[str, Family] = {}

    def get(name: str) -> Family:
        if name not in known:
            known[name] = Family(name, tmp_path_factory.mktemp(name))
        return known[name]

    return get


def mutants(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each field of config.json with another value of its type, nested ones too."""
    for name, value in settings.items():
        if name in ("model_type", "transformers_version"):
            continue
        others: list[Any] = []
        if isinstance(value, bool):
            others = [not value]
        elif isinstance(value, int):
            others = [value + 1, value * 2] if value else [1]
        elif isinstance(value, float):
            others = [value * 2, value * (1 + 1e-6)] if value else [0.25]
        elif isinstance(value, str):
            others = [each for each in ("gelu", "relu", "float16") if each != value][:1]
        elif isinstance(value, list) and value:
            others = [value[::-1], [value[0]] * len(value)]
        elif isinstance(value, dict):
            others = [value | {inner: changed} for inner, changed in mutants(value)]
        yield from ((name, other) for other in others if other != value)


FIELDS = ("hidden_act", "mlp_bias", "num_key_value_heads")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", FIELDS),
        *(
            pytest.param(name, (), marks=pytest.mark.long)
            for name in ("longrope", "dynamic", *sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
        ),
    ],
)
def test_every_field_of_config_computes_the_same_or_is_refused_by_name(
    name: str, fields: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A field that Transformers reads anywhere in a forward must show in the comparison. fields: empty for all."""
    caplog.set_level(logging.ERROR)
    try:
        examine(config_of(name), dtype=DTYPE, packs=False)
    except Exception as error:  # any error of a config class of Transformers
        if fields:
            raise
        pytest.skip(f"the family is not served: {error}")
    family = Family(name, tmp_path)
    broken: list[str] = []
    for field, value in mutants(family.settings):
        if fields and field not in fields:
            continue
        try:
            answer = law(family.old, family.changed(**{field: value}))
        except Exception as error:  # every other end breaks the law
            broken.append(f"{field} = {value}: {type(error).__name__} {str(error).splitlines()[:1]}")
            continue
        if not answer.ok and not any(word in answer.detail for word in (field, "config.json")):
            broken.append(f"{field} = {value} is refused without its name: {answer.detail}")
    assert broken == []


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", HARMLESS),
        pytest.param("gpt2", {"pad_token_id": 3}, marks=pytest.mark.long),
        *(pytest.param("llama", {field: HARMLESS[field]}, marks=pytest.mark.long) for field in HARMLESS),
    ],
)
def test_fields_that_compute_nothing_are_taken(
    name: str, fields: dict[str, Any], family_of: Callable[[str], Family]
) -> None:
    family = family_of(name)
    answer = law(family.old, family.changed(**fields))
    assert answer.ok, answer.detail


def without(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).unlink()
    return folder


def written(folder: Path, name: str, content: str) -> Path:
    (folder / name).write_text(content)
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def cast(folder: Path, dtype: torch.dtype) -> Path:
    return with_tensors(folder, {name: each.to(dtype) for name, each in tensors_of(folder).items()})


def saved_again(folder: Path) -> Path:
    """With the tokenizer as a trainer saves it, which truncates."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.save_pretrained(folder)
    return folder


def quantised(family: Family, name: str) -> Path:
    """With one tensor in 8 bits and its scale."""
    weight = tensors_of(family.new)[name].to(torch.float8_e4m3fn)
    return with_tensors(family.changed(), {name: weight, f"{name}_scale": torch.ones(1)})


HEAD, NORM = "lm_head.weight", "model.norm.weight"
ONES = torch.ones(HIDDEN_SIZE)
DRAWN = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=torch.Generator().manual_seed(9))
UNUSED = {
    "v_head.summary.weight": torch.zeros(1, HIDDEN_SIZE),
    **{f"model.layers.{i}.self_attn.rotary_emb.cos_cached": torch.zeros(2, dtype=torch.int64) for i in (0, 1)},
    "model.layers.0.attention.bias": torch.ones(4, 4, dtype=torch.bool),
    "scale": torch.zeros(2).to(torch.float8_e4m3fn),
}
# Name: family, the folder, and why it is refused; empty if it is taken.
KINDS: dict[str, tuple[str, Callable[[Family], Path], str]] = {
    "other values": ("llama", lambda family: family.new, ""),
    "other values, tied": ("gemma3_text", lambda family: family.new, ""),
    "other values, experts and sinks": ("gpt_oss", lambda family: family.new, ""),
    "own head, equal": (
        "gemma3_text", lambda f: with_tensors(f.changed(), {HEAD: tensors_of(f.new)[EMBEDDING]}), "",
    ),
    "a tied folder": (
        "llama", lambda f: with_tensors(f.changed(tie_word_embeddings=True), {HEAD: None}), "",
    ),
    "a tied folder with a head": ("llama", lambda f: f.changed(tie_word_embeddings=True), ""),
    "no head": ("llama", lambda f: with_tensors(f.changed(), {HEAD: None}), "lm_head.weight) is missing"),
    "unused tensors": ("llama", lambda f: with_tensors(f.changed(), UNUSED), ""),
    "no norm": ("llama", lambda f: with_tensors(f.changed(), {NORM: None}), "model.norm.weight) is missing"),
    "another shape": ("llama", lambda f: with_tensors(f.changed(), {NORM: ONES[1:]}), "weight is [79], expected"),
    "integers": (
        "llama", lambda f: with_tensors(f.changed(), {NORM: ONES.int()}), "model.norm.weight in FOLDER",
    ),
    "a float of 8 bits": (
        "llama", lambda f: with_tensors(f.changed(), {NORM: ONES.to(torch.float8_e4m3fn)}), "has dtype F8_E4M3; a",
    ),
    "infinite": ("llama", lambda f: with_tensors(f.changed(), {NORM: ONES / 0}), "has values that are not finite"),
    "an expert in 8 bits": ("qwen3_moe", lambda f: quantised(f, EXPERT), f"{EXPERT} in FOLDER"),
    "float16": ("llama", lambda f: cast(f.changed(), torch.float16), ""),
    "float64": ("llama", lambda f: cast(f.changed(), torch.float64), ""),
    "another model": ("llama", lambda f: f.changed(model_type="qwen3"), "model_type is 'qwen3', the"),
    "another window": ("gemma3_text", lambda f: f.changed(sliding_window=20), "sliding_window is 20, the"),
    "another theta": ("llama", lambda f: f.changed(rope_parameters=None, rope_theta=5e5), "rope_theta is 500000.0"),
    "another eps": ("llama", lambda f: f.changed(rms_norm_eps=2e-6), "rms_norm_eps is 2e-06, the served"),
    "a longer text": ("llama", lambda f: f.changed(max_position_embeddings=512), "max_position_embeddings is 512"),
    "another default": (
        "llama", lambda f: written(f.changed(), OPTIONS_FILE, json.dumps(OPTIONS | {"temperature": 0.7})),
        "generation_config.json.temperature is 0.7, the served model's is 0.6",
    ),
    "other stop ids": (
        "llama", lambda f: written(f.changed(), OPTIONS_FILE, json.dumps(OPTIONS | {"eos_token_id": [3]})),
        "generation_config.json.eos_token_id is [3], the served model's is [3, 5]",
    ),
    "a default out of range": (
        "llama", lambda f: written(f.changed(), OPTIONS_FILE, '{"do_sample": true, "top_k": -7}'),
        "top_k in FOLDER/generation_config.json is -7; it must be",
    ),
    "the same stop ids": (
        "llama", lambda f: written(f.changed(), OPTIONS_FILE, json.dumps(OPTIONS | {"eos_token_id": [5, 3, None]})), "",
    ),
    "another tokenizer": (
        "llama", lambda f: written(f.changed(), "tokenizer.json", tokenizer_json(99)), "backend.model.vocab.word",
    ),
    "a tokenizer that a trainer saved": ("llama", lambda f: saved_again(f.changed()), ""),
    "no tokenizer, only its settings": (
        "llama", lambda f: without(f.changed(), "tokenizer.json"), "tokenizer.backend.",
    ),
    "another template": (
        "llama", lambda f: written(f.changed(), "tokenizer_config.json", json.dumps(CHAT | OTHER_TEMPLATE)),
        "tokenizer.template is '{{ tools }}', the served model's is '{{ messages }}'",
    ),
}  # fmt: skip


# Kinds with tensors that have another place in a plain model.
PLAIN = ("other values", "other values, tied", "own head, equal", "a tied folder", "unused tensors", "float64")


@pytest.mark.parametrize(("kind", "packs"), [*((kind, True) for kind in KINDS), *((kind, False) for kind in PLAIN)])
def test_each_kind_of_difference_obeys_the_law(
    kind: str, packs: bool, family_of: Callable[[str], Family], caplog: pytest.LogCaptureFixture
) -> None:
    name, make, why = KINDS[kind]
    family = family_of(name)
    folder = make(family)
    caplog.clear()
    answer = law(family.old, folder, packs=packs)
    assert answer.ok != bool(why), answer.detail
    assert why.replace("FOLDER", str(folder)) in answer.detail
    warnings = [record.getMessage() for record in caplog.records if "unknown to the model" in record.getMessage()]
    # One of the update, and one of the start that it is compared with.
    assert len(warnings) == (2 if kind == "unused tensors" else 0)
    for line in warnings:
        assert line.startswith("5 tensors of the checkpoint are unknown to the model and ignored")
        assert "v_head.summary.weight" in line and "model.layers.*.self_attn.rotary_emb.cos_cached" in line


def test_a_head_of_its_own_needs_memory_of_its_own(family_of: Callable[[str], Family]) -> None:
    """A packed head has it; where head and embedding are one tensor, the folder is refused by the head's name."""
    family = family_of("gemma3_text")
    folder = with_tensors(family.changed(), {HEAD: DRAWN})
    assert law(family.old, folder, packs=True).ok
    for dtype in (torch.float32, torch.float16):
        answer = law(family.old, folder, packs=False, dtype=dtype)
        assert f"lm_head.weight differs from {EMBEDDING}, and the served model has one tensor for both" in answer.detail


def test_files_that_the_folder_lacks_are_the_served_ones(family_of: Callable[[str], Family]) -> None:
    family = family_of("llama")
    folder = without(family.changed(), "config.json", OPTIONS_FILE, "tokenizer.json", "tokenizer_config.json")
    model, files = start(family.old)
    assert update(model, files, folder).ok
    assert torch.equal(logits(model), logits(start(family.new)[0]))
