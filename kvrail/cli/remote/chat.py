"""`kvrail chat`: a conversation with a running cluster, or one answer."""

import argparse
import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, TextIO

from kvrail.cli.flags import Commands, add_command, add_server, api_key
from kvrail.cli.remote.drafts import DraftScreen, shows_drafts
from kvrail.errors import ConfigError, KvrailError

if TYPE_CHECKING:
    from kvrail.cli.remote.client import ChatClient

SUMMARY = "talk to a running cluster"
EPILOG = """In a conversation: /help lists the commands, /quit or Ctrl-D ends it, Ctrl-C stops the current answer.

examples:
  kvrail chat                                      a conversation
  kvrail chat "What is a KV cache?"                one answer
  cat notes.txt | kvrail chat                      one answer to what stands on standard input
  kvrail chat --url http://gpu-host:8000 --system "Answer in one sentence." --temperature 0"""
HELP = """/reset   forget the conversation
/quit    end it; so do /exit and Ctrl-D
/help    this list
Ctrl-C stops an answer.
"""
INTERRUPTED = 130
SAMPLING = ("temperature", "top_p", "max_tokens", "seed")


def add_commands(commands: Commands) -> None:
    """Add `kvrail chat`."""
    with add_command(commands, "chat", SUMMARY, EPILOG, run, "[MESSAGE]") as parser:
        parser.add_argument(
            "message", nargs="*", metavar="MESSAGE", help="ask this and end; without it, a conversation"
        )
        add_server(parser.add_argument_group("server"))
        answer = parser.add_argument_group("answer")
        answer.add_argument("--system", metavar="TEXT", help="system message (default: none)")
        answer.add_argument("--temperature", type=float, metavar="X", help="0 is greedy (default: the server's)")
        answer.add_argument("--top-p", type=float, metavar="X", help="nucleus of tokens (default: the server's)")
        answer.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: the server's)")
        answer.add_argument("--seed", type=int, metavar="N", help="repeat an answer (default: a new one each time)")


def run(arguments: argparse.Namespace) -> int:
    """Chat; returns the exit status. Raises KvrailError where one answer was asked for and failed."""
    from kvrail.cli.remote.client import ChatClient

    options = {name: getattr(arguments, name) for name in SAMPLING if getattr(arguments, name) is not None}
    with closing(ChatClient(arguments.url, api_key(arguments))) as client:
        first = client.chosen(None)
        chat = Conversation(client, arguments.model or first, arguments.system, options)
        message = " ".join(arguments.message)
        if not message and not sys.stdin.isatty():
            message = sys.stdin.read().strip()
            if not message:
                raise ConfigError("standard input is empty; give a message, or a terminal for a conversation")
        try:
            if message:
                chat.ask(message, sys.stdout)
                return 0
            return converse(chat, sys.stdout)
        except KeyboardInterrupt:
            return INTERRUPTED


class Conversation:
    """What was said, and the next answer to it."""

    def __init__(self, client: "ChatClient", model: str, system: str | None, options: dict[str, float]) -> None:
        """options: sampling fields of the request, by their names in the API."""
        self.model = model
        self._client = client
        self._options = options
        self._head = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = []

    def ask(self, message: str, out: TextIO) -> None:
        """Write the answer to `message` as it comes, and remember both. A terminal also shows drafts, dimmed.

        A Ctrl-C closes the request, keeps what was answered until then, and is raised on. After an error the message
        is forgotten, so that it can be said again.
        """
        user = {"role": "user", "content": message}
        body: dict[str, Any] = {"model": self.model, "messages": [*self._head, *self.messages, user], **self._options}
        if shows_drafts(out):
            body["kvrail"] = {"provisional": True}
        screen, said = DraftScreen(out), []
        try:
            with closing(self._client.answer(body)) as updates:
                for update in updates:
                    if isinstance(update, str):
                        said.append(update)
                        screen.write(update)
                    else:
                        screen.news(update)
        except KeyboardInterrupt:
            self.messages += [user, {"role": "assistant", "content": "".join(said)}]
            raise
        finally:
            screen.close()
            out.write("\n")
        self.messages += [user, {"role": "assistant", "content": "".join(said)}]


def converse(chat: Conversation, out: TextIO) -> int:
    """Read messages from the terminal until /quit; returns the exit status."""
    with suppress(ImportError):
        import readline  # noqa: F401  # gives input() a history and line editing where the platform has it

    out.write(f"{chat.model}: /help lists the commands, /quit ends, Ctrl-C stops an answer\n")
    while True:
        try:
            message = input("> ").strip()
        except EOFError:
            out.write("\n")
            return 0
        except KeyboardInterrupt:
            out.write("\n(/quit ends)\n")
            continue
        if message in ("/quit", "/exit"):
            return 0
        if message == "/reset":
            chat.messages.clear()  # the system message is not among them
        elif message == "/help":
            out.write(HELP)
        elif message.startswith("/"):
            out.write(f"{message} is no command; /help lists them\n")
        elif message:
            _ask(chat, message, out)


def _ask(chat: Conversation, message: str, out: TextIO) -> None:
    try:
        chat.ask(message, out)
    except KeyboardInterrupt:
        out.write("(stopped)\n")
    except KvrailError as error:
        out.write(f"error: {error}\n")
