"""Reads what a model's files ask of sampling: generation_config.json, and the stop ids of config.json.

The ranges are those of requests. A value outside them with a plain meaning is brought into range, with a note for the
log; any other is refused with its file, field and limit. Values that sampling does not use are not judged. Imports
neither torch nor Transformers, so that a wrong value is refused within a second.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.v1.inference_pb2 import SamplingParams

from gpu_worker.checkpoint.folder import ModelRefused, read_json
from tandem_contract.limits import limit_at

GENERATION_FILE = "generation_config.json"
# As the scheduler takes them in Join.
MAX_EOS_IDS = 1024
_MAX_TOP_K = (1 << 32) - 1
_GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
# Options that change tokens and are not supported, with their values for "off".
_UNSUPPORTED: dict[str, int | None] = {
    name: off
    for off, names in (
        (None, "bad_words_ids begin_suppress_tokens exponential_decay_length_penalty forced_bos_token_id"),
        (None, "forced_eos_token_id sequence_bias stop_strings suppress_tokens"),
        (0, "epsilon_cutoff eta_cutoff min_length min_new_tokens no_repeat_ngram_size penalty_alpha"),
        (1, "encoder_repetition_penalty guidance_scale num_beams typical_p"),
    )
    for name in names.split()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How a model generates unless a request says otherwise."""

    # None: the file names none, and config.json decides.
    eos_token_ids: tuple[int, ...] | None = None
    # Settings of sampling, by their names in GenerationDefaults of worker.proto.
    defaults: Mapping[str, float]
    # Unsupported options, as `name value`.
    unsupported: tuple[str, ...] = ()
    # What was brought into range, one sentence each.
    notes: tuple[str, ...] = ()


def read_generation(folder: Path) -> Generation:
    """The folder's generation_config.json; greedy decoding without one. Raises ModelRefused, or OSError."""
    path = folder / GENERATION_FILE
    return generation_of(read_json(path) if path.is_file() else {}, path)


def generation_of(given: Mapping[str, Any], path: Path) -> Generation:
    """What the contents of the file at `path` mean. Raises ModelRefused."""
    notes = list[str]()
    eos = eos_ids(given.get("eos_token_id"), path, notes)
    # The penalty applies to greedy decoding too, as in Transformers.
    defaults = {"repetition_penalty": _ranged("repetition_penalty", given, path)}
    samples = given.get("do_sample")
    if samples not in (None, False, True):
        raise _refused("do_sample", samples, path, "it must be true or false")
    defaults |= _sampled(given, path, notes) if samples else _GREEDY
    asked = {name: given.get(name) for name in sorted(_UNSUPPORTED)}
    unsupported = (f"{name} {value}" for name, value in asked.items() if value not in (None, _UNSUPPORTED[name]))
    return Generation(eos_token_ids=eos, defaults=defaults, unsupported=tuple(unsupported), notes=tuple(notes))


def eos_ids(value: object, path: Path, notes: list[str]) -> tuple[int, ...] | None:
    """The stop ids in `eos_token_id` of the file at `path`, each once; None without one. Raises ModelRefused.

    notes: receives a sentence if an entry was left out.
    """
    if value is None:
        return None
    listed = value if isinstance(value, list) else [value]
    if None in listed:
        notes.append(f"eos_token_id in {path} is {str(value)[:80]}; null is not a token, it is left out")
    ids = dict.fromkeys(_whole("eos_token_id", token, path) for token in listed if token is not None)
    if len(ids) > MAX_EOS_IDS:
        raise ModelRefused(f"eos_token_id in {path} has {len(ids)} ids; the limit is {MAX_EOS_IDS}: correct the file")
    return tuple(ids) or None


def _sampled(given: Mapping[str, Any], path: Path, notes: list[str]) -> dict[str, float]:
    settings = {name: _ranged(name, given, path) for name in ("temperature", "min_p")}
    top_p, top_k = _number("top_p", given.get("top_p"), path), given.get("top_k")
    if top_p is not None and top_p < 0:
        raise _refused("top_p", top_p, path, "it must be 0 to 1")
    if top_p == 0:
        notes.append(f"top_p in {path} is 0, the likeliest token alone: the default is greedy decoding")
        return _GREEDY
    if top_p is not None and top_p > 1:
        notes.append(f"top_p in {path} is {top_p:g}; it is taken as 1, every token")
    top_k = 0 if top_k is None else _whole("top_k", top_k, path)
    if top_k < -1:
        raise _refused("top_k", top_k, path, "it must be at least 1, or 0 or -1 for every token")
    if top_k == -1 or top_k > _MAX_TOP_K:
        notes.append(f"top_k in {path} is {top_k}; it is taken as 0, every token")
        top_k = 0
    return settings | {"top_p": 1.0 if top_p is None else min(top_p, 1.0), "top_k": top_k}


def _ranged(name: str, given: Mapping[str, Any], path: Path) -> float:
    limit = limit_at(SamplingParams, name)
    value = _number(name, given.get(name), path)
    if value is None:
        return limit.off
    if not limit.least <= value <= limit.most:
        raise _refused(name, value, path, f"it must be {limit.least:g} to {limit.most:g}")
    return value


def _number(name: str, value: object, path: Path) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _refused(name, value, path, "it must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _refused(name, value, path, "it must be finite")
    return number


def _whole(name: str, value: object, path: Path) -> int:
    number = _number(name, value, path)
    if number is None or not number.is_integer():
        raise _refused(name, value, path, "it must be a whole number")
    return int(number)


def _refused(name: str, value: object, path: Path, limit: str) -> ModelRefused:
    shown = f"{value:g}" if isinstance(value, float) else repr(value)
    return ModelRefused(f"{name} in {path} is {shown[:80]}; {limit}: correct the file")
