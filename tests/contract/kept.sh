#!/bin/sh
# Stands for the interpreter that starts a machine's programs.
exec "$KEPT_PYTHON" -P -m tests.contract.kept
