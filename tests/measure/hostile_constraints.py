"""Measures what hostile constraints cost others: `python -m tests.measure.hostile_constraints [--rounds N]`.

A service with two tenants and the checking worker. The polite tenant has 16 streams, and once a second it sends a valid
grammar that is new to the service. In every second part the hostile tenant sends ten requests per second, each with
another grammar within all limits that needs minutes for its first mask. Before that, a trial process alone: a hostile
grammar's verdict, and the next grammar in the process that follows, as in one that runs already.
"""

import asyncio
import threading
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import grpc
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend.constraints.trials import TrialProcess
from tandem_contract.grammars import COMPILE_SECONDS
from tests.measure.harness import Bar, Measurement, in_ms, percentiles
from tests.rigs import byte_tokenizer
from tests.rigs.door import token_file
from tests.rigs.processes import Rig
from tests.rigs.streams import Caller, Stream

NUM_STREAMS, PART_SECONDS = 16, 8.0
HOSTILE_PER_SECOND, STEP_MS = 10, 10
MOST_ITL_RATIO, MOST_WAIT_SECONDS = 1.10, 3.0
# Of the limit of CPU time, on a machine that has nothing else to do. A slower one has longer limits, and longer waits.
MOST_VERDICT_RATIO = 1.25
TOKENS = {tenant: f"secret-of-{tenant}" for tenant in ("polite", "hostile")}


