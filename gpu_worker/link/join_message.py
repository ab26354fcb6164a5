"""What a worker says of itself in Join: its model, its sizes, its times. The link adds the fields of the connection."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.checkpoint.files import ModelFiles, identity
from gpu_worker.constraints.constraints import refusal
from gpu_worker.geometry import Geometry
from gpu_worker.process.ranks import SINGLE, Ranks, pid_of
from gpu_worker.settings import BUNDLED_MODEL, WorkerSettings
from gpu_worker.step.runner import Runner
from gpu_worker.timings import Timings


def identity_of(settings: WorkerSettings, files: ModelFiles, geometry: Geometry) -> str:
    """The identity of the model with these settings, as in Join."""
    window = None if settings.window is None else (settings.window, settings.window_sinks)
    return identity(files, geometry.page_size, window)


def model_name(settings: WorkerSettings, files: ModelFiles) -> str:
    """The name that callers see. A folder's name may have bytes that are not UTF-8."""
    own_name = "bundled" if files.folder == BUNDLED_MODEL.resolve() else Path(settings.model).name
    if own_name in ("", ".."):
        own_name = files.folder.name or str(files.folder)
    return settings.served_name or own_name.encode(errors="replace").decode()


def texts(files: ModelFiles) -> dict[str, Any]:
    """The fields of Join with a tokenizer and what chats need."""
    tokenizer = files.tokenizer
    chat = pb.ChatFiles(
        named_templates=tokenizer.named_templates,
        tokenizer_config_json=tokenizer.settings_json,
        response_template_json=tokenizer.response_template_json,
    )
    return {
        "tokenizer_json": tokenizer.backend_json,
        "chat_template": tokenizer.template,
        "chat": chat if tokenizer.backend_json else None,
    }


def join_message(
    settings: WorkerSettings,
    files: ModelFiles,
    runner: Runner,
    timings: Timings,
    *,
    identity: str,
    ranks: Ranks = SINGLE,
) -> pb.Join:
    """The Join message without the fields of the connection."""
    geometry, device = runner.geometry, runner.device
    card = f" {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    return pb.Join(
        protocol=pb.PROTOCOL_CURRENT,
        identity=identity,
        model=model_name(settings, files),
        logit_rows=geometry.logit_rows,
        eos_token_ids=files.eos_token_ids,
        defaults=pb.GenerationDefaults(**dict[str, Any](files.generation.defaults)),
        **texts(files),
        pid=pid_of(ranks),
        standby=settings.standby,
        device=f"{ranks.size} x {device.type}{card}" if ranks.is_group else f"{device}{card}",
        dtype=str(runner.on_device.cache.keys[0].dtype).removeprefix("torch."),
        pool_id=runner.pool.pool_id,
        pool_layout=runner.pool.layout,
        pool_bytes=runner.pool.num_bytes,
        constraint_refusal=refusal(files.tokenizer.backend_json),
        **asdict(geometry),
        **asdict(timings),
    )
