"""`python -P -m tandem_client.gateway`: the OpenAI-compatible HTTP gateway.

Exit codes: 0 after a stop, 2 for wrong settings, 1 for other failures.
"""

import gc
import logging
import os
import sys
from importlib.util import find_spec

from tandem_contract import logs, stopping
from tandem_contract.child import die_with_parent
from tandem_contract.needed import ends_with_needed
from tandem_contract.version import how_to_install

log = logging.getLogger("tandem.gateway")


@ends_with_needed("gateway")
def main() -> int:
    stopping.begin()
    logs.open_closed_streams()
    # gRPC's library would write lines of its own form between those of the log.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if missing := [name for name in ("pydantic", "starlette", "uvicorn") if find_spec(name) is None]:
        print(f"gateway: {missing[0]} is missing; install it with: {how_to_install('gateway')}", file=sys.stderr)
        return 2
    # The modules that need them.
    from tandem_client.gateway.settings import PROGRAM
    from tandem_contract.settings import SettingError, refused

    arguments = sys.argv[1:]
    try:
        settings = PROGRAM.read(arguments, os.environ)
        from tandem_client.gateway import server

        if settings.exit_with_parent:
            die_with_parent()
        logs.start("gateway", level=settings.log_level, log_format=settings.log_format)
        # It reports what clients do wrong, and its own start and end.
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        # One process among several leaves the lines to their parent.
        for line in PROGRAM.warnings(os.environ) if settings.table is None else ():
            log.warning("%s", line)
        with server.bind(settings) as bound:
            if settings.processes > 1:
                code = server.run(settings, bound, arguments)
            else:
                # A collection of all that was imported takes some 50 ms, in which no stream goes on.
                gc.collect()
                gc.freeze()
                code = server.serve(settings, bound)
    except SettingError as error:
        return refused("gateway", error)
    stopping.end()
    return code


if __name__ == "__main__":
    sys.exit(main())
