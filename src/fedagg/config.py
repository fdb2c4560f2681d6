"""The configuration of a run: its settings and its method's options. Values come from options, file, preset or defaults.

Settings are declared in `settings`, options in the file of their method. Users write them side by side.
"""

from __future__ import annotations

import functools
import math
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import tomli_w
from pydantic import Field, TypeAdapter, ValidationError, ValidationInfo, field_validator, model_validator

from fedagg import plugins, schedule
from fedagg.errors import FedaggWarning, SettingError, unknown
from fedagg.options import Option, declared
from fedagg.settings import Settings

if TYPE_CHECKING:
    from fedagg.algorithms import Algorithm

LARGEST = 3.4e38  # largest value of float32

ENGINES = ("auto", "sequential", "batched", "distributed")

# What other packages call a setting, where the nearest spelling would be the wrong one.
FOREIGN_NAMES = {
    "learning_rate": "lr",
    "eta": "lr",
    "num_clients": "clients",
    "num_rounds": "rounds",
    "local_epochs": "epochs",
    "optimizer": "client_optimizer",
}

# Settings that say where and how fast a run goes, and how often it is evaluated. They do not change its result.
NO_EFFECT = {"device", "engine", "threads", "chunk", "data_dir", "checkpoint_every", "client_memory", "eval_every", "plugin"}

# Settings that only some partitions use.
OF_PARTITIONS = {
    "sigma": ("dirichlet", "dirichlet-class"),
    "shards": ("shards",),
    "deviation": ("quantity",),
    "column": ("feature",),
}

# What version 0.1.0 wrote into every record, whatever the method. Together with the settings of two partitions at once, these names
# mark such a record; their values mean nothing.
LEGACY_OPTIONS = {"alpha": 0.1, "variant": "default", "tolerance": 1e-3, "passes": 1, "cap": 1.0}
LEGACY_NAMES = LEGACY_OPTIONS.keys() | {"sigma", "shards"}

# What may be given from Python in place of a name: the setting, which is then `custom`, and the keyword of `fedagg.run`.
FROM_PYTHON = {"dataset": "data", "model": "model", "partition": "parts"}

PRESETS: dict[str, dict[str, Any]] = {
    "mnist-linear": {"dataset": "mnist", "model": "linear", "lr": 0.01, "batch_size": 32, "rounds": 30},
    "mnist-cnn": {"dataset": "mnist", "model": "mnist-cnn", "lr": 0.01, "batch_size": 32, "rounds": 30},
    "emnist-lenet5": {"dataset": "emnist-letters", "model": "lenet5", "lr": 0.1, "batch_size": 64, "rounds": 50},
    "emnist-union-lenet5": {"dataset": "emnist-letters-union", "model": "lenet5", "lr": 0.1, "batch_size": 64, "rounds": 50},
    "cifar10-cnn": {"dataset": "cifar10", "model": "cifar10-cnn", "lr": 0.1, "batch_size": 32, "rounds": 100},
    "cifar100-vgg11": {
        "dataset": "cifar100",
        "model": "vgg11",
        "norm": "batch",
        "augment": "crop-flip",
        "precision": "bf16",
        "lr": 0.01,
        "batch_size": 64,
        "rounds": 200,
    },
}
for _preset in PRESETS.values():
    _preset |= {"epochs": 3, "clients": 100, "participation": 0.2}


