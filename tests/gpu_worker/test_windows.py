"""The setting `window`: the layers it affects, refused values, and the self-check with it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gpu_worker.attention.layers import AttentionPattern, LayerMap
from gpu_worker.checkpoint.files import ModelRefused
from gpu_worker.compatibility.check_model import check_model, meta_model_of
from gpu_worker.compatibility.self_check import BOUNDED_NAME, check_runner, eager_name
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup import with_window
from tests.gpu_worker.attention.small_layers import KIND, layers_of
from tests.gpu_worker.rig import Rig, RigSpec, config_of
from tests.gpu_worker.rig_specs import SPECS


def layers_with(*patterns: AttentionPattern) -> LayerMap:
    return layers_of(*(replace(KIND, pattern=pattern) for pattern in patterns))


def seen(layers: LayerMap) -> list[AttentionPattern]:
    return [layer.kind.pattern for layer in layers.layers]


EVERYTHING, SINKS = AttentionPattern(), AttentionPattern(has_learned_sinks=True)


def test_window_bounds_full_attention_layers_and_keeps_others() -> None:
    layers = layers_with(
        EVERYTHING, AttentionPattern(window=8), SINKS, AttentionPattern(window=90, has_learned_sinks=True)
    )
    assert with_window(WorkerSettings(), layers, 128) is layers
    bounded = with_window(WorkerSettings(window=60, window_sinks=4), layers, 128)
    assert seen(bounded) == [
        AttentionPattern(window=60, sink_tokens=4),
        AttentionPattern(window=8),
        AttentionPattern(window=60, sink_tokens=4, has_learned_sinks=True),
        AttentionPattern(window=90, has_learned_sinks=True),
    ]
    assert bounded.reach == (90, 4)
    assert seen(with_window(WorkerSettings(window=1), layers, 128))[0] == AttentionPattern(window=1)


@pytest.mark.parametrize(
    ("own", "max_length", "expected"),
    [
        ([EVERYTHING], 128, (0, 0)),
        ([AttentionPattern(window=8), EVERYTHING], 128, (0, 0)),
        ([AttentionPattern(window=8), AttentionPattern(window=40)], 128, (40, 0)),
        # Too wide to hide a position of the longest sequence.
        ([AttentionPattern(window=8), AttentionPattern(window=40)], 40, (0, 0)),
        ([AttentionPattern(window=30, sink_tokens=9), AttentionPattern(window=40)], 128, (40, 9)),
        ([AttentionPattern(window=30, sink_tokens=9), AttentionPattern(window=20)], 39, (0, 0)),
        ([AttentionPattern(window=30, sink_tokens=9), AttentionPattern(window=20)], 40, (30, 9)),
    ],
)
def test_the_reach_is_the_widest_window_of_all_layers(
    own: list[AttentionPattern], max_length: int, expected: tuple[int, int]
) -> None:
    assert layers_with(*own).within(max_length).reach == expected


@pytest.mark.parametrize(
    ("settings", "own", "problem"),
    [
        (
            {"window": 124, "window_sinks": 4},
            EVERYTHING,
            "window is 124 and window_sinks 4; together .* max_length 128",
        ),
        (
            {"window": 128},
            EVERYTHING,
            "window is 128 and window_sinks 0; together they must be less than max_length 128",
        ),
        ({"window": 1, "window_sinks": 500}, EVERYTHING, "window is 1 and window_sinks 500; together"),
        (
            {"window": 9},
            AttentionPattern(window=50),
            r"every layer of this model has its own window \(the widest is 50\)",
        ),
    ],
)
def test_windows_without_effect_are_refused(settings: dict[str, int], own: AttentionPattern, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        with_window(WorkerSettings(**settings), layers_with(own), 128)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.bound], ids=str)
def test_the_self_check_bounds_eager_attention_too(spec: RigSpec, rig_of: Callable[[RigSpec], Rig]) -> None:
    """Without the setting, the check finds that the kernels see less."""
    rig = rig_of(spec)
    model, own = rig.served, check_model(meta_model_of(config_of(spec), dtype=torch.bfloat16))
    before = model.config._attn_implementation
    assert eager_name(model, own) == BOUNDED_NAME
    assert eager_name(model, None) == eager_name(model, own.bounded(*rig.spec.bound)) == "eager"
    assert check_runner(model, rig.runner, spec.dtype, unbounded=own) < 1e-4
    with pytest.raises(ModelRefused, match="the self-check failed: logits differ from eager attention's"):
        check_runner(model, rig.runner, spec.dtype)
    assert model.config._attn_implementation == before
