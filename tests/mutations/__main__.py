"""Checks that the tests detect faults: `python -m tests.mutations [NAME …] [--jobs N] [--list] [--each]`.

Puts one fault at a time into the core and prints which check detected it, how, and after how long. The exit code is 1
if a mutation survived, and 2 if the unchanged source fails a check, because then a detection proves nothing.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.mutations.mutations import MUTATIONS, Mutation
from tests.mutations.runner import CORE_TESTS, ROOT, SIMULATION, Verdict, judge, mutated

_BOTH = (SIMULATION, CORE_TESTS)


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help="run only these mutations (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="number of mutations at once")
    parser.add_argument("--list", action="store_true", help="list the mutations and what each breaks")
    parser.add_argument("--each", action="store_true", help="run every check, even after one has failed")
    parser.add_argument("--trust-the-source", action="store_true", help="skip the checks of the unchanged source")
    args = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if not args.names or mutation.name in args.names]
    unknown = set(args.names) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        parser.error(f"unknown mutation: {', '.join(sorted(unknown))}; --list shows all")
    if args.list:
        print("\n".join(f"{mutation.name:46} {mutation.breaks}" for mutation in chosen))
        return 0
    for mutation in chosen:
        mutated(mutation, (ROOT / mutation.path).read_text())
    if not args.trust_the_source:
        verdict = judge(None, _BOTH)
        print(f"{'the unchanged source':46} {_summary(verdict, 'passes')}", flush=True)
        if verdict.caught_by:
            return 2
    # Each group of checks runs until one fails.
    groups = tuple((check,) for check in _BOTH) if args.each else (_BOTH,)

    def judged(mutation: Mutation) -> list[Verdict]:
        return [judge(mutation, checks) for checks in groups]

    survivors = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for mutation, verdicts in zip(chosen, pool.map(judged, chosen), strict=True):
            survivors += not any(verdict.caught_by for verdict in verdicts)
            for checks, verdict in zip(groups, verdicts, strict=True):
                line = _summary(verdict, "SURVIVED " + " and ".join(check.name for check in checks))
                print(f"{mutation.name:46} {line}", flush=True)
    print(f"{len(chosen)} mutations, {survivors} survived")
    return 1 if survivors else 0


def _summary(verdict: Verdict, otherwise: str) -> str:
    if not verdict.caught_by:
        return f"{otherwise}, {verdict.seconds:.0f} s"
    return f"caught by {verdict.caught_by} after {verdict.seconds:.1f} s: {verdict.detail}"


if __name__ == "__main__":
    sys.exit(main())
