"""Random schemas through the mask server and the sampler: what ends is valid, and what is refused names its keyword."""

import json
import re
import time
from collections import Counter, deque
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from gpu_worker.constraints.constraints import Constraints
from gpu_worker.constraints.frames import Sizes
from gpu_worker.constraints.rows import Fate
from gpu_worker.sampling.inputs import LogitEdits, SamplingInputs
from gpu_worker.sampling.logits import TokenHistory, edited
from gpu_worker.sampling.sampler import EditedLogits, sample
from scheduler_svc.frontend.constraints.grammar import json_grammar
from scheduler_svc.frontend.constraints.limits import GrammarError
from tests.bundled_recipe.evaluate import MODEL_DIR
from tests.gpu_worker.constraints.rig import hash_of
from tests.gpu_worker.constraints.schemas import Schema, SchemaMaker, with_null
from tests.gpu_worker.plans import geometry_of

NUM_ROWS, MOST_TOKENS = 48, 300
# Python's dates have no year 0, which RFC 3339 allows.
FORMATS = jsonschema.FormatChecker(["uuid", "ipv4", "email"])
# Of the schemas that are accepted.
LEAST_SHARE = 0.8
CONFIG = json.loads((MODEL_DIR / "config.json").read_text())
VOCAB, EOS = CONFIG["vocab_size"], CONFIG["eos_token_id"]


@dataclass(kw_only=True)
class Tally:
    """What became of the schemas."""

    refused: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[Schema, str, str]] = field(default_factory=list)
    num_ended: int = 0
    num_unfinished: int = 0
    invalid: list[tuple[Schema, str, str]] = field(default_factory=list)

    @property
    def share(self) -> float:
        """The part of the accepted ones that ends within the length."""
        return self.num_ended / (self.num_ended + self.num_unfinished + len(self.failed))


@dataclass(slots=True)
class _Job:
    schema: Schema
    source: str
    tokens: list[int]


