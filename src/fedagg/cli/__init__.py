"""The command line: one file per command, imported when it is used. Errors are one line on standard error and exit status 2."""

from __future__ import annotations

import inspect
import io
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

import fedagg
from fedagg.cli.process import leave
from fedagg.cli.show import err, out
from fedagg.config import FOREIGN_NAMES
from fedagg.errors import FedaggError, SettingError
from fedagg.files import reason

SPIN = "10000"  # iterations of a waiting loop, tens of microseconds; libgomp's default is 300,000
# The location of each command, and the first line of its help.
COMMANDS = {
    "run": ("train:run", "Train one federated model, and keep everything about it in a run folder."),
    "compare": ("compare:compare", "Run several methods side by side: one table, one plot, and a run folder each."),
    "tune": ("tune:tune", "Try a grid of settings on held-back training data, and name the best."),
    "sweep": ("tune:sweep", "Run a method over a grid of any settings, including the task's, and show how the result changes."),
    "list": ("catalogue:list_all", "Show algorithms, data sets, models, partitions, engines, trackers and presets."),
    "reproduce": ("reproduce:reproduce", "Run what a table or figure of the paper needs, and show it beside the paper's numbers."),
    "plot": ("plot:plot", "Draw figures of the paper from a results folder, or the curves of runs, as PNG, SVG and PDF."),
    "table": ("table:table", "Show the results of runs: means over seeds, differences from the first method, and costs."),
    "report": ("report:report", "Make a web page of runs or of a grid: curves, learning rates, drift, tables."),
    "export": ("export:export", "Write the trained network to a file that runs without fedagg, and check it by running it."),
    "watch": ("watch:watch", "Follow runs in a web page while they train: the page of `fedagg report`, kept up to date."),
    "bounds": ("bounds:bounds", "Repeat a run and compare it with the paper's bounds: constants, a table, CSV, JSON and PNG."),
    "partition": (
        "partition:partition",
        "Show how a data set is split: label counts, client sizes and three distances, also over σ.",
    ),
    "bench": ("bench:bench", "Time FedAvg's rounds: plain PyTorch loops, our engines, and your own loops."),
    "data": ("datasets:app", "Download and verify data sets, or show where they are."),
    "flower": ("flower:app", "A real federation on Flower: a project to start from, keys, nodes, runs."),
}


class Commands(TyperGroup):
    """Commands that are loaded when used: most need torch, which takes seconds to import."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] in COMMANDS:
            self.add_command(load(args[0], args[1:]), args[0])
        return super().resolve_command(ctx, args)


def load(name: str, arguments: Sequence[str] = ()) -> click.Command:
    """Load a command. Its options depend on the known methods, so plugins among the arguments are loaded first."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    found = getattr(import_module(f"fedagg.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(found).parameters.values()):
        from fedagg.cli.options import load_named, with_settings

        load_named(arguments)
        found = with_settings(found)
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(found)
    return typer.main.get_command(alone)


app = typer.Typer(
    name="fedagg",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, (_, _about) in COMMANDS.items():
    app.command(_name, help=_about)(lambda: None)  # for the help page; `Commands` loads the command itself


def version(asked: bool) -> None:
    if asked:
        out.print(fedagg.__version__, highlight=False)
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[bool, typer.Option("--version", help="Show the version and exit.", callback=version, is_eager=True)] = False,
) -> None:
    """Federated learning without a learning rate to choose."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point: everything that a user can fix becomes one line and exit status 2."""
    wait_briefly()
    warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}", "yellow")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape") and stream.encoding != "utf-8":
            stream.reconfigure(errors="replace")  # a terminal without μ shows a question mark, and the command continues
    words = arguments if arguments is not None else sys.argv[1:]
    try:
        refuse_empty(words)
        status = app(words, standalone_mode=False)
        sys.stdout.flush()  # here, because a closed pipe can still be reported
        leave(status if isinstance(status, int) else 0)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.NoSuchOption as error:
        word = error.option_name.lstrip("-").replace("-", "_")
        ours = f"--{FOREIGN_NAMES[word].replace('_', '-')}" if word in FOREIGN_NAMES else None
        complain(f"No such option {error.option_name!r}. Did you mean {ours!r}?" if ours else error.format_message())
    except click.ClickException as error:
        words = error.format_message().split(" Did you mean ")
        complain(" Did you mean ".join(dict.fromkeys(words)))  # click and typer both make a guess for a misspelt command
    except FedaggError as error:
        complain(str(error))
    except MemoryError:
        complain("out of memory; lower --chunk, --batch-size or --participation")
    except OSError as error:
        if error.filename is None:  # standard output: do not write to it again on exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        complain(f"{error.filename or 'standard output'}: cannot be read or written ({reason(error)})")
    except (KeyboardInterrupt, click.Abort):
        err.print("stopped")
        leave(130)


def wait_briefly() -> None:
    """Make torch's waiting threads sleep soon, instead of spinning for a millisecond on a core that another process needs. OpenMP
    reads this when torch is loaded, which no command has done yet. The user's own settings are kept."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPIN


def refuse_empty(words: list[str]) -> None:
    """Refuse empty arguments: they come from unset shell variables, and as a path would mean the current folder."""
    for before, word in zip(["", *words], words, strict=False):
        option, given, value = word.partition("=")
        if word == "" or (given and not value and word.startswith("--")):
            name = (option or before).lstrip("-") or "argument"
            raise SettingError(name, "", "is empty; give a value, or leave it out")


def say(message: str, style: str) -> None:
    """Print one line without markup, because file names may contain square brackets."""
    err.print(" ".join(message.split()), style=style, markup=False, highlight=False, soft_wrap=True)


def complain(message: str) -> None:
    say(f"fedagg: {message}", "red")
    leave(2)
