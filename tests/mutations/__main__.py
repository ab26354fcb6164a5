"""Are the proofs any good? `python -m tests.mutations [NAME …] [--jobs N] [--list] [--each]`.

Breaks the core on purpose, one way at a time, and says which proof noticed, how and after how long. The exit code is 1
where a mutation survived, and 2 where the source as it is does not pass: then nothing that is caught means anything.
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
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at once")
    parser.add_argument("--list", action="store_true", help="tell the names and what each breaks")
    parser.add_argument("--each", action="store_true", help="run every proof, also after one has failed")
    parser.add_argument("--trust-the-source", action="store_true", help="do not run the proofs on the source as it is")
    args = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if not args.names or mutation.name in args.names]
    unknown = set(args.names) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        parser.error(f"no such mutation: {', '.join(sorted(unknown))}; --list tells all")
    if args.list:
        print("\n".join(f"{mutation.name:46} {mutation.breaks}" for mutation in chosen))
        return 0
    for mutation in chosen:
        mutated(mutation, (ROOT / mutation.path).read_text())
    if not args.trust_the_source:
        verdict = judge(None, _BOTH)
        print(f"{'the source as it is':46} {_told(verdict, 'holds')}", flush=True)
        if verdict.caught_by:
            return 2
    # Each group of proofs is run until one of it fails.
    groups = tuple((proof,) for proof in _BOTH) if args.each else (_BOTH,)

    def judged(mutation: Mutation) -> list[Verdict]:
        return [judge(mutation, proofs) for proofs in groups]

    survivors = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for mutation, verdicts in zip(chosen, pool.map(judged, chosen), strict=True):
            survivors += not any(verdict.caught_by for verdict in verdicts)
            for proofs, verdict in zip(groups, verdicts, strict=True):
                told = _told(verdict, "SURVIVED " + " and ".join(proof.name for proof in proofs))
                print(f"{mutation.name:46} {told}", flush=True)
    print(f"{len(chosen)} mutations, {survivors} survived")
    return 1 if survivors else 0


def _told(verdict: Verdict, otherwise: str) -> str:
    if not verdict.caught_by:
        return f"{otherwise}, {verdict.seconds:.0f} s"
    return f"caught by {verdict.caught_by} after {verdict.seconds:.1f} s: {verdict.detail}"


if __name__ == "__main__":
    sys.exit(main())
