"""`tandem chat`: a conversation on a terminal, or one turn of it for a pipe.

Owns the flags and the choice between both. `cli/chat` has the conversation.
"""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem_client.cli import flags
from tandem_client.cli.flags import CHAT, OUTPUT, SAMPLING, STOPPING, Service, connects, flag, option, parameter
from tandem_client.cli.reporting import Exit, fail, reported

if TYPE_CHECKING:
    from tandem_client.cli.chat.session import Session

EXAMPLES = """
Examples:
  tandem chat --system "Answer in one sentence."
  git diff | tandem chat "Review this change." """

_MESSAGE = typer.Argument(metavar="MESSAGE", help="One message: its answer is printed. Without it, a conversation.")
_chat, _sampling = partial(flag, CHAT), partial(flag, SAMPLING)
_MAX_TOKENS = "Longest answer, in tokens. Default: the service's, see tandem info."

_PARAMETERS = (
    parameter("message", Annotated[str | None, _MESSAGE]),
    _chat(str, "--system TEXT", "The system's message."),
    _chat(Path, "--file -f FILE", "Begin with this file: a conversation of /save, or the text of a message."),
    _chat(str, "--tools JSON", "Tools that the model may call, as tandem generate takes them; you type their results."),
    _chat(str, "--template-args JSON", "Arguments of the template, such as '{\"enable_thinking\": false}'."),
    _chat(bool, "--no-history", "Do not keep what is typed for the next conversation.", False),
    parameter("model", flags.Model),
    _sampling(float, "--temperature -t X", "0 always takes the most probable token. Default: the model's."),
    _sampling(float, "--top-p P", "Sample from the most probable tokens that together reach P. Default: the model's."),
    _sampling(int, "--seed N", "The same seed gives the same answers. Default: random."),
    flag(STOPPING, int, "--max-new-tokens -n N", _MAX_TOKENS),
    parameter(
        "as_json", Annotated[bool, option(OUTPUT, "--json", "Of one turn: print one JSON message per line.")], False
    ),
    parameter("service", Service),
)


@connects
@flags.takes(_PARAMETERS)
def chat(
    *,
    message: str | None,
    system: str | None,
    file: Path | None,
    no_history: bool,
    as_json: bool,
    service: Service,
    **options: Any,
) -> None:
    """Talk with the model; with MESSAGE or piped input, print one answer."""
    from tandem_client.cli.chat.session import Session

    with reported(of_generate=True):
        options["tools"] = flags.read_json("--tools", options["tools"], list)
        options["template_args"] = flags.read_json("--template-args", options["template_args"], dict)
        settings = {name: value for name, value in options.items() if value is not None}
        session = Session(system=system, settings=settings)
        first = _begin(session, file, system)
        if message is not None or not sys.stdin.isatty():
            piped = "" if sys.stdin.isatty() else flags.read_text().strip("\n")
            _one_turn(service, session, [first, message or "", piped], as_json=as_json)
            return
        if as_json:
            raise fail("--json needs MESSAGE or piped input", Exit.USAGE)
        # The libraries of a conversation take 0.15 s to import, which no other command needs.
        import asyncio

        from tandem_client.cli.chat.loop import converse

        asyncio.run(converse(service.async_client(), session, first, with_history=not no_history))


def _begin(session: "Session", file: Path | None, system: str | None) -> str:
    """Reads the file. Returns it as a message unless it is a conversation."""
    if file is None:
        return ""
    try:
        text = session.load(file)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    if text is None and system is not None:
        session.system = system
    return text or ""


def _one_turn(service: Service, session: "Session", texts: list[str], *, as_json: bool) -> None:
    text = "\n\n".join(filter(None, texts))
    if not text:
        raise ValueError("the message is empty; at least 1 character is needed")
    session.say(text)
    # Imported only here, because it brings rich.
    from tandem_client.cli.chat.session import check
    from tandem_client.cli.show import print_json, print_text

    with service.client() as client:
        check(client.model_info())
        with client.generate(chat=session.messages, resume=True, **session.settings) as stream:
            if as_json:
                print_json(stream)
            else:
                print_text(stream, ids=False, with_figures=False, asked=session.settings.get("max_new_tokens"))
