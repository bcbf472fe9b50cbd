"""The application: its commands, its exit codes, and what a user sees when something goes wrong."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from rpadiag import __version__
from rpadiag.cli import completion
from rpadiag.cli.bisect import bisect
from rpadiag.cli.capture import capture
from rpadiag.cli.compare import compare
from rpadiag.cli.demo import demo
from rpadiag.cli.doctor import doctor
from rpadiag.cli.examples import examples
from rpadiag.cli.fingerprint import fingerprint
from rpadiag.cli.report import report
from rpadiag.cli.rollouts import rollouts
from rpadiag.errors import EXIT_BUG, EXIT_OK, EXIT_UNANSWERABLE, RpadiagError
from rpadiag.printable import printable

EXIT_INTERRUPTED = 130  # what shells use for SIGINT

# Plain help: rich's markup would eat the brackets of site patterns.
app = typer.Typer(
    name="rpadiag",
    help="Where, why and how much a trainer's and a rollout engine's forward passes of the same weights disagree.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"rpadiag {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback with every error.")] = False,
) -> None:
    del version, debug


def _add(function: Callable[..., None], short_help: str) -> None:
    name = function.__name__
    app.command(name, short_help=short_help, epilog=examples(name))(function)


_add(compare, "Hold both stacks against each other: verdict and evidence.")
_add(bisect, "Attribute the divergence to regions, with error bars.")
_add(capture, "Keep what one stack computed, to compare it elsewhere.")
_add(fingerprint, "Name the rounding contract that kernels follow.")
_add(report, "Draw runs into one HTML file; gates, Markdown, JUnit.")
_add(rollouts, "Check and measure recorded rollouts.")
_add(demo, "Compare, bisect and report on a small model.")
_add(doctor, "Show what works here and how to install the rest.")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; nothing escapes but ``SystemExit`` of the interpreter."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = typer.main.get_command(app)
    if completion.asked():
        command.main(args=[], prog_name="rpadiag")  # prints completions and leaves
    try:
        with command.make_context("rpadiag", list(given)) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as left:
        return left.exit_code
    except typer.TyperException as error:  # a usage error of the parser
        return _usage(error)
    except RpadiagError as error:
        return _expected(error, debug=_debugging(given))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return _closed_pipe()
    except Exception as error:
        return _bug(error, debug=_debugging(given))
    return EXIT_OK


def _debugging(given: Sequence[str]) -> bool:
    """Whether --debug stands before the command; read by hand, because an error may come before parsing ends."""
    for argument in given:
        if not argument.startswith("-"):
            return False
        if argument == "--debug":
            return True
    return False


def _usage(error: Any) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the whole help text
        print(error.format_message(), file=sys.stderr)
        return EXIT_UNANSWERABLE
    near = _near_options(error)
    message = error.message if near else error.format_message()
    print(f"error: {message[:1].lower()}{message[1:].rstrip('.')}", file=sys.stderr)
    if near:
        print(f"hint: did you mean {' or '.join(near)}?", file=sys.stderr)
    context = getattr(error, "ctx", None)
    print(f"hint: {context.command_path if context else 'rpadiag'} --help", file=sys.stderr)
    return EXIT_UNANSWERABLE


def _near_options(error: Any) -> list[str]:
    """Options of the command that an unknown one may stand for: begun like it, else spelt like it, else an abbreviation of it."""
    given = str(getattr(error, "option_name", None) or "").removeprefix("--")
    if type(error).__name__ != "NoSuchOption" or not given or given.startswith("-"):
        return []
    known = [o.removeprefix("--") for p in error.ctx.command.params for o in p.opts if o.startswith("--")]
    found = (
        [name for name in known if name.startswith(given)]
        or difflib.get_close_matches(given, known, n=2)
        or [name for name in known if _abbreviates(given, name)]
    )
    return [f"--{name}" for name in found]


def _abbreviates(short: str, name: str) -> bool:
    """Whether ``short`` is the first letter of ``name`` and later ones in their order, as md is of markdown."""
    rest = iter(name)
    return name[:1] == short[:1] and all(letter in rest for letter in short)


def _expected(error: RpadiagError, *, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exception(error)
    print(f"error: {printable(error.message)}", file=sys.stderr)
    if error.detail:
        print(printable(error.detail), file=sys.stderr)
    if error.hint:
        print(f"hint: {printable(error.hint)}", file=sys.stderr)
    return error.exit_code


def _closed_pipe() -> int:
    """The reader of our output went away (``| head``): nothing is wrong, and nothing more can be said."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at exit
    return EXIT_OK


def _bug(error: Exception, *, debug: bool) -> int:
    import tempfile
    import traceback

    print(f"error: this is a bug in rpadiag: {type(error).__name__}: {error}", file=sys.stderr)
    if debug:
        traceback.print_exception(error)
        return EXIT_BUG
    try:
        with tempfile.NamedTemporaryFile("w", prefix="rpadiag-bug-", suffix=".txt", delete=False) as file:
            traceback.print_exception(error, file=file)
        where = f"the traceback is in {file.name}"
    except OSError:
        where = "rerun as `rpadiag --debug ...` for the traceback"
    print(f"{where}\nhint: report it with that traceback and the output of rpadiag doctor", file=sys.stderr)
    return EXIT_BUG
