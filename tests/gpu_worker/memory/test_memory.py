"""Free memory and a model's memory: control groups, growth, weights and activations of meta models."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen3Config,
)

from gpu_worker.attention.kv_cache import KvCache
from gpu_worker.checkpoint.linear import can_pack
from gpu_worker.checkpoint.loading import prepare, weight_bytes
from gpu_worker.compatibility.check_model import check_model, meta_model_of
from gpu_worker.holder import default_limit
from gpu_worker.memory.costs import LiveBytes, activation_bytes, estimate, meta_weight_bytes
from gpu_worker.memory.device_memory import free_bytes, free_host_bytes, resident_growth

CPU = torch.device("cpu")
MIB = 1 << 20


def config_of(*, tied: bool = False, family: type[PreTrainedConfig] = LlamaConfig) -> PreTrainedConfig:
    return family(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
        tie_word_embeddings=tied,
    )


def machine(tmp_path: Path, *, available_mib: int, groups: str) -> tuple[Path, Path]:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available_mib << 10} kB\n")
    (proc / "self" / "cgroup").write_text(groups)
    return proc, cgroups


def group(folder: Path, *, limit: str, used_mib: int, inactive_mib: int, old: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if old
        else ("memory.max", "memory.current", "inactive_file")
    )
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used_mib * MIB}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {inactive_mib * MIB}\n")


def test_without_control_groups_the_machine_limits_memory(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, available_mib=700, groups="0::/\n")
    assert free_host_bytes(proc, cgroups) == 700 * MIB


def test_every_control_group_of_the_process_limits_memory(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, available_mib=700, groups="0::/user/worker\n")
    group(cgroups / "user" / "worker", limit="max", used_mib=10, inactive_mib=0)
    assert free_host_bytes(proc, cgroups) == 700 * MIB
    group(cgroups / "user", limit=str(500 * MIB), used_mib=150, inactive_mib=50)
    assert free_host_bytes(proc, cgroups) == 400 * MIB
    group(cgroups / "user" / "worker", limit=str(90 * MIB), used_mib=100, inactive_mib=0)
    assert free_host_bytes(proc, cgroups) == 0


def test_a_group_that_the_kernel_slows_down_has_no_more(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, available_mib=700, groups="0::/slice/worker\n")
    for inner, outer, left in (("max", "max", 300), (str(200 * MIB), "max", 100), ("max", str(350 * MIB), 250)):
        group(cgroups / "slice", limit="max", used_mib=100, inactive_mib=0)
        group(cgroups / "slice" / "worker", limit=str(400 * MIB), used_mib=100, inactive_mib=0)
        (cgroups / "slice" / "worker" / "memory.high").write_text(f"{inner}\n")
        (cgroups / "slice" / "memory.high").write_text(f"{outer}\n")
        assert free_host_bytes(proc, cgroups) == left * MIB


def test_a_holder_keeps_its_share_of_what_its_group_may_have(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, available_mib=700, groups="0::/user/holder\n")
    of_machine = default_limit(proc, cgroups)
    group(cgroups / "user", limit=str(500 * MIB), used_mib=150, inactive_mib=50)
    group(cgroups / "user" / "holder", limit="max", used_mib=10, inactive_mib=0)
    assert default_limit(proc, cgroups) == 400 * MIB < of_machine
    old, groups = machine(tmp_path / "old", available_mib=700, groups="3:memory:/a\n")
    group(groups / "memory" / "a", limit="9223372036854771712", used_mib=1, inactive_mib=0, old=True)
    assert default_limit(old, groups) == of_machine


def test_in_a_cgroup_namespace_the_limit_of_the_mount_point_is_read(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, available_mib=700, groups="0::/docker/abc\n")
    group(cgroups, limit=str(300 * MIB), used_mib=100, inactive_mib=0)
    assert free_host_bytes(proc, cgroups) == 200 * MIB


def test_version_1_control_groups_limit_memory(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, available_mib=700, groups="4:cpu,cpuacct:/x\n3:memory:/docker/abc\n")
    group(cgroups / "memory" / "docker" / "abc", limit=str(300 * MIB), used_mib=100, inactive_mib=10, old=True)
    # The value that means "no limit" there.
    group(cgroups / "memory", limit="9223372036854771712", used_mib=1, inactive_mib=0, old=True)
    assert free_host_bytes(proc, cgroups) == 210 * MIB


def test_free_memory_of_this_machine_is_positive(device: torch.device) -> None:
    assert MIB < free_bytes(device) < 1 << 50


def test_growth_is_measured_at_the_peak(device: torch.device) -> None:
    with resident_growth(device) as grown:
        large = torch.ones(64 * MIB, dtype=torch.uint8, device=device)
        del large
    if device.type == "cpu" and not grown:
        pytest.skip("this system does not tell")
    assert 60 * MIB <= grown[0] <= 100 * MIB


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_meta_model_has_the_weight_bytes_of_the_model(tied: bool, dtype: torch.dtype) -> None:
    config = config_of(tied=tied)
    packs = can_pack(CPU, dtype)
    expected = meta_weight_bytes(meta_model_of(config, dtype=dtype), packs=packs)
    model = prepare(AutoModelForCausalLM.from_config(config, dtype=dtype), device=CPU, dtype=dtype)
    assert weight_bytes(model) == expected


def test_live_bytes_count_tensors_alive_at_once() -> None:
    for place in ("cpu", "meta"):
        with LiveBytes() as counted:
            first = torch.zeros(1000, device=place)
            second = first + 1
            # Views and in-place operations allocate no memory.
            second.view(10, 100).add_(1)
            del first
            third = second * 2
            del second
            _ = third[:10]
        assert (counted.peak, counted.live) == (8000, 4000), place
    del third


@pytest.mark.parametrize("family", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_of_the_meta_model_match_the_model(family: type[PreTrainedConfig], dtype: torch.dtype) -> None:
    """The real model, with another attention, needs at most this and at least half of it."""
    config = config_of(family=family)
    meta_model = meta_model_of(config, dtype=dtype)
    per_token = activation_bytes(meta_model, check_model(meta_model), dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    for num_tokens in (64, 512):
        ids = torch.zeros(1, num_tokens, dtype=torch.int64)
        with torch.inference_mode(), LiveBytes() as counted:
            model.base_model(input_ids=ids, position_ids=ids, use_cache=False)
        assert num_tokens * per_token / 2 <= counted.peak <= num_tokens * per_token


def test_an_estimate_has_the_layers_and_the_smaller_dtype() -> None:
    meta_model = meta_model_of(config_of(), dtype=torch.float32)
    costs = estimate(meta_model, check_model(meta_model), dtype=torch.float32, packs=False)
    # K and V of 3 layers, 2 heads of 16, four bytes.
    assert (costs.kv_per_token, costs.learned_sinks_per_token) == (2 * 3 * 2 * 16 * 4, 0)
    assert costs.smaller_weights == ("bfloat16", costs.weights // 2)
    assert (costs.dtype, costs.vocab_size, costs.length_limit) == ("float32", 128, 2048)
    half = meta_model_of(config_of(), dtype=torch.bfloat16)
    assert estimate(half, check_model(half), dtype=torch.bfloat16, packs=False).smaller_weights is None


WIDE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
LLAMA_3_2_1B = LlamaConfig(
    **WIDE,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=128_256,
    max_position_embeddings=131_072,
    tie_word_embeddings=True,
)
OLMO_2_1B = Olmo2Config(
    **WIDE, num_attention_heads=16, num_key_value_heads=16, vocab_size=100_352, max_position_embeddings=4096
)
WITH_SINKS = GptOssConfig(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=40,
    vocab_size=128,
    num_local_experts=2,
    num_experts_per_tok=1,
)


@pytest.mark.parametrize(
    ("config", "kv_per_token", "page_size", "addressable"),
    [(LLAMA_3_2_1B, 32_768, 128, 32_767), (OLMO_2_1B, 131_072, 128, 8191), (WITH_SINKS, 768, 16, 1_398_100)],
)
def test_addressable_pages_match_the_allocated_pool(
    config: PreTrainedConfig, kv_per_token: int, page_size: int, addressable: int
) -> None:
    """Real shapes, without data: with one page more, K of some layer would have 2^31 elements."""
    meta_model = meta_model_of(config, dtype=torch.bfloat16)
    layers = check_model(meta_model)
    costs = estimate(meta_model, layers, dtype=torch.bfloat16, packs=False)
    assert (costs.kv_per_token, costs.addressable_pages(page_size)) == (kv_per_token, addressable)

    def largest(num_pages: int) -> int:
        meta = torch.device("meta")
        cache = KvCache(layers, num_pages=num_pages, page_size=page_size, dtype=torch.bfloat16, device=meta)
        return max(pool.numel() for pool in (*cache.keys, *cache.values))

    assert largest(addressable) < 1 << 31 <= largest(addressable + 1)