class Config(Settings):
    """A complete description of a run. Fields are the command line's options, with underscores for hyphens."""

    options: dict[str, Any] = Field(default_factory=dict, description="the method's own options")

    @model_validator(mode="before")
    @classmethod
    def collect_method_options(cls, given: Any) -> Any:
        """Collect everything that is not a setting as options of the method."""
        if not isinstance(given, Mapping):
            return given
        settings = {key: value for key, value in given.items() if key in cls.model_fields}
        options = {key: value for key, value in given.items() if key not in settings}
        return settings | {"options": {**settings.get("options", {}), **options}}

    @field_validator("plugin", mode="before")
    @classmethod
    def parse_plugins(cls, given: Any) -> Any:
        return plugins.parse_names(given)

    @model_validator(mode="before")
    @classmethod
    def refuse_odd_values(cls, given: Any) -> Any:
        for name, value in given.items() if isinstance(given, dict) else ():
            field = cls.model_fields.get(name)
            kinds = () if field is None else get_args(field.annotation) or (field.annotation,)
            refuse_odd(name, value, kinds)
        return given

    @model_validator(mode="after")
    def check_all(self, info: ValidationInfo) -> Config:
        context = info.context or {}
        recorded, method = context.get("recorded", False), context.get("method")
        if not recorded:
            plugins.load(self.plugin)
        self.check_names(recorded, recorded or method is not None)
        if not recorded:
            self.check_data()
            for setting, users in OF_PARTITIONS.items():
                if setting in self.model_fields_set and self.partition not in users:
                    words = f"the {self.partition} partition has no such setting; {listing(users)}"
                    raise SettingError(setting, getattr(self, setting), words)
        method = method or known_method(self.method)
        if method is not None:
            self.__dict__["options"] = self.complete_options(method, recorded)
            if not recorded:
                self.check_rates(method)
        return self

    def check_rates(self, method: type[Algorithm]) -> None:
        """Refuse a change of the base rate that the method would ignore, or that leaves next to nothing of the rate."""
        for name in schedule.SETTINGS:
            if not method.scheduled and getattr(self, name) != Config.model_fields[name].default:
                words = f"{self.method} takes its rates from measurements, not from lr in every round; leave it out"
                raise SettingError(name, getattr(self, name), words)
        if self.warmup >= self.rounds:
            raise SettingError("warmup", self.warmup, f"must be below rounds, {self.rounds}")
        if (last := self.rate(self.rounds - 1)) < min(schedule.LEAST, self.lr):
            raise SettingError("lr_decay", self.lr_decay, f"leaves a rate of {last:.3g} for the last round; choose one nearer to 1")

    def rate(self, t: int) -> float:
        """The base rate of round t. After the last round, when models are fitted to clients, it is the rate that was set."""
        if t >= self.rounds:
            return self.lr
        return self.lr * schedule.share(t, self.rounds, self.lr_decay, self.lr_schedule, self.warmup)

    def check_names(self, recorded: bool, any_method: bool) -> None:
        """Check the names. A recorded one may come from a plugin that is not installed here."""
        from fedagg import aggregate, data, models, partition  # slow to import, and `fedagg list` does not need them

        if not any_method:
            self.check_method()
        for setting, names, registry in (
            ("dataset", data.names, data.REGISTRY),
            ("model", models.names, models.ARCHITECTURES),
            ("partition", partition.names, partition.REGISTRY),
        ):
            value = getattr(self, setting)
            if setting == "dataset" and data.is_path(value):
                continue
            if value != "custom" and not recorded and value not in names() and not registry.has(value):
                registry.all()
                raise unknown(setting, value, [*names(), "custom"])
        for setting, known in (("engine", ENGINES), ("robust", aggregate.RULES)):
            if getattr(self, setting) not in known:
                raise unknown(setting, getattr(self, setting), known)

    def check_data(self) -> None:
        """Check that files exist and that only files have columns. Data that name their users are split by user by default."""
        from fedagg import data

        if data.is_path(self.dataset) and not Path(self.dataset).exists():
            raise SettingError("dataset", self.dataset, "there is no such file or folder")
        for name in ("target", "user"):
            if getattr(self, name) is not None and self.dataset != "custom" and not data.is_path(self.dataset):
                raise SettingError(name, getattr(self, name), f"is for files and tables; {self.dataset} has its own")
        if "partition" not in self.model_fields_set and (self.user is not None or data.names_users(self.dataset)):
            self.__dict__["partition"] = "user"

    def check_method(self) -> None:
        from fedagg.algorithms import REGISTRY

        if "." in self.algorithm and not REGISTRY.has(self.algorithm):
            words = "was made in Python and has no registered name; give the object again, as fedagg.run(algorithm=...)"
            raise SettingError("algorithm", self.algorithm, words)
        REGISTRY.find(self.algorithm)
        if not REGISTRY.has(self.method):
            others = [name.removeprefix(f"{self.algorithm}-") for name in REGISTRY.all() if name.startswith(f"{self.algorithm}-")]
            fix = f"choose one of {', '.join(['default', *others])}" if others else f"{self.algorithm} has only one; leave it out"
            raise SettingError("variant", self.variant, fix)

    def complete_options(self, method: type, recorded: bool) -> dict[str, Any]:
        """All options of the method: the given ones, checked, and its defaults for the rest."""
        known, chosen = declared(method), dict[str, Any]()
        for name, value in self.options.items():
            if name in known and value is not None:
                chosen[name] = value if recorded else valid(known[name], value, self)
            elif recorded and value is not None:
                chosen[name] = value  # from an earlier version
            elif name not in known:
                raise no_such_option(name, value, [self.method], self.partition)
        return {name: option.default for name, option in known.items()} | chosen

    @property
    def method(self) -> str:
        """The method's registered name. A variant of an algorithm, such as the paper's FedAgg, is a separate method."""
        return self.algorithm if self.variant == "default" else f"{self.algorithm}-{self.variant}"

    @property
    def data_name(self) -> str:
        """The data set's name for use in file names; for a file or folder, its own name."""
        return Path(self.dataset).stem

    def __hash__(self) -> int:
        return hash(frozenset(self.flat().items()))

    @property
    def drops_outliers(self) -> bool:
        """Are outliers dropped? A robust rule handles them itself."""
        return self.robust == "mean" if self.outliers is None else self.outliers == "drop"

    @property
    def per_round(self) -> int:
        return max(1, round(self.participation * self.clients))

    def flat(self) -> dict[str, Any]:
        """Every setting that applies and every option of the method, side by side."""
        unused = {setting for setting, users in OF_PARTITIONS.items() if self.partition not in users}
        return self.model_dump(exclude={"options", *unused}) | self.options

    def changed(self, **settings: Any) -> Config:
        """A copy with other values. Options belong to the method: a new method starts with its own defaults."""
        return self.changed_to(settings)

    def changed_to(self, settings: dict[str, Any], method: type | None = None) -> Config:
        """A copy with other values. `method` is the class of an algorithm given as an object."""
        kept = self.flat()
        same = all(settings.get(name, getattr(self, name)) == getattr(self, name) for name in ("algorithm", "variant"))
        split = settings.get("partition", self.partition)
        leave = set(() if same else self.options) | {name for name, users in OF_PARTITIONS.items() if split not in users}
        if split == "user" and "clients" not in self.model_fields_set:
            leave.add("clients")  # the data decide how many
        kept = {name: value for name, value in kept.items() if name not in leave}
        return make({**kept, **settings}, recorded=same and method is None and known_method(self.method) is None, method=method)

    def toml(self) -> str:
        """All settings as TOML, so that `fedagg run config.toml` repeats the run; settings left open are omitted."""
        return tomli_w.dumps({k: list(v) if isinstance(v, tuple) else v for k, v in self.flat().items() if v not in (None, ())})


