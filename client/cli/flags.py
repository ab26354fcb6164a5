"""Flags that several commands share."""

from typing import Annotated

import typer

Address = Annotated[str, typer.Option("--address", "-a", envvar="TANDEM_ADDRESS", help="Where the service listens.")]
Json = Annotated[bool, typer.Option("--json", help="JSON for programs.")]
Model = Annotated[str | None, typer.Option(help="Refuse another model than this one.")]
Timeout = Annotated[float | None, typer.Option(min=0, help="Seconds until the call is given up.")]