class Sampler:
    """The worker's sampler on random logits that lean towards short texts, as a model does."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(VOCAB)]
        lean = [-9.0 if not text.strip() else 3.0 if '"' in text or text.strip() in "},]:{[" else 0.0 for text in texts]
        self._lean, self._random = torch.tensor(lean), torch.Generator().manual_seed(seed)
        geometry = geometry_of(max_rows=1, max_length=64, vocab_size=VOCAB)
        self._history, self._num_calls = TokenHistory(geometry, torch.device("cpu")), 0

    def tokens(self, masks: np.ndarray) -> list[int]:
        """A token for each mask, int32 [rows, words]."""
        num = masks.shape[0]
        logits = self._lean + torch.randn(num, VOCAB, generator=self._random)
        every = torch.arange(num)
        edits = LogitEdits(samples=every, draws=(every, every), masked=every)
        scores = edited(logits, edits, self._history, torch.from_numpy(masks).view(torch.uint8))
        self._num_calls += 1
        ones = torch.ones(num)
        inputs = SamplingInputs(
            rows=every, temperature=ones, top_p=ones, min_p=torch.zeros(num), top_k=every * 0, seed=every,
            sample_idx=every * 0, position=every * 0 + self._num_calls, rank_groups=(), filters_min_p=False,
        )  # fmt: skip
        changed = EditedLogits(samples=every, draws=(every, every), logits=scores)
        return sample(logits, inputs, changed).tolist()


def keyword_of(error: str) -> str:
    """The keyword that a refusal names, or the whole sentence without its numbers and names."""
    found = re.search(r"does not support (\w+)|: (\w+) is -?\d|\.(const|enum) is ", error)
    return next(filter(None, found.groups())) if found else re.sub(r"\d+|\"[^\"]*\"|'[^']*'", "_", error)[:60]


def run(num_schemas: int, seed: int) -> Tally:
    maker, tally = SchemaMaker(seed), Tally()
    tokenizer_json = (MODEL_DIR / "tokenizer.json").read_bytes()
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    sampler = Sampler(tokenizer, seed)
    sizes = Sizes(max_rows=NUM_ROWS, vocab_size=VOCAB, max_length=512)
    waiting: dict[bytes, _Job] = {}
    ready, running, free = deque[_Job](), dict[int, _Job](), deque(range(1, NUM_ROWS + 1))
    num_left = num_schemas
    with closing(Constraints(tokenizer_json, sizes, [EOS])) as constraints:
        while num_left or waiting or ready or running:
            while num_left and len(waiting) + len(ready) < NUM_ROWS:
                # No two at once are the same, because the end of one would drop the other.
                schema = maker.make()
                num_left -= 1
                try:
                    source = json_grammar("constraint.json_schema", json.dumps(schema))
                except GrammarError as error:
                    tally.refused[keyword_of(str(error))] += 1
                    continue
                if (known := hash_of(source)) in waiting or any(
                    hash_of(job.source) == known for job in [*ready, *running.values()]
                ):
                    continue
                waiting[hash_of(source)] = _Job(schema, source, [])
                constraints.prepare(hash_of(source), source.encode())
            for hash_, error in constraints.answers():
                job = waiting.pop(hash_)
                if error:
                    tally.refused[keyword_of(error)] += 1
                else:
                    ready.append(job)
            while free and ready:
                row, job = free.popleft(), ready.popleft()
                constraints.start(row, hash_of(job.source), np.zeros(0, np.int32))
                running[row] = job
            if running:
                _step(constraints, sampler, running)
                for row in _ended(constraints, running, tally, tokenizer):
                    constraints.drop(hash_of(running.pop(row).source))
                    free.append(row)
            else:
                time.sleep(0.001)
    return tally


def _step(constraints: Constraints, sampler: Sampler, running: dict[int, _Job]) -> None:
    rows = [constraints.row(row) for row in running]
    masks = np.zeros((len(rows), -(-VOCAB // 32)), np.int32)
    constraints.masks(rows, masks)
    tokens = sampler.tokens(masks)
    for own, job, token in zip(rows, running.values(), tokens, strict=True):
        if own.fate is Fate.OPEN:
            job.tokens.append(token)
    constraints.learn(zip(rows, tokens, strict=True))


def _ended(constraints: Constraints, running: dict[int, _Job], tally: Tally, tokenizer: Tokenizer) -> list[int]:
    ended: list[int] = []
    for row, job in running.items():
        own = constraints.row(row)
        if own.fate is Fate.FAILED:
            tally.failed.append((job.schema, tokenizer.decode(job.tokens), own.detail))
        elif own.fate in (Fate.COMPLETE, Fate.ENDED):
            tally.num_ended += 1
            text = tokenizer.decode(job.tokens)
            try:
                value = json.loads(text, object_pairs_hook=_without_repetition)
                jsonschema.Draft202012Validator(with_null(job.schema), format_checker=FORMATS).validate(value)
            except (ValueError, jsonschema.ValidationError) as error:
                tally.invalid.append((job.schema, text, str(error).partition("\n")[0]))
        elif len(job.tokens) >= MOST_TOKENS:
            tally.num_unfinished += 1
        else:
            continue
        ended.append(row)
    return ended


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a name comes twice in {[name for name, _ in pairs]}")
    return found


# Python reads && in a class as two letters.
@pytest.mark.filterwarnings("ignore:Possible set:FutureWarning")
@pytest.mark.parametrize(
    ("num_schemas", "seed"),
    [(250, 1), pytest.param(10_000, 2, marks=[pytest.mark.long, pytest.mark.timeout(1500)])],
)
def test_random_schemas_end_and_are_valid(num_schemas: int, seed: int) -> None:
    tally = run(num_schemas, seed)
    print(f"refused {tally.refused.total()}: {tally.refused.most_common()}")
    print(f"ended {tally.num_ended}, unfinished {tally.num_unfinished}")
    assert tally.failed == [] and tally.invalid == []
    assert tally.share >= LEAST_SHARE
    assert set(tally.refused) and all(name in str(tally.refused) for name in ("uniqueItems", "dependentRequired"))
