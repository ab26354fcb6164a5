"""Loads the weights through Transformers into a model on its device, and refuses an incomplete checkpoint.

Transformers only warns of missing tensors and initialises them at random. Owns that check, the report of progress (a
bar on a terminal, otherwise a log line every few seconds), and the final state of the model. Knows nothing of pages,
plans or sockets.
"""

import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import is_accelerate_available
from transformers.utils import logging as transformers_logging

from gpu_worker.attention.paged import ATTENTION_NAME, register
from gpu_worker.checkpoint.files import ModelFiles, ModelRefused
from gpu_worker.checkpoint.folder import WeightFiles, by_kind, tensor_types
from gpu_worker.checkpoint.linear import Groups, PackedLinear, can_pack, merge_linears, pack_linears
from gpu_worker.cpu.replace import replace_operators
from gpu_worker.native.library import native_library
from tandem_contract import logs
from tandem_contract.plural import numbered

if TYPE_CHECKING:
    from transformers.distributed import DistributedConfig

log = logging.getLogger(__name__)

# The title of Transformers' own progress bar, in 5.17 and 5.23.
_BAR_OF_TRANSFORMERS = "Loading weights"
_NUM_NAMED = 3
# Kinds of tensors that the warning of unused ones names.
_NUM_KINDS = 16
# A layer's number in the name of a module or tensor.
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
# As safetensors names them.
_FLOATS = ("F64", "F32", "F16", "BF16")
_LOG_SECONDS, _TERMINAL_SECONDS = 3.0, 0.1
_BAR_WIDTH = 30
_GIB = 1 << 30


