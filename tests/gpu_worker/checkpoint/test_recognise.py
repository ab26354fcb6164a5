"""The content of a folder without a model: its kind and the remedy, in the same words at every door."""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gpu_worker.__main__ import find_model
from gpu_worker.checkpoint.files import read_config, read_files, warn_of
from gpu_worker.checkpoint.folder import ModelRefused, check_folder, locate, opened_weights
from gpu_worker.checkpoint.loading import load_plain
from gpu_worker.checkpoint.recognise import Kind, of_config, recognise
from gpu_worker.memory.model_facts import examine
from tests.architecture.source import ROOT
from tests.gpu_worker.saved_model import changed

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n"
LLAMA = json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
NOBODY = 65534
# Files of a folder, by name; each folder's kind, and the sign in its sentence.
FOLDERS: dict[str, tuple[dict[str, str], Kind, str]] = {
    "empty": ({}, Kind.EMPTY, "is empty"),
    "gguf": ({"qwen3-0.6b.Q4_K_M.gguf": "GGUF", "README.md": ""}, Kind.GGUF, "holds GGUF (qwen3-0.6b.Q4_K_M.gguf)"),
    "gguf beside config": ({"m.gguf": "GGUF", "config.json": LLAMA}, Kind.GGUF, "holds GGUF (m.gguf)"),
    "a name of two lines": ({"a\nb.gguf": "GGUF"}, Kind.GGUF, "holds GGUF (a b.gguf), the format"),
    "lora": (
        {"adapter_config.json": '{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}', "adapter_model.safetensors": ""},
        Kind.ADAPTER,
        "an adapter (LoRA, PEFT) for Qwen/Qwen3-0.6B (adapter_config.json), which",
    ),
    "lora without its base": ({"adapter_model.bin": ""}, Kind.ADAPTER, "(LoRA, PEFT) (adapter_model.bin), which"),
    "diffusion": ({"model_index.json": "{}", "unet/config.json": "{}"}, Kind.DIFFUSION, "pipeline (model_index.json)"),
    "onnx": ({"config.json": LLAMA, "onnx/model.onnx": ""}, Kind.EXPORT, "another runtime (onnx)"),
    "tensorrt": ({"config.json": LLAMA, "rank0.engine": ""}, Kind.EXPORT, "another runtime (rank0.engine)"),
    "core ml": ({"m.mlpackage/Manifest.json": "{}"}, Kind.EXPORT, "another runtime (m.mlpackage)"),
    "mlx of old": ({"config.json": LLAMA, "weights.npz": ""}, Kind.EXPORT, "another runtime (weights.npz)"),
    "flax": ({"config.json": LLAMA, "flax_model.msgpack": ""}, Kind.EXPORT, "another runtime (flax_model.msgpack)"),
    "pickled": (
        {"config.json": LLAMA, "training_args.bin": "", "pytorch_model-00001-of-00002.bin": ""},
        Kind.PICKLED,
        "has pytorch_model-00001-of-00002.bin and no safetensors; pickled weights can run code",
    ),
    "pth": ({"config.json": LLAMA, "model.pth": ""}, Kind.PICKLED, "has model.pth and no safetensors"),
    "meta": ({"consolidated.00.pth": "", "params.json": "{}"}, Kind.ORIGINAL, "own format (consolidated.00.pth)"),
    "mistral": ({"consolidated.safetensors": ""}, Kind.ORIGINAL, "own format (consolidated.safetensors)"),
    "fsdp": ({"config.json": LLAMA, "__0_0.distcp": ""}, Kind.SHARDED, "of its ranks (__0_0.distcp)"),
    "deepspeed": ({"config.json": LLAMA, "global_step9/x.pt": ""}, Kind.SHARDED, "of its ranks (global_step9)"),
    "renamed": ({"config.json": LLAMA, "llama.safetensors": ""}, Kind.RENAMED, "has llama.safetensors, but neither"),
    "no weights": ({"config.json": LLAMA}, Kind.NO_WEIGHTS, "has no weights: no model.safetensors and no"),
    "no model": ({"notes.txt": "", "src/main.py": ""}, Kind.NO_MODEL, "has neither config.json nor model.safetensors"),
    "no config": ({"model.safetensors": "", "tokenizer.json": "{}"}, Kind.NO_CONFIG, "(model.safetensors) and no conf"),
    "no config of shards": ({"model.safetensors.index.json": "{}"}, Kind.NO_CONFIG, "no config.json"),
    "a pointer of weights": ({"config.json": LLAMA, "model.safetensors": POINTER}, Kind.POINTER, "has model.safet"),
    "a pointer of config": ({"config.json": POINTER, "model.safetensors": ""}, Kind.POINTER, "has config.json, a Git"),
    "a pointer of the tokenizer": (
        {"config.json": LLAMA, "model.safetensors": "", "tokenizer.json": POINTER},
        Kind.POINTER,
        "has tokenizer.json, a Git LFS pointer and not the file itself; git lfs pull fetches it",
    ),
    "sentence-transformers": (
        {"config.json": LLAMA, "model.safetensors": "", "modules.json": "[]"},
        Kind.EMBEDDING,
        "embedding model (modules.json of sentence-transformers)",
    ),
    "folders": (
        {"a/config.json": LLAMA, "b/config.json": LLAMA, "notes/x": ""},
        Kind.FOLDERS,
        "folders of models: a, b; give one",
    ),
    "checkpoints": ({f"checkpoint-{n}/config.json": LLAMA for n in range(6)}, Kind.FOLDERS, "checkpoint-3 and 2 more"),
    "the hub's cache": ({"models--Qwen--Qwen3-0.6B/refs/main": "a"}, Kind.FOLDERS, "models--Qwen--Qwen3-0.6B; give"),
    "snapshots": (
        {"snapshots/a1/config.json": LLAMA, "snapshots/b2/config.json": LLAMA, "refs/main": "b2"},
        Kind.SNAPSHOTS,
        "with the snapshots snapshots/b2, snapshots/a1; give one of them",
    ),
}
# Fields of config.json beside weights.
CONFIGS: dict[str, tuple[dict[str, Any], Kind, str]] = {
    "gptq": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, Kind.QUANTISED, "with gptq (quant"),
    "awq": ({"quantization_config": {"quant_method": "awq"}}, Kind.QUANTISED, "with awq (quantization_config in conf"),
    "fp8 of a part": ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, Kind.QUANTISED, "with fp8 ("),
    "bitsandbytes": ({"quantization_config": {"quant_method": "bitsandbytes"}}, Kind.QUANTISED, "with bitsandbytes"),
    "compressed": ({"quantization_config": {"quant_method": "compressed-tensors"}}, Kind.QUANTISED, "compressed-ten"),
    "unnamed": ({"quantization_config": {"bits": 4}}, Kind.QUANTISED, "quantised with an unnamed method"),
    "mlx": ({"quantization": {"group_size": 64, "bits": 4}}, Kind.QUANTISED, "quantised with MLX (quantization in"),
    "unet": (
        {"_class_name": "UNet2D", "_diffusers_version": "0.3"},
        Kind.DIFFUSION,
        "pipeline (UNet2D in config.json)",
    ),
    "classifier": ({"architectures": ["Qwen3ForSequenceClassification"]}, Kind.CLASSIFIER, "(Qwen3ForSequenceClassif"),
    "tagger": ({"architectures": ["BertForTokenClassification"]}, Kind.CLASSIFIER, "(BertForTokenClassification)"),
    "answers": ({"architectures": ["BertForQuestionAnswering"]}, Kind.CLASSIFIER, "(BertForQuestionAnswering)"),
    "reward": ({"architectures": ["Qwen2ForRewardModel"]}, Kind.CLASSIFIER, "(Qwen2ForRewardModel)"),
    "bert": ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, Kind.EMBEDDING, "model (BertForMaskedLM)"),
}
# Classes of Transformers, as its config classes describe them: model type, class, the kind, the sign.
CLASSES = [
    ("t5", "T5ForConditionalGeneration", Kind.ENCODER_DECODER, "encoder-decoder model (T5ForConditionalGeneration)"),
    ("whisper", "WhisperForConditionalGeneration", Kind.ENCODER_DECODER, "model (WhisperForConditionalGeneration)"),
    ("bart", "BartForConditionalGeneration", Kind.ENCODER_DECODER, "model (BartForConditionalGeneration)"),
    ("qwen2_vl", "Qwen2VLForConditionalGeneration", Kind.MULTIMODAL, "Qwen2VLForConditionalGeneration, vision_config"),
    ("llava", "LlavaForConditionalGeneration", Kind.MULTIMODAL, "(LlavaForConditionalGeneration, vision_config in co"),
    ("clip", "CLIPModel", Kind.MULTIMODAL, "model of images or sound (CLIPModel, vision_config in config.json)"),
    ("vit", "ViTModel", Kind.MULTIMODAL, "model of images or sound (ViTModel, image_size in config.json)"),
    ("wav2vec2", "Wav2Vec2ForCTC", Kind.NO_TEXT, "model that generates no text (Wav2Vec2ForCTC, wav2vec2 in config"),
    ("modernbert", "ModernBertModel", Kind.NO_TEXT, "that generates no text (ModernBertModel, modernbert in config"),
    ("bert", "BertModel", Kind.EMBEDDING, "embedding model (BertModel: attention is neither causal nor a sliding wi"),
    ("mamba", "MambaForCausalLM", Kind.STATE_SPACE, "(mamba in config.json: MambaForCausalLM does not support"),
    ("mamba2", "Mamba2ForCausalLM", Kind.STATE_SPACE, "(mamba2 in config.json: Mamba2ForCausalLM does not support"),
    ("rwkv", "RwkvForCausalLM", Kind.STATE_SPACE, "(rwkv in config.json: RwkvForCausalLM does not support"),
    ("jamba", "JambaForCausalLM", Kind.STATE_SPACE, "mamba_"),
    ("bamba", "BambaForCausalLM", Kind.STATE_SPACE, "(mamba_"),
    ("falcon_h1", "FalconH1ForCausalLM", Kind.STATE_SPACE, "(mamba_"),
    ("lfm2", "Lfm2ForCausalLM", Kind.STATE_SPACE, "(conv_L_cache in config.json: layers keep their past outside"),
    ("qwen3_next", "Qwen3NextForCausalLM", Kind.STATE_SPACE, "(linear_conv_kernel_dim in config.json: Qwen3NextForCau"),
]  # fmt: skip


