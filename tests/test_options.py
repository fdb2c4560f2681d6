"""Options belong to methods: declared in their files, checked against the method that is chosen, and never swallowed."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import tomli_w

import fedagg
import tiny
from fedagg import Algorithm, cli, option, register
from fedagg.algorithms import REGISTRY
from fedagg.algorithms.base import RESERVED
from fedagg.algorithms.fedprox import FedProx
from fedagg.cli import train
from fedagg.clients import Clients
from fedagg.config import PRESETS, Config, make, read, resolve, resolve_each
from fedagg.errors import FedaggError, FedaggWarning, SettingError
from fedagg.options import declared
from fedagg.work import Work

TINY = ["--rounds", "1", "--clients", "20", "--participation", "0.1", "--epochs", "1", "--quiet"]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Methods that a test registers are forgotten after it."""
    known = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(known)


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    assert isinstance(stop.value.code, int)
    return stop.value.code


@dataclass
class Halved(Algorithm):
    """Steps of a share of the rate."""

    share: float = option(0.5, "share of the rate", gt=0, le=1)
    how: Literal["all", "first"] = "all"
    times: int = 1
    label: str | None = None
    plan: list[float] = field(default_factory=list)

    def work(self, clients: Clients) -> Work:
        work = super().work(clients)
        return replace(work, rate=self.share * work.rate)


def rates(result: fedagg.Result) -> list[float]:
    return [rate for row in result.history for rate in row["rate_mean"]]


# --- declarations


def test_a_declaration_says_default_range_and_meaning() -> None:
    mu = declared(FedProx)["mu"]
    assert (mu.kind, mu.default, dict(mu.limits), mu.choices) == (float, 0.01, {"ge": 0}, ())
    own = declared(Halved)
    assert list(own) == ["share", "how", "times", "label"]  # a list cannot be said in a word, and `lr` is every run's
    assert (own["how"].choices, own["label"].optional, own["times"].kind) == (("all", "first"), True, int)


def test_only_what_was_given_is_passed_and_the_methods_default_holds_otherwise() -> None:
    register("halved")(Halved)
    assert rates(tiny.job(algorithm="halved", rounds=1)) == pytest.approx([0.05, 0.05])
    assert rates(tiny.job(algorithm="halved", share=0.25, rounds=1)) == pytest.approx([0.025, 0.025])
    assert make({"algorithm": "halved", "share": 0.25}).options == {"share": 0.25, "how": "all", "times": 1, "label": None}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"share": 2.0}, "share = 2.0: input should be less than or equal to 1 (share of the rate)"),
        ({"share": float("nan")}, "share = nan: give a number below 3.4e+38"),
        ({"share": True}, "share = True: give a number"),
        ({"how": "last"}, "how = 'last': choose one of all, first"),
        ({"times": 1.5}, "times = 1.5: input should be a valid integer"),
        ({"tims": 2}, "setting = 'tims': did you mean 'times'?"),
    ],
)
def test_a_value_is_checked_as_the_method_says(given: dict[str, Any], words: str) -> None:
    register("halved")(Halved)
    with pytest.raises(SettingError) as refused:
        make({"algorithm": "halved", **given})
    assert str(refused.value).startswith(words)


def test_the_same_name_may_mean_different_things_to_two_methods() -> None:
    assert make({"algorithm": "fedadam"}).options["beta1"] == 0.9
    assert make({"algorithm": "fedadagrad"}).options["beta1"] == 0.0
    adam = make({"algorithm": "fedadam", "beta1": 0.8, "tau": 0.1})
    assert adam.changed(rounds=3).options == adam.options
    assert adam.changed(algorithm="fedadagrad").options == {"server_lr": 0.01, "beta1": 0.0, "tau": 1e-3}  # its own


# --- what the method does not have

