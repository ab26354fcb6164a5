"""Takes the working directory off the import path of a program that was started without Python's -P.

Each program imports this module first; else a file such as random.py in that folder would run with the rights of the
service. The processes that it starts, by its libraries too, leave the folder out as well. Does nothing where another
program imports it. Each program has its own, because what programs share could be such a file too.

Then it looks whether Python runs without assertions, because here every program passes.
"""

import os
import sys


def _is_program(package: str) -> bool:
    spec = sys.modules["__main__"].__spec__
    return spec is not None and spec.name.partition(".")[0] == package


def _leave_working_directory() -> None:
    if not sys.flags.safe_path:
        # The folder that `python -m` puts there.
        del sys.path[0]
    os.environ["PYTHONSAFEPATH"] = "1"
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if "" in named and len(named) > 1:
        # An empty entry means the working directory, although it is most often an empty variable in a shell's line.
        kept = list(filter(None, named))
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)
        here = os.getcwd()
        if here not in map(os.path.abspath, kept):
            sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]


if _is_program(_package := __name__.partition(".")[0]):
    _leave_working_directory()
    from tandem_contract.assertions import require_assertions

    require_assertions(_package)
