"""Runs the engines in turns, each in processes of its own. Owns the order and the processes of the peers."""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.measure import call, machine
from tests.measure.result import EngineResult
from tests.measure.serving import tandem_engine
from tests.measure.workload import Workload
from tests.rigs.processes import Child

_RUN_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another engine: its function, its interpreter, libraries to load before all others, and environment variables."""

    function: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    python: str = sys.executable
    preloaded: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(slots=True, kw_only=True)
class Measured:
    """All runs of one call."""

    results: dict[str, list[EngineResult]]
    # One per repeat; empty without Tandem.
    rooflines: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    # Of the last run of Tandem; empty if none was asked for.
    profile: dict[str, Any] = field(default_factory=dict[str, Any])


def peers(vllm: str | None, llama: str | None, threads: int) -> dict[str, Peer]:
    """Returns the engines besides Tandem. vllm, llama: their interpreters; None: such an engine is left out."""
    folder = "serving.peers"
    known = {
        name: Peer(function=f"{folder}.hugging_face.run", arguments={"engine": name})
        for name in ("static", "continuous")
    }
    if vllm is not None:
        # intel-openmp puts its library beside the interpreter's folder.
        openmp = Path(vllm).parent.parent / "lib" / "libiomp5.so"
        preloaded = (machine.tcmalloc(), str(openmp) if openmp.exists() else "")
        # As its own executor sets them; without them two threads are half as fast.
        cores = ",".join(map(str, sorted(machine.engine_cores(threads))))
        openmp_settings = {
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
        }
        known["vllm"] = Peer(
            function=f"{folder}.vllm_engine.run", python=vllm, preloaded=preloaded, environment=openmp_settings
        )
    if llama is not None:
        known["llama"] = Peer(function=f"{folder}.llama_engine.run", python=llama)
    return known


def near_ties(model: Path, cases: Sequence[tuple[list[int], int, int]]) -> list[dict[str, float]]:
    """Computes in float64 how near the logits of two tokens are; each case is a text and two tokens after it."""
    if not cases:
        return []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cases.json"
        file.write_text(json.dumps(list(cases)))
        return called(Peer(function="serving.near_ties.margins"), 1, model=str(model), cases=str(file))


def called(peer: Peer, threads: int, /, **arguments: Any) -> Any:
    """Calls the function in a process of its own, placed as an engine. Returns what it returns."""
    environment = {"OMP_NUM_THREADS": str(threads), **machine.preload(*peer.preloaded), **peer.environment}
    words = call.words(peer.function, **arguments, **peer.arguments)
    child = Child(peer.function, words, environment=environment, python=peer.python)
    try:
        machine.place_engine(child.pid, threads)
        answer = call.answer(child, _RUN_SECONDS)
        child.wait()
        return answer
    finally:
        child.kill()


def measure(
    engines: Sequence[str],
    known: dict[str, Peer],
    repeats: int,
    load: Workload,
    model: Path,
    options: tandem_engine.Options,
) -> Measured:
    """Interleaves the engines, so that a machine that slows down affects all of them."""
    machine.check_cores()
    machine.place_rest(os.getpid(), options.threads)
    measured = Measured(results={engine: [] for engine in engines})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "workload.json"
        load.save(file)
        asked = {"workload": str(file), "threads": options.threads}
        for i in range(repeats):
            for engine in engines:
                _say(f"run {i + 1} of {repeats}: {engine}")
                if engine == "tandem":
                    roofline = Peer(function="serving.roofline.report")
                    measured.rooflines.append(called(roofline, options.threads, **asked))
                    run, measured.profile = tandem_engine.run(model, load, file, options)
                else:
                    run = EngineResult(**called(known[engine], options.threads, model=str(model), **asked))
                assert [len(tokens) for tokens in run.tokens] == load.output_lengths, f"{engine}: lengths differ"
                measured.results[engine].append(run)
                _say(f"  {run.num_tokens / run.seconds:.1f} output tokens/s in {run.seconds:.2f} s")
    return measured


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