def make(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def refusal(do: Callable[[], object]) -> str:
    with pytest.raises(ModelRefused) as refused:
        do()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def at_the_update(folder: Path) -> None:
    with opened_weights(str(folder), [str(folder.parent)]) as view:
        read_files(view)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_holds_something_else_is_named_with_what_would_work(name: str, tmp_path: Path) -> None:
    files, kind, sign = FOLDERS[name]
    folder = make(tmp_path / "m", files)
    found = recognise(folder)
    assert found is not None
    assert found.kind is kind
    sentence = found.sentence(folder)
    assert sentence.startswith(f"{folder} ") and sign in sentence and sentence.endswith(f"; {kind.value[1]}")
    assert refusal(lambda: find_model(str(folder))) == sentence
    # An order to load weights takes what the folder lacks from the served model; weights are what it may not lack.
    if kind not in (Kind.NO_CONFIG, Kind.EMBEDDING):
        assert refusal(lambda: at_the_update(folder)) == sentence


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_something_else_is_named_at_every_door(name: str, saved: Path, tmp_path: Path) -> None:
    fields, kind, sign = CONFIGS[name]
    folder = changed(saved, tmp_path / "m", **fields)
    found = recognise(folder)
    assert found is not None
    assert found.kind is kind
    sentence, remedy = found.sentence(folder), f"; {kind.value[1]}"
    assert sentence.startswith(f"{folder} ") and sentence.endswith(remedy)
    assert sign in sentence.removeprefix(str(folder)).removesuffix(remedy)
    assert refusal(lambda: find_model(str(folder))) == refusal(lambda: read_files(folder)) == sentence
    with opened_weights(str(folder), [str(tmp_path)]) as view:
        assert refusal(lambda: read_files(view)) == sentence.replace(str(folder), str(view))


@pytest.mark.parametrize(("model_type", "name", "kind", "sign"), CLASSES)
def test_classes_of_transformers_are_named_by_their_configs(
    model_type: str, name: str, kind: Kind, sign: str, tmp_path: Path
) -> None:
    config: PreTrainedConfig = CONFIG_MAPPING[model_type]()
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    found = refusal(lambda: examine(read_config(tmp_path), dtype=torch.float32, packs=False))
    text, remedy = kind.value
    before, after = text.split("{}")
    assert before in found
    assert sign in found
    assert found.endswith(f"{after}; {remedy}")


def test_no_class_that_is_served_is_taken_for_something_else() -> None:
    """The classes that the README lists as served, with the config that each has by default."""
    table = (ROOT / "gpu_worker/README.md").read_text()
    served = [
        name for row in re.findall(r"^\| served: .*\| \d+ \| (.*) \|$", table, re.MULTILINE) for name in row.split(", ")
    ]
    assert len(served) > 80
    known = [name for name in served if name in CONFIG_MAPPING and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    assert len(known) > 70
    for name in known:
        config: PreTrainedConfig = CONFIG_MAPPING[name]()
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]]
        assert of_config(config.to_diff_dict()) is None, name


