"""Puts a conversation together: its client, its terminal, its history."""

import os
import sys

from prompt_toolkit.output import create_output

from tandem_client.async_client import AsyncClient
from tandem_client.cli.chat import files
from tandem_client.cli.chat.loop import Loop
from tandem_client.cli.chat.reader import Reader
from tandem_client.cli.chat.refusal import check
from tandem_client.cli.chat.screen import new_console, new_screen
from tandem_client.cli.chat.session import Session
from tandem_client.cli.chat.terminal import without_echo


async def converse(client: AsyncClient, session: Session, first: str, *, with_history: bool) -> None:
    """Talks on the terminal of this process until the person leaves. `first`: a message that is sent at once.

    Raises TandemError if the service cannot be reached at the start, or serves no chats.
    """
    async with client:
        model = await client.model_info()
        check(model)
        path = files.history_path(os.environ) if with_history else None
        # If the answers go into a file, the prompt goes to the terminal.
        reader = Reader(path, output=None if sys.stdout.isatty() else create_output(stdout=sys.stderr))
        with without_echo():
            await Loop(client, session, new_screen(new_console()), reader, model).run(first)