REFUSED = [
    ("--algorithm fedavg --mu 5", "mu = 5.0: fedavg has no such option; fedprox has"),
    (
        "--algorithm fedavg --server-lr 7",
        "server_lr = 7.0: fedavg has no such option; fedadagrad, fedadam, fedavgm and fedyogi have",
    ),
    ("--algorithm fedadagrad --beta2 0.9", "beta2 = 0.9: fedadagrad has no such option; fedadam and fedyogi have"),
    ("--passes 3", "passes = 3: fedagg has no such option; fedagg-paper has"),
    ("--variant paper --pace base", "pace = 'base': fedagg-paper has no such option; fedagg has"),
    (
        "--algorithm fedavg --partition dirichlet --alpha 0.3",
        "alpha = 0.3: fedavg has no such option; fedagg and fedagg-paper have; the concentration of the Dirichlet partition is",
    ),
    ("--sigma 0.3", "sigma = 0.3: the iid partition has no such setting; dirichlet and dirichlet-class have"),
    ("--partition dirichlet --shards 3", "shards = 3: the dirichlet partition has no such setting; shards has"),
    ("--direction aggregated", "direction = 'aggregated': needs --variant paper"),
    ("--algorithm fedavg --variant paper", "variant = 'paper': fedavg has only one; leave it out"),
    ("--variant papr", "variant = 'papr': choose one of default, paper"),
]


@pytest.mark.parametrize(("line", "words"), REFUSED)
def test_options_that_would_be_ignored_are_refused(
    line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("run", *line.split()) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"fedagg: {words}")
    assert told.count("\n") == 1
    flags = iter(line.split())
    given = {flag[2:].replace("-", "_"): value for flag, value in zip(flags, flags, strict=True)}
    numbers = {name: json.loads(value) if value[0].isdigit() else value for name, value in given.items()}
    (tmp_path / "c.toml").write_text(tomli_w.dumps(numbers))
    with pytest.raises(SettingError, match=r"no such|needs|leave it out|choose"):
        resolve({}, tmp_path / "c.toml")


def test_alpha_beside_a_dirichlet_partition_is_remarked_upon() -> None:
    with pytest.warns(FedaggWarning, match="alpha is fedagg's own; .* is sigma, 0.6 here"):
        assert resolve({"partition": "dirichlet", "alpha": 0.3}).options["alpha"] == 0.3
    resolve({"partition": "dirichlet", "alpha": 0.3, "sigma": 0.6})  # both were said: no remark
    resolve({"partition": "dirichlet"}, preset="mnist-linear")  # the preset's α was not


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_for_every_method(preset: str) -> None:
    for method in REGISTRY:
        resolve({"algorithm": method}, preset=preset)


def test_compare_gives_an_option_to_those_that_have_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prox, avg = resolve_each(["fedprox", "fedavg"], {"mu": 0.3, "rounds": 2})
    assert (prox.options, avg.options, avg.rounds) == ({"mu": 0.3}, {}, 2)
    assert call("compare", "fedavg,fedadam", "--mu", "5", "--out", str(tmp_path / "c")) == 2
    assert capsys.readouterr().err == "fedagg: mu = 5.0: fedavg and fedadam have no such option; fedprox has\n"
    with pytest.raises(SettingError, match="algorithm = 'fedpro'"):
        resolve_each(["fedavg", "fedpro"], {"mu": 5})


# --- records


def test_a_record_lists_what_applies_and_repeats_the_run(tmp_path: Path) -> None:
    config = Config(algorithm="fedprox", partition="dirichlet", sigma=0.3, mu=0.2)
    written = config.toml()
    (tmp_path / "config.toml").write_text(written)
    assert "mu = 0.2\n" in written
    assert "sigma = 0.3\n" in written
    assert not any(name in written for name in ("shards", "alpha", "options", "plugin", "tolerance"))
    assert resolve({}, tmp_path / "config.toml") == config


def test_records_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """They list options of FedAgg and settings of every partition, whatever the run was."""
    old = {"algorithm": "fedavg", "variant": "default", "partition": "iid", "sigma": 0.6, "shards": 2, "alpha": 0.1}
    old |= {"tolerance": 1e-3, "passes": 1, "cap": 1.0, "downlink_bits": 32}
    (tmp_path / "config.toml").write_text(tomli_w.dumps(old))
    assert make(read(tmp_path / "config.toml")) == Config(algorithm="fedavg")
    assert make(old | {"algorithm": "fedprox", "mu": 0.5}).options == {"mu": 0.5}
    paper = make(old | {"algorithm": "fedagg", "variant": "paper", "passes": 4})
    assert (paper.method, paper.options["passes"]) == ("fedagg-paper", 4)
    # Options that a method had once are still shown of a run that was made with them.
    assert make(old | {"algorithm": "fedagg", "former": 3}, recorded=True).options["former"] == 3


