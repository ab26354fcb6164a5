"""Model coverage as text: counts, and the table in gpu_worker/README.md between two markers."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from tests.census.case import Outcome, Result
from tests.census.population import Member

README = Path(__file__).parents[2] / "gpu_worker" / "README.md"
BEGIN, END = "<!-- census: make census ARGS=--write -->", "<!-- /census -->"
_COUNT = re.compile(r"^- Transformers (\S+?),.*$", re.MULTILINE)


def counts(outcomes: Sequence[Outcome], undeclared: Sequence[Member]) -> str:
    """The line of counts for this version of Transformers."""
    num = {result: sum(outcome.result is result for outcome in outcomes) for result in Result}
    total = len(outcomes) + len(undeclared)
    failed = f", {num[Result.FAILED]} **failed**" if num[Result.FAILED] else ""
    return (
        f"- Transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}: {total} classes; "
        f"{len(outcomes)} declare support: {num[Result.SERVED]} served, {num[Result.REFUSED]} refused{failed}; "
        f"{len(undeclared)} do not declare it"
    )


def table(outcomes: Sequence[Outcome], undeclared: Sequence[Member]) -> str:
    """Markdown: one row for each kind of served model, and for each reason of refusal."""
    groups: dict[Result, dict[str, list[str]]] = {result: defaultdict(list) for result in Result}
    for outcome in outcomes:
        groups[outcome.result][outcome.kind].append(outcome.member.model_type)
    lines = ["| | classes | model types |", "|---|---|---|"]
    for result, kinds in groups.items():
        for kind, types in sorted(kinds.items(), key=lambda item: -len(item[1])):
            lines.append(f"| {result}: {kind} | {len(types)} | {', '.join(types)} |")
    types = [member.model_type for member in undeclared]
    lines.append(
        f"| refused: no support declared for other attention implementations | {len(types)} | {', '.join(types)} |"
    )
    return "\n".join(lines)


def write_table(outcomes: Sequence[Outcome], undeclared: Sequence[Member]) -> None:
    """Replaces the text between the markers; counts of other versions of Transformers stay, and so does the table of a
    newer version."""
    text = README.read_text()
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    lines = {match.group(1): match.group(0) for match in _COUNT.finditer(old)}
    lines[transformers.__version__] = counts(outcomes, undeclared)
    order = sorted(lines, key=lambda version: [int(part) for part in re.findall(r"\d+", version)], reverse=True)
    newest = order[0] == transformers.__version__
    body = table(outcomes, undeclared) if newest else old[old.index("| |") :].strip()
    README.write_text(f"{before}{BEGIN}\n" + "\n".join(lines[v] for v in order) + f"\n\n{body}\n{END}{after}")
