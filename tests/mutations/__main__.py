"""Checks that the tests detect faults: `python -m tests.mutations [NAME …] [--group GROUP] [--jobs N] [--list]`.

Puts one fault at a time into the source and prints which check detected it, how, and after how long. The exit code is 1
if a mutation survived, and 2 if the unchanged source fails a check, because then a detection proves nothing.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.mutations.mutation import GROUPS, Mutation, every
from tests.mutations.runner import Check, Verdict, checks_of, checks_of_the_source, judge


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help="run only these mutations (default: all)")
    parser.add_argument("--group", action="append", choices=GROUPS, help="run only this group; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="number of mutations at once")
    parser.add_argument("--list", action="store_true", help="list the mutations and what each breaks")
    parser.add_argument("--each", action="store_true", help="run every check, even after one has failed")
    parser.add_argument("--trust-the-source", action="store_true", help="skip the checks of the unchanged source")
    args = parser.parse_args()
    known = [mutation for mutation in every() if not args.group or mutation.group in args.group]
    chosen = [mutation for mutation in known if not args.names or mutation.name in args.names]
    if unknown := set(args.names) - {mutation.name for mutation in known}:
        parser.error(f"unknown mutation: {', '.join(sorted(unknown))}; --list shows all")
    if args.list:
        print("\n".join(f"{mutation.group:12} {mutation.name:46} {mutation.breaks}" for mutation in chosen))
        return 0
    for mutation in chosen:
        mutation.applied()
    if not args.trust_the_source:
        verdict = judge(None, checks_of_the_source(chosen))
        print(f"{'the unchanged source':46} {_summary(verdict, 'passes')}", flush=True)
        if verdict.caught_by:
            return 2

    def groups_of(mutation: Mutation) -> tuple[tuple[Check, ...], ...]:
        """Each group of checks runs until one fails."""
        checks = checks_of(mutation)
        return tuple((check,) for check in checks) if args.each else (checks,)

    def judged(mutation: Mutation) -> list[Verdict]:
        return [judge(mutation, checks) for checks in groups_of(mutation)]

    survivors = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for mutation, verdicts in zip(chosen, pool.map(judged, chosen), strict=True):
            survivors += not any(verdict.caught_by for verdict in verdicts)
            for checks, verdict in zip(groups_of(mutation), verdicts, strict=True):
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
