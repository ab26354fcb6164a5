"""The layers that a meta model shows, and the wording of refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gpu_worker.attention.layers import AttentionKind, AttentionPattern
from gpu_worker.checkpoint.files import ModelRefused
from gpu_worker.compatibility.check_model import check_model, meta_model_of
from gpu_worker.memory.model_facts import examine
from tests.census.hints import HINTS
from tests.census.shrink import HEAD_DIM, ODD_HEAD_DIM, tiny_config


def tiny(model_type: str, **settings: Any) -> PreTrainedConfig:
    return tiny_config(CONFIG_MAPPING[model_type], HINTS.get(model_type, {}) | settings)


def kinds_of(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> list[AttentionKind]:
    return [layer.kind for layer in check_model(meta_model_of(config, dtype=dtype)).layers]


def test_a_model_of_real_size_is_checked_without_its_memory() -> None:
    """117 billion parameters."""
    layers = check_model(meta_model_of(GptOssConfig(), dtype=torch.bfloat16)).layers
    full = AttentionKind(
        num_heads=64,
        num_kv_heads=8,
        key_dim=64,
        value_dim=64,
        scale=0.125,
        pattern=AttentionPattern(has_learned_sinks=True),
    )
    sliding = replace(full, pattern=AttentionPattern(window=128, has_learned_sinks=True))
    assert [layer.kind for layer in layers] == [sliding, full] * 18
    assert [layer.name for layer in layers[:2]] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def test_softcap_and_scale_are_read_from_the_model() -> None:
    config = tiny_config(Gemma2Config, {"query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0})
    first, second = kinds_of(config)
    assert (first.softcap, first.scale, first.pattern.window) == (2.0, 10**-0.5, 21)
    assert (second.softcap, second.scale, second.pattern.window) == (2.0, 10**-0.5, None)


def test_latent_attention_has_different_key_and_value_dimensions() -> None:
    config = tiny_config(DeepseekV3Config, {"v_head_dim": 24, "num_hidden_layers": 2})
    kind, _ = kinds_of(config)
    assert (kind.key_dim, kind.value_dim, kind.head_dim) == (HEAD_DIM + ODD_HEAD_DIM, 24, 48)


def test_eager_attention_that_does_not_run_is_refused_before_loading() -> None:
    """Only eager attention reads the KV heads of latent attention, so the self-check of a loaded model would fail."""
    config = tiny_config(DeepseekV3Config, {"num_hidden_layers": 2, "num_key_value_heads": 8})
    with pytest.raises(ModelRefused, match=r"own eager attention does not run: .*modeling_deepseek_v3\.py, line"):
        examine(config, dtype=torch.float32, packs=False)


def test_a_padding_token_changes_nothing() -> None:
    """Transformers looks for it in the tokens of a step, to warn of it."""
    plain, padded = (examine(tiny("gpt2", pad_token_id=token), dtype=torch.float32, packs=False) for token in (None, 3))
    assert plain == padded


def test_a_missing_kernel_named_in_the_config_is_ignored() -> None:
    config = tiny("llama")
    config._attn_implementation_internal = "flash_attention_2"
    assert len(kinds_of(config)) == 2
    assert config._attn_implementation == "flash_attention_2"


def test_the_meta_model_keeps_its_dtype() -> None:
    meta_model = meta_model_of(tiny("mixtral"), dtype=torch.float32)
    check_model(meta_model)
    assert {parameter.dtype for parameter in meta_model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (lambda: tiny("bert", is_decoder=False), "neither causal nor a sliding window: .*bidirectional"),
        (lambda: tiny("lfm2"), "past outside attention"),
        (lambda: tiny("recurrent_gemma"), "past outside attention, .*conv"),
        (lambda: tiny("llama4_text"), r"numbers positions by their order in the batch: modeling_llama4\.py, line \d+"),
        (lambda: tiny("jetmoe"), r"branches on data: modeling_jetmoe\.py"),
        (lambda: tiny("glm_moe_dsa"), "mask is read outside attention"),
        (lambda: tiny("doge"), "the model has its own mask"),
        (lambda: tiny("diffllama"), r"calls attention several times in a step: model\.layers\.0\.self_attn"),
        (lambda: tiny("nemotron"), "arguments do not reach attention"),
        (lambda: tiny("mamba"), "does not support other attention implementations"),
        (lambda: tiny("llama", head_dim=520), r"heads have more than 512 dimensions: model\.layers\.0\.self_attn"),
    ],
)
def test_unsupported_models_are_refused_with_the_reason(config: Any, problem: str) -> None:
    with pytest.raises(ModelRefused, match=problem):
        check_model(meta_model_of(config(), dtype=torch.float32))


def changed_llama(monkeypatch: pytest.MonkeyPatch, **keywords: object) -> PreTrainedConfig:
    """A Llama with layers that pass additional arguments to attention."""
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.LlamaAttention.forward

    def forward(self: nn.Module, *args: Any, **given: Any) -> Any:
        return plain(self, *args, **given, **keywords)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    return tiny_config(LlamaConfig, {})


@pytest.mark.parametrize(
    ("keywords", "problem"),
    [
        ({"position_bias": torch.zeros(1)}, "attention has an unknown argument: .* passes position_bias"),
        ({"s_aux": torch.zeros(3)}, "learned sinks have an unknown form"),
        ({"s_aux": torch.zeros(4, 13)}, "learned sinks have an unknown form"),
    ],
)
def test_unknown_arguments_are_refused(
    keywords: dict[str, object], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelRefused, match=problem):
        check_model(meta_model_of(changed_llama(monkeypatch, **keywords), dtype=torch.float32))


def test_logits_for_every_token_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LlamaForCausalLM.forward
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda self, logits_to_keep=0, **given: plain(self, **given))
    with pytest.raises(ModelRefused, match="no logits_to_keep"):
        check_model(meta_model_of(tiny_config(LlamaConfig, {}), dtype=torch.float32))
