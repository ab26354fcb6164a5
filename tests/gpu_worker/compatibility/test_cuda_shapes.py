"""Shapes that do not compile for CUDA are refused by name, without a device or Triton."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from gpu_worker import startup
from gpu_worker.attention.layers import AttentionKind
from gpu_worker.checkpoint.files import ModelRefused
from gpu_worker.compatibility.check_model import check_cuda_shapes
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup import start
from tests.gpu_worker.attention.small_layers import layers_of
from tests.gpu_worker.saved_model import save_model

PLAIN = AttentionKind(num_heads=32, num_kv_heads=8, key_dim=128, value_dim=128, scale=1.0)


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        ({}, torch.bfloat16),
        ({}, torch.float32),
        ({"num_heads": 127, "num_kv_heads": 1}, torch.bfloat16),
        ({"num_heads": 64, "num_kv_heads": 1}, torch.float32),
        ({"key_dim": 512, "value_dim": 512}, torch.float16),
        ({"key_dim": 256, "value_dim": 192}, torch.float32),
    ],
)
def test_shapes_that_compile_pass(change: dict[str, int], dtype: torch.dtype) -> None:
    check_cuda_shapes(layers_of(PLAIN, replace(PLAIN, **change)), dtype)


@pytest.mark.parametrize(
    ("change", "dtype", "problem"),
    [
        (
            {"num_heads": 128, "num_kv_heads": 1},
            torch.bfloat16,
            "layers.1.self_attn has 128 query heads per KV head; the decode kernel for CUDA takes at most 127 of 128 "
            "dimensions in bfloat16; device cpu has no such limit",
        ),
        (
            {"num_heads": 71, "num_kv_heads": 1},
            torch.float32,
            "layers.1.self_attn has 71 query heads per KV head; the decode kernel for CUDA takes at most 64 of 128 "
            "dimensions in float32; device cpu has no such limit",
        ),
        (
            {"num_heads": 65, "num_kv_heads": 1, "key_dim": 512},
            torch.float16,
            "layers.1.self_attn has 65 query heads per KV head; the decode kernel for CUDA takes at most 64 of 512 "
            "dimensions in float16; device cpu has no such limit",
        ),
        (
            {"key_dim": 257, "value_dim": 64},
            torch.float32,
            "layers.1.self_attn has heads of 272 dimensions; the decode kernel for CUDA takes at most 256 in float32; "
            "dtype bfloat16 or device cpu has no such limit",
        ),
    ],
)
def test_shapes_that_do_not_compile_are_refused_by_name(
    change: dict[str, int], dtype: torch.dtype, problem: str
) -> None:
    with pytest.raises(ModelRefused) as refused:
        check_cuda_shapes(layers_of(PLAIN, replace(PLAIN, **change)), dtype)
    assert str(refused.value) == problem


@pytest.mark.usefixtures("threads_stay")
def test_a_start_on_cuda_refuses_such_shapes_before_loading_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path, hidden_size=128, num_attention_heads=128, num_key_value_heads=1)
    card = mock.Mock(spec=torch.device, type="cuda")
    load = mock.Mock()
    monkeypatch.setattr(startup, "choose_device", lambda _: card)
    monkeypatch.setattr(startup, "can_pack", lambda *_: False)
    monkeypatch.setattr(startup, "load_weights", load)
    with pytest.raises(ModelRefused, match=r"model\.layers\.0\.self_attn has 128 query heads per KV head"):
        start(WorkerSettings(model=str(folder), device="cuda"), folder)
    load.assert_not_called()