SETTINGS = tuple(Settings.model_fields)


def refuse_odd(name: str, value: object, kinds: tuple[Any, ...]) -> None:
    """Refuse booleans as numbers, and numbers beyond float32. Infinity is allowed in one place."""
    if isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds):
        raise SettingError(name, value, "give a number")
    if isinstance(value, int | float) and float in kinds and not abs(value) < LARGEST and (name, value) != ("sigma", math.inf):
        raise SettingError(name, value, f"give a number below {LARGEST:g}")


def make(settings: Mapping[str, Any], recorded: bool = False, method: type | None = None) -> Config:
    """A configuration from separate settings, or a one-line error. A `recorded` one comes from an earlier run, whose method may be
    unknown here. `method` is the class of an algorithm given as an object."""
    try:
        return Config.model_validate(drop_stale(settings, recorded), context={"recorded": recorded, "method": method})
    except ValidationError as error:
        first = error.errors()[0]
        setting = ".".join(str(part) for part in first["loc"][:1]) or "configuration"
        raise SettingError(setting, first.get("input"), advice(setting, first["msg"])) from None


def drop_stale(settings: Mapping[str, Any], recorded: bool) -> Mapping[str, Any]:
    """Drop meaningless entries: records of earlier versions list the options of all methods and the settings of all partitions."""
    if not settings.keys() >= LEGACY_NAMES:
        return settings
    own = options_of(settings)

    def applies(name: str, value: object) -> bool:
        if name in OF_PARTITIONS:
            return settings.get("partition") in OF_PARTITIONS[name]
        if name in Config.model_fields or name in own:
            return True
        return recorded and value is not None and LEGACY_OPTIONS.get(name) != value

    return {name: value for name, value in settings.items() if applies(name, value)}


