"""Weights load completely, from one file or shards, with progress; a contradictory checkpoint is refused."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from gpu_worker.attention.paged import ATTENTION_NAME
from gpu_worker.checkpoint import loading
from gpu_worker.checkpoint.files import ModelRefused, read_files
from gpu_worker.checkpoint.loading import Progress, load_weights, weight_bytes
from tests.census.shrink import tiny_config
from tests.gpu_worker.saved_model import changed, save_model, with_tensors

CPU = torch.device("cpu")
HEAD, NORM = "lm_head.weight", "model.norm.weight"


def save_mixtral(folder: Path, *, num_experts: int) -> None:
    config = tiny_config(MixtralConfig, {"num_hidden_layers": 1, "num_local_experts": num_experts})
    MixtralForCausalLM(config).save_pretrained(folder)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every call."""
    found: list[int] = []
    monkeypatch.setattr(Progress, "add", lambda _, num_bytes: found.append(num_bytes))
    return found


def test_weights_load_with_paged_attention(saved: Path) -> None:
    model = load_weights(read_files(saved), device=CPU, dtype=torch.bfloat16)
    assert model.config._attn_implementation == ATTENTION_NAME
    assert model.get_input_embeddings().weight.dtype is torch.bfloat16
    assert not model.training


def test_a_version_without_the_hook_of_progress_bars_loads_too(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(loading.transformers_logging, "set_tqdm_hook")
    assert load_weights(read_files(saved), device=CPU, dtype=torch.float32).get_parameter(NORM).isfinite().all()


def test_the_ledger_counts_packed_weights(saved: Path) -> None:
    model = load_weights(read_files(saved), device=CPU, dtype=torch.float32)
    # Embedding and head of 40 × 32; q and o of 32 × 32, k and v of 32 × 16; three of 32 × 48; three norms of 32.
    assert weight_bytes(model) == 4 * (2 * 1280 + 2 * 1024 + 2 * 512 + 3 * 1536 + 3 * 32)


def test_shards_load_the_same_model_and_count_every_byte(saved: Path, sharded: Path, added: list[int]) -> None:
    wanted = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16).state_dict()
    files = read_files(sharded)
    for name, tensor in load_weights(files, device=CPU, dtype=torch.bfloat16).state_dict().items():
        assert torch.equal(tensor, wanted[name])
    assert sorted(added) == sorted(files.weights.tensor_bytes.values())


def test_merged_experts_are_counted(tmp_path: Path, added: list[int]) -> None:
    save_mixtral(tmp_path, num_experts=4)
    files = read_files(tmp_path)
    load_weights(files, device=CPU, dtype=torch.bfloat16)
    assert 0.99 * files.weights.num_bytes < sum(added) <= files.weights.num_bytes


def test_a_tied_head_may_be_missing(tmp_path: Path) -> None:
    folder = save_model(tmp_path, tie_word_embeddings=True)
    assert HEAD not in read_files(folder).weights.tensor_bytes
    model = load_weights(read_files(folder), device=CPU, dtype=torch.bfloat16)
    # A CPU packs the head as a copy.
    assert torch.equal(model.lm_head.weight, model.get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (
            {HEAD: None},
            r"^1 tensor \(lm_head.weight\) is missing from the checkpoint; checkpoint and config",
        ),
        (
            {f"model.layers.0.mlp.{name}_proj.weight": None for name in ("up", "down", "gate")} | {NORM: None},
            r"^4 tensors \(model.layers.0.mlp.down_proj.weight, .*, …\) are missing from the checkpoint",
        ),
        (
            {NORM: torch.zeros(16)},
            r"^1 tensor \(model.norm.weight\) is of another shape than in config.json: "
            r"model.norm.weight is \[16\], expected \[32\]; checkpoint and",
        ),
    ],
)
def test_a_checkpoint_that_contradicts_the_config_is_refused(
    saved: Path, tmp_path: Path, tensors: dict[str, Tensor | None], problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelRefused, match=problem):
        load_weights(read_files(with_tensors(changed(saved, tmp_path / "m"), tensors)), device=CPU, dtype=torch.float32)
    # Transformers' own report would precede the cause, in colours.
    assert "REPORT" not in capfd.readouterr().err


def test_tensors_that_the_model_does_not_have_are_named_in_one_warning_and_ignored(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unused = {
        # A value head, tables of other versions, a buffer of a type that no weight has.
        "v_head.summary.weight": torch.zeros(1, 32),
        "model.layers.0.self_attn.rotary_emb.cos_cached": torch.zeros(4, dtype=torch.int64),
        "model.layers.1.self_attn.rotary_emb.cos_cached": torch.zeros(4),
        "model.layers.0.attention.bias": torch.ones(2, 2, dtype=torch.bool),
    }
    expected = load_weights(read_files(saved), device=CPU, dtype=torch.float32)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    model = load_weights(
        read_files(with_tensors(changed(saved, tmp_path / "m"), unused)), device=CPU, dtype=torch.float32
    )
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line == (
        "4 tensors of the checkpoint are unknown to the model and ignored, as Transformers does: "
        "model.layers.*.attention.bias, model.layers.*.self_attn.rotary_emb.cos_cached, v_head.summary.weight"
    )
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn])
def test_a_weight_that_is_no_plain_number_is_refused(saved: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = with_tensors(changed(saved, tmp_path / "m"), {NORM: torch.ones(32).to(dtype)})
    with pytest.raises(
        ModelRefused, match=r"model.norm.weight in .* has dtype \w+; a weight is one of F64, F32, F16, BF16"
    ):
        load_weights(read_files(folder), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("part", ["experts.1.w1.weight", "experts.0.w2.weight", "gate.weight"])
def test_a_weight_that_is_converted_may_be_no_other_number_either(
    tmp_path: Path, dtype: torch.dtype, part: str
) -> None:
    save_mixtral(tmp_path, num_experts=2)
    weights = load_file(tmp_path / "model.safetensors")
    [name] = [name for name in weights if name.endswith(part)]
    scale = name.replace(".weight", ".weight_scale")
    with_tensors(tmp_path, {scale: torch.ones(1), name: weights[name].to(dtype)})
    with pytest.raises(ModelRefused, match=rf"{name} in .* has dtype \w+; a weight is one of F64, F32, F16, BF16"):
        load_weights(read_files(tmp_path), device=CPU, dtype=torch.float32)


def test_experts_of_other_shapes_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_mixtral(tmp_path, num_experts=2)
    name = next(name for name in load_file(tmp_path / "model.safetensors") if "experts.1.w1" in name)
    with_tensors(tmp_path, {name: torch.zeros(47, 32)})
    with pytest.raises(ModelRefused, match="cannot be converted for mixtral; checkpoint and config"):
        load_weights(read_files(tmp_path), device=CPU, dtype=torch.float32)
    assert "CONVERSION" in caplog.text