def test_a_record_of_the_papers_version_hides_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has some of the names that mark a record of an earlier version, as options of its own."""
    written = Config(algorithm="fedagg", variant="paper", rounds=1).toml()
    (tmp_path / "paper.toml").write_text(written)
    assert call("run", str(tmp_path / "paper.toml"), "--mu", "5") == 2
    assert "mu = 5.0: fedagg-paper has no such option" in capsys.readouterr().err
    (tmp_path / "typo.toml").write_text(written + "roundz = 7\n")
    assert call("run", str(tmp_path / "typo.toml")) == 2
    assert "setting = 'roundz': did you mean 'rounds'?" in capsys.readouterr().err


# --- registering


def test_a_field_with_the_name_of_a_setting_is_refused() -> None:
    @dataclass
    class Heavy(Algorithm):
        momentum: float = 0.9

    with pytest.raises(SettingError, match=r"algorithm = 'heavy': .*Heavy.momentum has the name of a setting of every run"):
        register("heavy")(Heavy)
    with pytest.raises(SettingError, match=r"algorithm = 'Heavy': .*Heavy.momentum has the name of a setting of every run"):
        fedagg.run(algorithm=Heavy(), rounds=1)

    @dataclass
    class Eager(Algorithm):
        lr: float = 0.5

    with pytest.raises(SettingError, match=r"Eager.lr is a setting of every run, 0.01 by default"):
        register("eager")(Eager)

    @dataclass(kw_only=True)
    class Open(Algorithm):
        share: float

    with pytest.raises(SettingError, match=r"Open.share has no default"):
        register("open")(Open)
    assert not {"heavy", "eager", "open"} & REGISTRY.keys()


def test_a_name_is_taken_once() -> None:
    with pytest.raises(SettingError, match=r"'fedavg': is taken by fedagg.algorithms.fedavg.FedAvg; choose another name for "):
        register("fedavg")(Halved)
    assert REGISTRY["fedavg"].__name__ == "FedAvg"

    def once(share: float) -> type[Algorithm]:
        @dataclass
        class Again(Algorithm):
            portion: float = share

        return Again

    register("again")(once(0.1))
    newer = register("again")(once(0.2))  # as a cell of a notebook does that is run twice
    assert REGISTRY["again"] is newer


@pytest.mark.parametrize("name", ["", "custom", "two words", "a,b", "a/b"])
def test_a_name_can_be_written_on_a_command_line(name: str) -> None:
    with pytest.raises(SettingError, match="a name is a word"):
        register(name)(Halved)


def test_what_is_not_a_method_is_not_registered() -> None:
    wrong: Callable[..., Any] = register("wrong")
    with pytest.raises(SettingError, match=r"is not a subclass of fedagg.Algorithm"):
        wrong(dict)


def test_names_that_a_run_uses_are_reserved() -> None:
    """All parameters of `fedagg.run`, and those of its command that are no settings."""
    of_command = {word for word in inspect.signature(train.run).parameters if word not in ("settings", "as_json", "out_dir")}
    taken = {*inspect.signature(fedagg.run).parameters, *of_command, "json"} - {"settings"}
    assert taken - Config.model_fields.keys() <= RESERVED <= taken | Config.model_fields.keys()
    for name in ("preset", "out", "round"):
        one = make_dataclass("One", [(name, float, field(default=0.5))], bases=(Algorithm,))
        with pytest.raises(SettingError, match=rf"One.{name} (has|hides) .*; choose another name for the field"):
            register("one")(one)


def test_options_that_would_vanish_are_refused() -> None:
    class Bare(Algorithm):
        kind: ClassVar[str] = "bare"
        share: float = option(0.5, "share of the rate")

    with pytest.raises(SettingError, match=r"Bare.share is no option: .* write @dataclass right above it"):
        register("bare")(Bare)

    @dataclass
    class Capped(Algorithm):
        cap: float | None = 0.5

    with pytest.raises(SettingError, match=r"Capped.cap may be None, so None must be its default and may mean 0.5"):
        register("capped")(Capped)


# --- objects


def test_an_object_keeps_what_its_author_gave_it() -> None:
    class Own(Algorithm):
        def __init__(self, shares: list[float]) -> None:
            super().__init__()
            self.shares = shares

        def work(self, clients: Clients) -> Work:
            return replace(super().work(clients), rate=clients.constant(self.shares[clients.t] * self.lr))

    own = Own([0.5, 0.25])
    own.shares[1] = 0.1
    assert rates(tiny.job(algorithm=own, rounds=2, epochs=1)) == pytest.approx([0.05, 0.01])
    assert own.state == {}


def test_a_value_worked_out_from_an_option_follows_it() -> None:
    @dataclass
    class Doubled(Algorithm):
        share: float = 0.5

        def __post_init__(self) -> None:
            self.twice = 2 * self.lr * self.share

        def work(self, clients: Clients) -> Work:
            return replace(super().work(clients), rate=clients.constant(self.twice))

    config = Config(rounds=1, clients=6, participation=0.5, lr=0.2, epochs=1)
    result = fedagg.run(config, algorithm=Doubled(), data=tiny.dataset(), model=tiny.network())
    assert rates(result) == pytest.approx([0.2])


def test_an_object_is_a_method_too(tmp_path: Path) -> None:
    own = Halved(share=0.25, plan=[1.0])
    result = tiny.job(algorithm=own, rounds=2, out=tmp_path / "own")
    assert rates(result) == pytest.approx([0.025] * 4)
    assert result.config.options == {"share": 0.25, "how": "all", "times": 1, "label": None}
    assert result.config.algorithm == f"{__name__}.Halved"
    assert rates(tiny.job(algorithm=own, rounds=2)) == rates(result)  # it is as it was
    assert set(own.state) == set(Halved().state)
    register("halved")(Halved)
    assert tiny.job(algorithm=own, rounds=1).config.algorithm == "halved"


def test_an_object_of_a_known_class_is_the_method_of_that_name(tmp_path: Path) -> None:
    tiny.job(algorithm=FedProx(mu=0.5), out=tmp_path / "object")
    tiny.job(algorithm="fedprox", mu=0.5, out=tmp_path / "name")
    assert (tmp_path / "object" / "config.toml").read_text() == (tmp_path / "name" / "config.toml").read_text()
    assert tiny.same_run(tmp_path / "object", tmp_path / "name")


def test_the_rate_of_an_object() -> None:
    assert tiny.job(algorithm=Halved(lr=0.4), lr=None, rounds=1).config.lr == 0.4
    with pytest.raises(SettingError, match=r"lr = 0.1: what was given from Python is 0.4"):
        tiny.job(algorithm=Halved(lr=0.4), lr=0.1)
    config = Config(rounds=1, clients=6, participation=0.5, lr=0.2, epochs=1)
    result = fedagg.run(config, algorithm=Halved(), data=tiny.dataset(), model=tiny.network())
    assert (result.config.lr, rates(result)) == (0.2, pytest.approx([0.1]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"algorithm": Halved()} | {"share": 0.1}, "share = 0.1: what was given from Python is 0.5"),
        ({"algorithm": Halved(share=3.0)}, "share = 3.0: input should be less than or equal to 1"),
        ({"algorithm": Halved}, "algorithm = 'Halved': is a class; give an object, Halved"),
        ({"algorithm": FedProx(), "variant": "paper"}, "variant = 'paper': what was given from Python is 'default'"),
    ],
)
def test_impossible_objects_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError) as refused:
        tiny.job(**given)
    assert str(refused.value).startswith(words)


def test_a_run_of_an_object_is_resumed_with_the_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "own"
    tiny.job(algorithm=Halved(share=0.25), rounds=3, out=tmp_path / "whole")
    tiny.job(algorithm=Halved(share=0.25), rounds=2, out=folder)
    assert call("run", "--resume", str(folder)) == 2
    assert "was made in Python and has no registered name; give the object again" in capsys.readouterr().err
    with pytest.raises(FedaggError, match=r"share was 0\.25, now 0\.5"):
        tiny.job(algorithm=Halved(), rounds=3, resume=folder)
    tiny.job(algorithm=Halved(share=0.25), rounds=3, resume=folder)
    assert tiny.same_run(folder, tmp_path / "whole")