def metadata(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {TOKENS[tenant]}"),)


def request(number: int, *, tokens: int, lark: str = "") -> pb.GenerateRequest:
    """A request for `tokens` tokens, unless its grammar ends it before."""
    made = pb.GenerateRequest(token_ids={"ids": [97, number % 250]})  # pyright: ignore[reportArgumentType]
    made.stop.max_new_tokens = tokens
    if lark:
        made.constraint.lark = lark
    else:
        made.stop.ignore_eos = True
    return made


def evil(number: int) -> str:
    """No part is repeated more than 9,999 times, but the first mask walks through all of them."""
    return f"start: /{'x{9999}' * 40}y{{{number + 1}}}/"


class Load:
    """The requests of both tenants to one service."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._streams = list[Stream]()
        self.waits, self.refusals = list[float](), Counter[str]()
        self._number = 0
        self._deadline = 0.0

    def wait_ready(self) -> None:
        """Returns when a request is admitted, and the trial process has read the tokenizer."""
        for _ in range(600):
            stream = self._caller.generate(request(0, tokens=1), metadata=metadata("polite"))
            stream.wait(lambda transcript, stream=stream: transcript.summary is not None or stream.ended)
            if stream.error is None:
                break
            time.sleep(0.1)
        self._new_grammar(is_beside=False)

    def part(self, *, is_hostile: bool) -> list[float]:
        """Returns the gaps between the polite tenant's tokens, in seconds, in a part of the run."""
        streams = [
            self._caller.generate(request(i, tokens=4000), metadata=metadata("polite")) for i in range(NUM_STREAMS)
        ]
        for stream in streams:
            stream.wait_tokens(5)
        begun = time.monotonic()
        self._deadline = begun + PART_SECONDS
        helpers = [threading.Thread(target=self._be_hostile)] if is_hostile else []
        for helper in helpers:
            helper.start()
        for second in range(int(PART_SECONDS) - 1):
            time.sleep(max(0.0, begun + second + 1 - time.monotonic()))
            self._new_grammar(is_beside=is_hostile)
        time.sleep(max(0.0, self._deadline - time.monotonic()))
        for helper in helpers:
            helper.join()
        for stream in streams:
            stream.cancel()
        times = [[at for at in stream.times if begun < at < self._deadline] for stream in streams]
        return [later - earlier for one in times for earlier, later in pairwise(one)]

    def _new_grammar(self, *, is_beside: bool) -> None:
        self._number += 1
        sent = time.monotonic()
        lark = f'start: ("a" | "b" | /c+/){{1,9}} // {self._number} toy_complete=2'
        stream = self._caller.generate(request(1, tokens=8, lark=lark), metadata=metadata("polite"))
        stream.wait(lambda transcript: transcript.accepted is not None or stream.ended, 60.0)
        if stream.error is not None:
            self.refusals[f"polite: {stream.error.code().name}"] += 1  # pyright: ignore[reportAttributeAccessIssue]
        if is_beside:
            self.waits.append(time.monotonic() - sent)

    def _be_hostile(self) -> None:
        calls = list[Stream]()
        while time.monotonic() < self._deadline:
            self._number += 1
            call = request(2, tokens=8, lark=evil(self._number))
            calls.append(self._caller.generate(call, metadata=metadata("hostile")))
            time.sleep(1 / HOSTILE_PER_SECOND)
        for call in calls:
            call.cancel()
            code = call.error.code() if isinstance(call.error, grpc.Call) else None
            self.refusals["hostile: waits" if code is None else f"hostile: {code.name}"] += 1


async def _trials(rounds: int) -> dict[str, Any]:
    """Returns the figures of a trial process without a service."""
    process = TrialProcess(
        byte_tokenizer.tokenizer_json(),
        vocab_size=byte_tokenizer.VOCAB_SIZE,
        eos_token_ids=[byte_tokenizer.EOS_ID],
    )
    seconds: dict[str, list[float]] = {"running": [], "hostile": [], "next": []}

    async def timed(kind: str, grammar: str) -> None:
        begun = time.perf_counter()
        await process.judge(grammar)
        seconds[kind].append(time.perf_counter() - begun)

    try:
        await process.judge("start: /x/")
        limit = COMPILE_SECONDS * process.slowness
        for number in range(1, rounds + 1):
            await timed("running", f'start: "a{number}" | "b"')
            await timed("hostile", f"start:{' a' * 20}{number * ' b'}\na: /x{{30000}}/\nb: /y/")
            await timed("next", f'start: "c{number}" | "d"')
    finally:
        process.close()
    return {
        "verdict_by_limit": percentiles([each / limit for each in seconds["hostile"]], (0, 50, 100)),
        "running_trial_ms": in_ms(seconds["running"], (0, 50, 100)),
        "next_trial_ms": in_ms(seconds["next"], (0, 50, 100)),
        "slowness": process.slowness,
    }


def measure(rounds: int) -> dict[str, Any]:
    """Returns the figures of a trial process alone, and of one service."""
    alone_trials = asyncio.run(_trials(rounds))
    with Rig() as rig:
        rig.worker("--step-ms", str(STEP_MS), "--max-rows", "64", "--num-pages", "8192", "--max-length", "8192",
                   "--token-budget", "256", late=False)  # fmt: skip
        scheduler = rig.scheduler("--tokens", str(token_file(rig.runtime_dir, TOKENS)))
        load = Load(rig.caller(scheduler))
        load.wait_ready()
        gaps: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds):
            for is_hostile in (False, True):
                gaps[is_hostile] += load.part(is_hostile=is_hostile)
        alone, beside = in_ms(gaps[False]), in_ms(gaps[True])
        return {
            **alone_trials,
            "itl_ms_alone": alone,
            "itl_ms_beside": beside,
            "itl_p99_ratio": beside["p99"] / alone["p99"],
            "new_grammar_seconds": {**percentiles(load.waits, (50,)), "most": max(load.waits)},
            "refusals": dict(load.refusals),
        }


def main() -> int:
    measurement = Measurement("hostile_constraints")
    measurement.flag("--rounds", type=int, default=3)
    found = measure(measurement.begin().rounds)
    measurement.line(found)
    of_polite = sum(count for one, count in found["refusals"].items() if one.startswith("polite"))
    wait, most = found["new_grammar_seconds"]["most"], MOST_WAIT_SECONDS * found["slowness"]
    verdict = found["verdict_by_limit"]["p50"]
    measurement.bar(
        Bar(name="a hostile grammar's verdict, of the limit of CPU time", value=verdict, limit=MOST_VERDICT_RATIO),
        Bar(name="p99 of the gaps, of that without attack", value=found["itl_p99_ratio"], limit=MOST_ITL_RATIO),
        Bar(name="seconds that a new grammar waits", value=wait, limit=most),
        Bar(name="refusals of the polite tenant", value=of_polite, limit=0),
    )
    return measurement.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
