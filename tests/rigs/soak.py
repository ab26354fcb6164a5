"""Random load and faults for minutes: `python -m tests.rigs.soak --seconds 300 --seed 7`.

Random streams run in a pool too small for them, while workers are killed, hang, fail steps and leave, and callers
cancel, abort and time out. Every finished stream must equal the oracle, every other one must be a prefix of it, and at
the end every page must be free. Not part of the test suite.
"""

import argparse
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import grpc

from tests.rigs import byte_tokenizer
from tests.rigs.processes import Child, Rig
from tests.rigs.streams import Caller, Stream
from tests.system.asks import Ask

_SHAPE = ("--num-pages", "120", "--max-rows", "12", "--max-length", "200", "--token-budget", "32", "--chunk-align", "4")
_PHASES = ("nothing", "nothing", "nothing", "cancel", "abort", "deadline")


@dataclass(slots=True, kw_only=True)
class _Live:
    ask: Ask
    stream: Stream
    fate: str
    after_tokens: int
    is_poison: bool


def _random_ask(rng: random.Random, number: int) -> tuple[Ask, bool]:
    prompt = tuple(rng.randrange(256) for _ in range(rng.choice([1, 3, 4, 8, 30, 60, 100])))
    is_poison = rng.random() < 0.03
    length = rng.choice([1, 2, 10, 40, 90])
    wants_logprobs = rng.random() < 0.3
    ask = Ask(
        prompt=(*prompt, byte_tokenizer.POISON_ID if is_poison else ord("a")),
        max_new_tokens=length,
        temperature=rng.choice([0.0, 0.9]),
        seed=rng.randrange(1 << 64),
        ignore_eos=rng.random() < 0.7,
        min_new_tokens=rng.choice([0, 0, 1, length]),
        stop_token_ids=tuple(rng.sample(range(256), 3)) if rng.random() < 0.3 else (),
        stop_strings=tuple(rng.sample([" the", "ab", "é", "日", "x", "STOP", "OP", "\n\n", "0", "q"], 3))
        if rng.random() < 0.3
        else (),
        include_stop=rng.random() < 0.5,
        priority=rng.choice([0, 0, 0, 5, -5]),
        request_id=f"soak-{number}",
        num_samples=rng.choice([1, 1, 1, 1, 2, 5]),
        logprobs=rng.choice([0, 1, 20]) if wants_logprobs else None,
        prompt_logprobs_start=rng.randrange(len(prompt) + 1) if rng.random() < 0.2 else None,
        **_random_settings(rng) if rng.random() < 0.3 else {},
    )
    return ask, is_poison


def _random_settings(rng: random.Random) -> dict[str, Any]:
    """Random sampling settings; enough tokens are allowed that bans leave some."""
    return {
        "top_p": rng.choice([1.0, 0.8]),
        "top_k": rng.choice([0, 5]),
        "min_p": rng.choice([0.0, 0.1]),
        "typical_p": rng.choice([1.0, 0.8]),
        "presence_penalty": rng.choice([0.0, 0.5, -2.0]),
        "frequency_penalty": rng.choice([0.0, 1.1]),
        "repetition_penalty": rng.choice([1.0, 1.3]),
        "logit_bias": tuple((token, rng.choice([-100.0, 1.5])) for token in rng.sample(range(256), 3)),
        "banned_token_ids": tuple(rng.sample(range(256), 5)) if rng.random() < 0.5 else (),
        "allowed_token_ids": tuple(rng.sample(range(256), 40)) if rng.random() < 0.5 else (),
    }


def _random_worker(rng: random.Random, rig: Rig) -> Child:
    flags = [*_SHAPE, "--nonfinite-token", str(byte_tokenizer.POISON_ID), "--step-ms", rng.choice(["0", "0", "1"])]
    fault = rng.choice(["none", "none", "oom-steps", "out-of-sync-steps", "exit-step", "hang-step"])
    if fault != "none":
        flags += [f"--{fault}", str(rng.randrange(1, 400))]
    return rig.worker(*flags, seed=rng.randrange(1 << 30))