def test_weights_without_a_head_are_those_of_an_embedding_model(saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = changed(saved, tmp_path / "m", architectures=["LlamaModel"])
    tensors = load_file(folder / "model.safetensors")
    kept = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    found = refusal(lambda: load_plain(read_files(folder), dtype=torch.float32))
    assert "encoder or embedding model (LlamaModel: 1 tensor (lm_head.weight) is missing" in found
    assert found.endswith(Kind.EMBEDDING.value[1])


def test_a_model_whose_text_alone_is_served_says_so(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = read_files(changed(saved, tmp_path / "m", image_token_id=7))
    warn_of(files)
    assert "is also for images or sound (image_token_id in config.json): its text alone is served" in caplog.text


def test_the_only_snapshot_of_the_hubs_cache_is_served(saved: Path, tmp_path: Path) -> None:
    cached = tmp_path / "models--a--b"
    (cached / "snapshots").mkdir(parents=True)
    snapshot = changed(saved, cached / "snapshots" / "0123abcd")
    for name in (cached, cached / "snapshots", snapshot):
        assert locate(str(name)) == snapshot
        check_folder(locate(str(name)))
    # An order to load weights is recorded and done again at a restart, so it names its snapshot.
    assert refusal(lambda: at_the_update(cached)).startswith(f"{cached} is a model's folder in the hub's cache, with")
    # Another one, with which the choice would be the program's.
    changed(saved, cached / "snapshots" / "89ef")
    assert "snapshots/0123abcd, snapshots/89ef; give one of them" in refusal(lambda: check_folder(locate(str(cached))))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("{0}/m.gguf", "model {0}/m.gguf holds GGUF (m.gguf), the format of llama.cpp, which is not read; give the"),
        ("{0}/config.json", "model {0}/config.json is a file; give its folder {0}"),
        ("{0}/model.safetensors", "model {0}/model.safetensors is a file; give its folder {0}"),
        (__file__, f"model {__file__} is a file; give the folder with config.json and safetensors"),
        ("{0}/none", "model folder {0}/none does not exist; model is a folder or a hub name"),
        ("./model", "model folder ./model does not exist"),
        *(
            (address, f"model {address} is an address; give the hub name Qwen/Qwen3-0.6B, or the folder of a download")
            for address in ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "hf://Qwen/Qwen3-0.6B")
        ),
        ("~nobody-of-this-name/m", "model ~nobody-of-this-name/m: Could not"),
        (
            "models/llama/7b",
            "model models/llama/7b is neither a local folder nor reachable on the hub: a hub name has the form name or "
            "owner/name; check the spelling, or download it and give",
        ),
    ],
)
def test_what_is_no_folder_is_refused_with_what_would_work(name: str, problem: str, tmp_path: Path) -> None:
    make(tmp_path, {"m.gguf": "GGUF", "config.json": LLAMA, "model.safetensors": ""})
    assert refusal(lambda: locate(name.format(tmp_path))).startswith(problem.format(tmp_path))


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, if the tests have them."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("closed", [".", "model.safetensors", "config.json", "tokenizer.json"])
def test_what_may_not_be_read_is_refused_with_its_path(closed: str, folder: Path) -> None:
    outside = [parent for parent in folder.parents if parent != Path("/")]
    modes = {path: path.stat().st_mode for path in outside}
    try:
        for path in outside:
            path.chmod(path.stat().st_mode | 0o055)
        folder.chmod(0o755)
        for path in folder.iterdir():
            path.chmod(0o644)
        (folder / closed).chmod(0)
        with as_nobody():
            found = refusal(lambda: find_model(str(folder)))
    finally:
        folder.chmod(0o700)
        for path, mode in modes.items():
            path.chmod(mode)
    path = folder if closed == "." else folder / closed
    assert found == f"{path}: permission denied; it must be readable by the user that runs the worker"