def known_method(name: str) -> Any:
    """The class of that name, if it exists."""
    from fedagg.algorithms import REGISTRY

    return REGISTRY.find(name) if REGISTRY.has(name) else None


def options_of(settings: Mapping[str, Any]) -> Mapping[str, Option]:
    """The options of the method that these settings choose; empty if there is no such method."""
    algorithm, variant = (settings.get(name) or Config.model_fields[name].default for name in ("algorithm", "variant"))
    method = known_method(f"{algorithm}" if variant == "default" else f"{algorithm}-{variant}")
    return declared(method) if method is not None else {}


def methods_with(option: str) -> list[str]:
    """The methods that have an option of this name."""
    from fedagg.algorithms import REGISTRY

    return sorted(name for name in REGISTRY.all() if option in declared(REGISTRY[name]))


def listing(names: Sequence[str]) -> str:
    return f"{' and '.join([', '.join(names[:-1]), names[-1]] if names[1:] else names)} {'have' if names[1:] else 'has'}"


def no_such_option(name: str, value: object, methods: Sequence[str], partition: str) -> SettingError:
    """The error for an option that none of these methods has. It names the methods that do."""
    others = methods_with(name)
    if not others:
        own = [option for method in methods for option in declared(known_method(method))]
        return unknown("setting", name, {*SETTINGS, *own}, FOREIGN_NAMES)
    words = f"{listing(methods)} no such option; {listing(others)}"
    variants = [other.removeprefix(f"{methods[0]}-") for other in others if other.startswith(f"{methods[0]}-")]
    if len(methods) == 1 and variants:
        words += f" (--variant {variants[0]})"
    if name == "alpha" and partition.startswith("dirichlet"):
        words += "; the concentration of the Dirichlet partition is sigma"
    return SettingError(name, value, words)


def valid(option: Option, value: Any, config: Config) -> Any:
    """The value of an option, checked and converted by its declaration."""
    if option.choices:
        if value in option.choices:
            return value
        fix = f"choose one of {', '.join(option.choices)} ({option.description})"
        for other in methods_with(option.name):
            variant = other.removeprefix(f"{config.algorithm}-")
            if variant != other and value in declared(known_method(other))[option.name].choices:
                fix = f"needs --variant {variant}; without it, {fix}"
        raise SettingError(option.name, value, fix)
    refuse_odd(option.name, value, (option.kind,))
    try:
        return checker(option.kind, tuple(option.limits.items())).validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        about = f" ({option.description})" if option.description else ""
        raise SettingError(option.name, value, f"{message[0].lower()}{message[1:]}{about}") from None


@functools.cache
def checker(kind: type, limits: tuple[tuple[str, Any], ...]) -> TypeAdapter[Any]:
    """A checker for one kind of option. Cached: making it takes as long as the rest of a configuration."""
    form: Any = Annotated[kind, Field(**dict(limits))]
    return TypeAdapter(form)