def _settle(live: _Live, counts: Counter[str]) -> None:
    """Checks the outcome of an ended stream."""
    error, transcript = live.stream.error, live.stream.transcript
    if live.stream.failure is not None:
        raise live.stream.failure
    reasons = {sample.reason for sample in transcript.samples.values()} if error is None else set[str]()
    if error is None and "ABORTED" not in reasons:
        assert not live.is_poison or "TIME_LIMIT" in reasons, "a request with a nonfinite token finished"
        live.ask.check(transcript)
        counts["equal to the oracle"] += 1
        return
    if not live.is_poison:
        for idx, sample in transcript.samples.items():
            assert sample.tokens == list(live.ask.completion(idx).tokens)[: len(sample.tokens)]
    if error is None:
        assert live.fate == "abort"
        counts["aborted"] += 1
        return
    code = error.code()
    allowed = {"cancel": {grpc.StatusCode.CANCELLED}, "deadline": {grpc.StatusCode.DEADLINE_EXCEEDED}}
    if live.is_poison and code == grpc.StatusCode.INTERNAL:
        counts["not finite"] += 1
        return
    assert code in allowed.get(live.fate, set()), f"{live.ask.request_id}: {code}: {error.details()}"
    counts[code.name.lower()] += 1


def _act(live: _Live, caller: Caller) -> None:
    if len(live.stream.transcript.tokens) < live.after_tokens or live.after_tokens < 0:
        return
    live.after_tokens = -1
    if live.fate == "cancel":
        live.stream.cancel()
    elif live.fate == "abort":
        caller.abort(live.ask.request_id)


def soak(seconds: float, seed: int, streams: int) -> Counter[str]:
    rng, counts = random.Random(seed), Counter[str]()
    with Rig() as rig:
        workers = [_random_worker(rng, rig) for _ in range(3)]
        record = rig.runtime_dir / "record.bin"
        scheduler = rig.scheduler("--step-timeout-seconds", "1", "--record", str(record))
        caller = rig.caller(scheduler)
        caller.wait_serving()
        running: list[_Live] = []
        began, kill_at, number = time.monotonic(), time.monotonic(), 0
        while running or time.monotonic() < began + seconds:
            now = time.monotonic()
            while len(running) < streams and now < began + seconds:
                ask, is_poison = _random_ask(rng, number)
                number += 1
                fate = rng.choice(_PHASES)
                timeout = rng.random() * 2 + 0.01 if fate == "deadline" else None
                stream = caller.generate(ask.request(), timeout=timeout)
                after = rng.randrange(0, 20)
                running.append(_Live(ask=ask, stream=stream, fate=fate, after_tokens=after, is_poison=is_poison))
            for live in running:
                if not live.stream.ended:
                    _act(live, caller)
            for live in [live for live in running if live.stream.ended]:
                running.remove(live)
                _settle(live, counts)
            if now >= kill_at:
                kill_at = now + rng.expovariate(1.5)
                victim = rng.choice(workers)
                if rng.random() < 0.8:
                    victim.kill()
                else:
                    victim.terminate()
                counts["workers ended"] += 1
            for worker in [worker for worker in workers if worker.exit_code is not None or "hung" in worker.lines[-1:]]:
                worker.killed = True
                workers.remove(worker)
                workers.append(_random_worker(rng, rig))
            if now > began + seconds + 60:
                raise AssertionError(f"streams still run: {[live.ask.request_id for live in running]}\n{caller.load()}")
            time.sleep(0.002)
        load = caller.wait_idle()
        assert scheduler.terminate() == 0
        rig.check_record(record, 30 + 5 * seconds)
        counts["preemptions"], counts["lane resets"], counts["steps"] = load.preemptions, load.lane_resets, load.steps
    return counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--streams", type=int, default=32)
    args = parser.parse_args()
    for name, count in sorted(soak(args.seconds, args.seed, args.streams).items()):
        print(f"{count:8d} {name}")


if __name__ == "__main__":
    main()
