"""`python -m scheduler_svc.kv_lab`: the KV-cache lab alone. Owns nothing."""

import argparse

from scheduler_svc.kv_lab.command import add_arguments, run


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scheduler_svc.kv_lab", description=__doc__)
    add_arguments(parser)
    raise SystemExit(run(parser.parse_args()))


if __name__ == "__main__":
    main()