def advice(setting: str, message: str) -> str:
    field = Config.model_fields.get(setting)
    text = message[0].lower() + message[1:]
    return f"{text} ({field.description})" if field else text


def read(path: Path) -> dict[str, Any]:
    """The settings in a TOML file."""
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise SettingError("config", str(path), "there is no such file") from None
    except IsADirectoryError:
        inside = path / "config.toml"
        fix = f"name the file in it, {inside}, or continue with --resume" if inside.exists() else "name a TOML file of settings"
        raise SettingError("config", str(path), f"is a folder; {fix}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("config", str(path), f"cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:  # also integers and nesting beyond what Python reads
        raise SettingError("config", str(path), f"is not TOML: {error}") from None
    if "plugin" in settings:
        settings["plugin"] = plugins.parse_names(settings["plugin"], path.parent)
    for key, value in settings.items():
        if isinstance(value, (dict, list)) and key != "plugin":
            raise SettingError(key, value, "settings are plain values at the top level of the file")
    return settings


def resolve(options: Mapping[str, Any], file: Path | None = None, preset: str | None = None, method: type | None = None) -> Config:
    """The configuration: option, then file, then preset, then default. `method` is the class of an algorithm given as an object."""
    return apply_preset(*collect_settings(options, file, preset), method)


def resolve_each(
    methods: Sequence[str], options: Mapping[str, Any], file: Path | None = None, preset: str | None = None
) -> list[Config]:
    """A configuration for each of several methods. An option goes to the methods that have it; at least one must."""
    chosen, base = collect_settings(options, file, preset)
    own = {method: options_of({**base, **chosen, "algorithm": method}) for method in methods}
    known = all(known_method(method) for method in methods)  # otherwise the unknown method is the error
    for name, value in chosen.items():
        if known and name not in Config.model_fields and not any(name in each for each in own.values()):
            raise no_such_option(name, value, methods, str(chosen.get("partition")))

    following = {method for method in methods if known and known_method(method).scheduled}

    def fit(method: str) -> dict[str, Any]:
        # If some methods follow a rate schedule, methods that measure their rates do not get it.
        skip = schedule.SETTINGS if following and method not in following else ()
        mine = {k: v for k, v in chosen.items() if (k in Config.model_fields or k in own[method]) and k not in skip}
        return mine | {"algorithm": method}

    return [apply_preset(fit(method), base) for method in methods]


def apply_preset(chosen: dict[str, Any], base: dict[str, Any], method: type | None = None) -> Config:
    own = declared(method) if method is not None else options_of(chosen)
    # A preset is for every method: a method takes only the options it has.
    complete_options = {k: v for k, v in base.items() if k in Config.model_fields or k in own}
    config = make({**complete_options, **chosen}, method=method)
    if config.partition == "user" and "clients" in complete_options:  # the data decide how many users there are
        config = make({**{k: v for k, v in complete_options.items() if k != "clients"}, **chosen}, method=method)
    if "alpha" in chosen and "sigma" not in chosen and config.partition.startswith("dirichlet"):
        words = f"alpha is {config.method}'s own; the concentration of the Dirichlet partition is sigma, {config.sigma:g} here"
        warnings.warn(words, FedaggWarning, stacklevel=2)
    return config


def collect_settings(options: Mapping[str, Any], file: Path | None, preset: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings given for a run, option before file, and those a preset adds. Loads plugins, which may define the method."""
    settings = read(file) if file else {}
    preset = preset or settings.pop("preset", None)
    settings.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    chosen = {**settings, **{k: v for k, v in options.items() if v is not None}}
    plugins.load(plugins.parse_names(chosen.get("plugin")))
    return chosen, PRESETS[preset] if preset is not None else {}


def choices(name: str) -> tuple[str, ...]:
    """The allowed words of a setting, if it is limited to some."""
    annotation = Config.model_fields[name].annotation
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is Literal:
            return get_args(part)
    return ()
