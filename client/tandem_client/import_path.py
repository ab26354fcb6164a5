"""Takes the working directory off the import path of the client's own programs: `python -m tandem_client...`, `tandem`.

The package imports this module first; else a file such as random.py in that folder would run with the rights of the
program. The processes that it starts leave the folder out as well. Changes nothing where another program imports the
package. Each program has its own, because what programs share could be such a file too.

Then it looks whether Python runs without assertions, because here every program passes. The package itself needs none.
"""

import os
import sys

_PACKAGE = __name__.partition(".")[0]
_COMMAND = "tandem"


def _is_module_of_package() -> bool:
    """Whether Python is about to run a module of the package because of -m."""
    # While Python looks for that module, argv has "-m" and the program's own arguments.
    if "-m" not in sys.argv[:1]:
        return False
    word = sys.orig_argv[-len(sys.argv)]
    # One word may have other options and -m, too.
    name = word.partition("m")[2] if word.startswith("-") else word
    return name.partition(".")[0] == _PACKAGE


def _is_command() -> bool:
    """Whether the program is the script that an installation makes of the package's command."""
    path = sys.argv[0] if sys.argv else ""
    if os.path.basename(path) != _COMMAND:
        return False
    try:
        with open(path, "rb") as script:
            return f"from {_PACKAGE}.cli.__main__ import".encode() in script.read()
    except OSError:
        return False


def _leave_working_directory(*, is_module: bool) -> None:
    if is_module and not sys.flags.safe_path:
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


if (_is_module := _is_module_of_package()) or _is_command():
    _leave_working_directory(is_module=_is_module)
    from tandem_contract.assertions import require_assertions

    require_assertions(_COMMAND)
