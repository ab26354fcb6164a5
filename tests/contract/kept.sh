#!/bin/sh
# Stands for the interpreter that starts a machine's programs.
exec "$KEPT_PYTHON" -P -S -m tests.contract.kept