class Progress:
    """Counts loaded bytes. `now` returns seconds; `draw` writes to the terminal and is None without one."""

    def __init__(
        self, total_bytes: int, draw: Callable[[str], None] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._draw, self._now = max(1, total_bytes), draw, now
        self._interval = _LOG_SECONDS if draw is None else _TERMINAL_SECONDS
        self._done = 0
        self._begun = self._shown = now()

    def add(self, num_bytes: int) -> None:
        self._done = min(self._total, self._done + num_bytes)
        if self._now() - self._shown >= self._interval:
            self._shown = self._now()
            self._show()

    def close(self) -> None:
        """Clears the terminal's line."""
        if self._draw is not None:
            self._draw("\r\x1b[K")

    def _show(self) -> None:
        rate = self._done / max(1e-9, self._shown - self._begun)
        figures = (
            f"{100 * self._done // self._total:3d} %, {self._done / _GIB:.2f} of {self._total / _GIB:.2f} GiB, "
            f"{rate / _GIB:.2f} GiB/s"
        )
        if self._draw is not None:
            filled = _BAR_WIDTH * self._done // self._total
            bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
            self._draw(f"\r\x1b[Kweights [{bar}] {figures}")
        else:
            log.info("weights: %s", figures.strip())


def loads_to_device(device: torch.device) -> bool:
    """Whether each tensor goes to the device as it is read, so that host memory need not hold the model.

    Transformers does so if it is given a device map, which it accepts only if the package accelerate is installed.
    Otherwise tensors that are converted, in their dtype or by merging experts, are first collected in host memory;
    others stay in the mapped file.
    """
    return device.type != "cpu" and is_accelerate_available()


def load_weights(
    files: ModelFiles,
    *,
    device: torch.device,
    dtype: torch.dtype,
    merged: Groups = (),
    shared: "DistributedConfig | None" = None,
) -> PreTrainedModel:
    """The model on its device, in evaluation mode, with paged attention. Raises ModelRefused.

    merged: groups of linear layers that are merged into one. shared: how the ranks of a group share the model; this
    process then reads its part only. Transformers calls torch.distributed, which the caller has set up.
    """
    target = device if loads_to_device(device) and shared is None else None
    model = load_plain(files, dtype=dtype, device=target, shared=shared)
    if shared is not None:
        # It imports torch.distributed, which a single process does not need.
        from gpu_worker.checkpoint.shared_layers import plain_layers

        model = model.to(device)  # type: ignore[arg-type]
        log.info("%s shared by the ranks", numbered(plain_layers(model), "layer", "are"))
    return prepare(model, device=device, dtype=dtype, merged=merged)


def load_plain(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    device: torch.device | None = None,
    shared: "DistributedConfig | None" = None,
) -> PreTrainedModel:
    """The model as Transformers loads it, complete. Raises ModelRefused.

    device: where each tensor goes as it is read. None: to host memory, or it stays in its mapped file. shared: as in
    `load_weights`.
    """
    register()
    progress = Progress(files.weights.num_bytes, logs.draw if logs.can_draw() else None)
    try:
        with _quiet_transformers() as warnings, _reporting_to(progress, files.weights.tensor_bytes):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                files.folder,
                config=files.config,
                dtype=dtype,
                use_safetensors=True,
                attn_implementation=ATTENTION_NAME,
                device_map=None if device is None else {"": device},
                **({} if shared is None else {"distributed_config": shared}),
                trust_remote_code=False,
                # Transformers would read the folder's, which says nothing of weights.
                generation_config=GenerationConfig(),
                # Different shapes are collected with other faults, and refused below.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
            model, report = loaded
    except SafetensorError as error:
        raise ModelRefused(f"the weights in {files.folder} cannot be read: {error}; download them again") from error
    except RuntimeError as error:
        if "conversion" not in str(error):
            raise
        for warning in warnings:
            for line in warning.getMessage().splitlines():
                log.error("Transformers: %s", line)
        raise ModelRefused(
            f"the weights in {files.folder} cannot be converted for {files.config.model_type}; "
            "checkpoint and config.json do not belong together"
        ) from error
    finally:
        progress.close()
    try:
        check_complete(report)
    except ModelRefused as error:
        raise by_kind(error, files.config.to_diff_dict()) from None
    _check_dtypes(model, files.weights)
    _warn_of_unused(report["unexpected_keys"])
    without_warning_of_padding(model)
    return model


def without_warning_of_padding(model: PreTrainedModel) -> None:
    """Removes a comparison of each step's tokens with pad_token_id, which branches on data only to warn of padding."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.warn_if_padding_and_no_attention_mask = lambda *_: None  # type: ignore[method-assign]


def prepare(
    model: PreTrainedModel, *, device: torch.device, dtype: torch.dtype, merged: Groups = ()
) -> PreTrainedModel:
    """Puts a loaded model in the state that the runner needs; merged: groups of linear layers."""
    model = model.to(device).eval()  # type: ignore[arg-type]
    model.requires_grad_(False)
    merge_linears(model, merged)
    if can_pack(device, dtype):
        log.info("%s packed", numbered(pack_linears(model), "linear layer"))
    if device.type == "cpu":
        replaced = replace_operators(model)
        log.info("native operators: %s", replaced)
        for line in replaced.lacking(model.config) if native_library() is not None else ():
            log.info("%s", line)
    return model


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights, a tied one counted once, packed ones where they now are."""
    packed = sum(module.num_bytes for module in model.modules() if isinstance(module, PackedLinear))
    return packed + sum(own_part(parameter).nbytes for parameter in model.parameters())


def own_part(parameter: Any) -> Tensor:
    """What this process stores of a parameter, which the ranks of a group may share (a DTensor)."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def check_complete(report: Mapping[str, Any]) -> None:
    """Raises ModelRefused unless the checkpoint has every tensor of the model, in its shape.

    report: Transformers' `output_loading_info`, without tied weights and the model's own exceptions.
    """
    hint = "checkpoint and config.json do not belong together, download both again"
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, wanted = mismatched[0]
        raise ModelRefused(
            f"{_some([entry[0] for entry in mismatched])} of another shape than in config.json: "
            f"{name} is {list(stored)}, expected {list(wanted)}; {hint}"
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelRefused(f"{_some(missing)} missing from the checkpoint; {hint}")


def _check_dtypes(model: PreTrainedModel, files: WeightFiles) -> None:
    """Raises ModelRefused for a weight that is stored as anything but a plain floating-point number.

    Transformers casts it, and quantised numbers are nothing without their scales. Tensors that the model does not use
    may have any dtype. A weight may have another name in its file, or be a part of one of the model's.
    """
    of_model = model.state_dict(keep_vars=True)
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    for path in files.paths:
        others = {name: kind for name, (kind, _) in tensor_types(path).items() if kind not in _FLOATS}
        for name, kind in others.items():
            converted, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, of_model)
            used = of_model.get(converted, of_model.get(name))
            if used is not None and used.is_floating_point():
                raise ModelRefused(f"{name} in {path} has dtype {kind}; a weight is one of {', '.join(_FLOATS)}")


def _warn_of_unused(names: Iterable[str]) -> None:
    """Names the tensors that the model does not have, those of all layers as one."""
    unused = sorted(names)
    if unused:
        kinds = list(dict.fromkeys(NUMBER.sub("*", name) for name in unused))
        more = ", …" if len(kinds) > _NUM_KINDS else ""
        log.warning(
            "%s unknown to the model and ignored, as Transformers does: %s%s",
            *(numbered(len(unused), "tensor of the checkpoint", "are"), ", ".join(kinds[:_NUM_KINDS])[:1000], more),
        )


def _some(names: list[str]) -> str:
    """The number of tensors, and the first few names, before "missing" or the like."""
    more = ", …" if len(names) > _NUM_NAMED else ""
    are = "is" if len(names) == 1 else "are"
    return f"{numbered(len(names), 'tensor')} ({', '.join(names[:_NUM_NAMED])}{more}) {are}"


@contextmanager
def _reporting_to(progress: Progress, tensor_bytes: Mapping[str, int]) -> Iterator[None]:
    """Adds every tensor that Transformers loads within to `progress`."""

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if keywords.get("desc") == _BAR_OF_TRANSFORMERS and args:
            return _counted(args[0], progress, tensor_bytes)
        return factory(*args, **keywords)

    transformers_logging.disable_progress_bar()
    # Without it a later version loads as well, and shows no progress.
    set_hook = getattr(transformers_logging, "set_tqdm_hook", None)
    if set_hook is None:
        yield
        return
    before = set_hook(bar)
    try:
        yield
    finally:
        set_hook(before)


def _counted(items: Iterable[Any], progress: Progress, tensor_bytes: Mapping[str, int]) -> Iterator[Any]:
    """Yields `items`, pairs that begin with a parameter's name, and adds the bytes of its tensor afterwards.

    Parameters that are made of several tensors share the remaining bytes equally.
    """
    pairs = list(items)
    sizes = [tensor_bytes.get(name) for name, _ in pairs]
    named = sum(size for size in sizes if size is not None)
    share = (sum(tensor_bytes.values()) - named) // max(1, sizes.count(None))
    for pair, size in zip(pairs, sizes, strict=True):
        yield pair
        progress.add(share if size is None else size)


@contextmanager
def _quiet_transformers() -> Iterator[list[logging.LogRecord]]:
    """Collects Transformers' warnings instead of logging them, because an exception reports the fault in one line."""
    logger, collector = logging.getLogger("transformers"), BufferingHandler(sys.maxsize)
    before, propagates = logger.handlers[:], logger.propagate
    logger.handlers[:], logger.propagate = [collector], False
    try:
        yield collector.buffer
    finally:
        logger.handlers[:], logger.propagate = before, propagates
