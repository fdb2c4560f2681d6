"""The command line. One file a command; errors are one line on standard error and exit status 2."""

from __future__ import annotations

import io
import sys
import warnings
from typing import Annotated

import click
import typer

import fedagg
from fedagg.cli import bench, bounds, catalogue, compare, datasets, flower, partition, plot, report, reproduce, train
from fedagg.cli.process import leave
from fedagg.cli.show import err, out
from fedagg.config import ELSEWHERE
from fedagg.errors import FedaggError

app = typer.Typer(
    name="fedagg",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(train.run)
app.command("compare")(compare.compare)
app.command("list")(catalogue.list_all)
app.command("reproduce")(reproduce.reproduce)
app.command("plot")(plot.plot)
app.command("report")(report.report)
app.command("bounds")(bounds.bounds)
app.command("partition")(partition.partition)
app.command("bench")(bench.bench)
app.add_typer(datasets.app, name="data")
app.add_typer(flower.app, name="flower")


def version(asked: bool) -> None:
    if asked:
        out.print(fedagg.__version__, highlight=False)
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[bool, typer.Option("--version", help="Show the version and exit.", callback=version, is_eager=True)] = False,
) -> None:
    """Federated learning with learning rates in closed form."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point: everything a user can mend becomes one line and exit status 2."""
    warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}", "yellow")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape") and stream.encoding != "utf-8":
            stream.reconfigure(errors="replace")  # a terminal that has no μ shows a question mark, and the command goes on
    try:
        status = app(arguments if arguments is not None else sys.argv[1:], standalone_mode=False)
        leave(status if isinstance(status, int) else 0)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.NoSuchOption as error:
        word = error.option_name.lstrip("-").replace("-", "_")
        ours = f"--{ELSEWHERE[word].replace('_', '-')}" if word in ELSEWHERE else None
        complain(f"No such option {error.option_name!r}. Did you mean {ours!r}?" if ours else error.format_message())
    except click.ClickException as error:
        words = error.format_message().split(" Did you mean ")
        complain(" Did you mean ".join(dict.fromkeys(words)))  # click and typer both guess at a misspelt command
    except FedaggError as error:
        complain(str(error))
    except MemoryError:
        complain("out of memory; lower --chunk, --batch-size or --clients, then go on with --resume")
    except (KeyboardInterrupt, click.Abort):
        err.print("stopped")
        leave(130)


def say(message: str, style: str) -> None:
    """One line, as it is: names of files may hold anything, square brackets too."""
    err.print(" ".join(message.split()), style=style, markup=False, highlight=False, soft_wrap=True)


def complain(message: str) -> None:
    say(f"fedagg: {message}", "red")
    leave(2)
