"""Figures that were not measured here: what other projects published, and this project's aims. Always labelled so."""

from tests.measure.gpu_day.record import Kind, Record

# https://github.com/GeeeekExplorer/nano-vllm, README at bb823b3: output tokens/s on its workload, on an RTX 4070 Laptop
# with 8 GB.
NANO_VLLM_TOKENS_PER_SECOND = 1434.13
NANO_VLLM_NOTE = "nano-vllm's README: RTX 4070 Laptop, 8 GB"
# https://github.com/changjonathanc/flex-nano-vllm, README at 98f98ea: output tokens/s of gemma-2-2b on an RTX 3090 with
# 24 GB, by the share of memory that weights and KV cache take.
FLEX_NANO_VLLM_TOKENS_PER_SECOND = {50: 2313.0, 90: 3076.0}
FLEX_NANO_VLLM_NOTE = "flex-nano-vllm's README: RTX 3090, 24 GB"
# Aims on one H200.
AIM_TOKENS_PER_SECOND, STRETCH_TOKENS_PER_SECOND = 24_500.0, 28_000.0
AIM_BANDWIDTH_SHARE = 0.85
AIM_IDLE_SHARE = 0.01
AIM_COLD_START_SECONDS, AIM_WARM_START_SECONDS = 90.0, 20.0


def nano_vllm(record: Record) -> None:
    record.figure("nano-vllm", NANO_VLLM_TOKENS_PER_SECOND, "output tokens/s", Kind.PUBLISHED, note=NANO_VLLM_NOTE)
