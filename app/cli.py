"""The `coterie` command. Each subcommand is imported only when it is run."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Annotated

import typer

from core.errors import CoterieError, SettingsError
from core.torch_environment import prepare_torch

EXIT_FAILURE = 1
EXIT_USAGE = 2


@dataclass(frozen=True, slots=True)
class Command:
    """Where a subcommand lives: `function` of `module`, a plain typer function."""

    module: str
    function: str
    summary: str


COMMANDS = {
    "serve": Command("app.commands.serve", "serve", "Serve a model over HTTP on Ray Serve."),
    "chat": Command("app.commands.chat", "chat", "Talk to a model in the terminal, without Ray."),
    "verify": Command("app.commands.verify", "verify", "Read a checkpoint and check its bytes."),
    "profile": Command("app.commands.profile", "profile", "Which experts your prompts use."),
    "replay": Command("app.commands.replay", "replay", "Replay recorded routing, by policy."),
    "bench": Command("app.commands.bench", "bench", "Put a running service under load."),
    "status": Command("app.commands.status", "status", "Ask a running service how it is."),
    "doctor": Command("app.commands.doctor", "doctor", "Check whether this machine can serve."),
}
GROUPS = {
    "config": (
        "The settings and where they come from.",
        {
            "show": Command(
                "app.commands.config", "show", "Every setting, and where its value came from."
            )
        },
    ),
    "domains": (
        "Teach the classifier of texts by domain, and test it.",
        {
            "train": Command("app.commands.domains", "train", "From labelled texts to weights."),
            "test": Command("app.commands.domains", "test", "Right guesses on labelled texts."),
            "guess": Command("app.commands.domains", "guess", "What one text is about."),
            "reload": Command("app.commands.domains", "reload", "Into a running service."),
        },
    ),
    "admin": (
        "Operate a running service: not through its public port, but through Ray.",
        {
            "requests": Command("app.commands.admin", "requests", "What waits and what runs."),
            "cancel": Command("app.commands.admin", "cancel", "End one request."),
            "drain": Command("app.commands.admin", "drain", "Finish what runs, refuse the rest."),
            "keys": Command("app.commands.keys", "keys", "Make, hash and reload API keys."),
        },
    ),
}
EXAMPLES = """
Serves Mixture-of-Experts models whose experts need not all fit in memory.

\b
  coterie serve ./demo_model                  the bundled model, port 8000
  coterie serve MODEL --expert-memory 8GiB    a folder or a cached hub id
  coterie chat MODEL                          in the terminal, without Ray
  coterie verify MODEL                        read all, learn checksums
  coterie config show MODEL                   every setting, and its origin
  coterie bench http://127.0.0.1:8000         put it under load
  coterie status                              how is the running service?
  coterie doctor MODEL                        can this machine serve it?
  coterie admin requests                      what runs there now?
"""


def _paragraphs(text: str) -> str:
    """A docstring as help text: paragraphs as one line each; examples (after \\b) as they are."""
    return "\n\n".join(
        part.removeprefix("\b\n") if part.startswith("\b") else " ".join(part.split())
        for part in inspect.cleandoc(text).split("\n\n")
    )


def _forward(command: Command) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        function = getattr(import_module(command.module), command.function)
        app.command(help=_paragraphs(function.__doc__ or command.summary))(function)
        code = typer.main.get_command(app).main(
            args=context.args, prog_name=context.command_path, standalone_mode=False
        )
        raise typer.Exit(code or 0)

    return run


def _register(app: typer.Typer, commands: dict[str, Command]) -> None:
    # The outer command takes any arguments as they are; the real one, once imported, reads them.
    untouched = {
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": [],
    }
    for name, command in commands.items():
        app.command(name, help=command.summary, context_settings=untouched)(_forward(command))


def _print_version(asked: bool) -> None:
    if asked:
        print(f"coterie {metadata.version('coterie')}")
        raise typer.Exit


def build_cli() -> typer.Typer:
    """The command line with all subcommands."""
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        help=_paragraphs(EXAMPLES),
    )

    @app.callback()
    def options(
        version: Annotated[
            bool,
            typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
        ] = False,
    ) -> None:
        pass

    _register(app, COMMANDS)
    for name, (summary, commands) in GROUPS.items():
        group = typer.Typer(add_completion=False, no_args_is_help=True, help=summary)
        _register(group, commands)
        app.add_typer(group, name=name)
    return app


def main(arguments: list[str] | None = None) -> None:
    """Entry point: runs and exits; a failure is one `error: ...` on stderr."""
    prepare_torch()
    try:
        code = typer.main.get_command(build_cli()).main(
            args=arguments, prog_name="coterie", standalone_mode=False
        )
    except typer.Exit as ended:
        code = ended.exit_code
    except typer.Abort:
        code = _fail("interrupted", EXIT_FAILURE)
    except typer.TyperException as error:
        # An empty message: help was asked for by giving no arguments, and has been printed.
        message = error.format_message()
        code = _fail(f"{message} (see coterie --help)", EXIT_USAGE) if message else EXIT_USAGE
    except SettingsError as error:
        code = _fail(str(error), EXIT_USAGE)
    except CoterieError as error:
        code = _fail(str(error), EXIT_FAILURE)
    except KeyboardInterrupt:
        code = _fail("interrupted", EXIT_FAILURE)
    sys.exit(code)


def _fail(message: str, code: int) -> int:
    for line in message.splitlines() or [""]:
        print(f"error: {line}", file=sys.stderr)
    return code
