"""Every setting of a run, its default, its range, and where its value comes from: option, file, preset, default."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from fedagg import aggregate, data, models, partition
from fedagg.algorithms import REGISTRY
from fedagg.errors import SettingError, unknown

ENGINES = ("auto", "sequential", "batched", "distributed")

# What other packages call a setting, where its letters would lead to another one.
ELSEWHERE = {
    "learning_rate": "lr",
    "eta": "lr",
    "num_clients": "clients",
    "num_rounds": "rounds",
    "local_epochs": "epochs",
    "optimizer": "client_optimizer",
}

# Settings that say where and how fast a run goes and how often it is looked at, not what comes out of it.
NO_BEARING = {"device", "engine", "threads", "chunk", "data_dir", "checkpoint_every", "client_memory", "eval_every"}

PRESETS: dict[str, dict[str, Any]] = {
    "mnist-linear": {"dataset": "mnist", "model": "linear", "lr": 0.01, "batch_size": 32, "rounds": 30},
    "mnist-cnn": {"dataset": "mnist", "model": "mnist-cnn", "lr": 0.01, "batch_size": 32, "rounds": 30},
    "emnist-lenet5": {"dataset": "emnist-letters", "model": "lenet5", "lr": 0.1, "batch_size": 64, "rounds": 50},
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
    _preset |= {"epochs": 3, "alpha": 0.1, "clients": 100, "participation": 0.2}


class Config(BaseModel):
    """A complete description of a run. Fields are the command line's options, with underscores for hyphens."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())

    algorithm: str = Field("fedagg", description="the method: see `fedagg list`")
    dataset: str = Field("mnist-mini", description="the data set, or `custom` for data given from Python")
    model: str = Field("linear", description="the network, or `custom` for a module given from Python")
    partition: str = Field("iid", description="how samples are dealt to clients: iid, shards, dirichlet, dirichlet-class")
    sigma: float = Field(0.6, gt=0, description="concentration of the Dirichlet partitions; inf is IID")
    shards: int = Field(2, ge=1, description="shards per client in the shards partition")
    clients: int = Field(100, ge=1, description="clients in the federation")
    participation: float = Field(
        0.2, gt=0, le=1, description="share of the clients that takes part in a round, at least one client"
    )
    rounds: int = Field(30, ge=1, description="global rounds, the paper's T")
    epochs: int = Field(3, ge=1, description="local epochs, the paper's L")
    batch_size: int = Field(32, ge=1, description="mini-batch size")
    lr: float = Field(0.01, gt=0, lt=1e6, description="base learning rate; FedAgg only starts from it")
    seed: int = Field(0, ge=0, description="seed of everything: partition, initial weights, participants, batches")
    validation: float = Field(
        0.0, ge=0, lt=1, description="share of the training data held back, to report on instead of the test set"
    )
    normalize: bool = Field(False, description="standardise inputs per channel instead of scaling them to [0, 1]")

    alpha: float = Field(0.1, gt=0, lt=1, description="FedAgg: weight of the rate against the deviation, in (0, 1)")
    variant: Literal["default", "paper"] = Field("default", description="FedAgg: our default, or the paper to the letter")
    estimator: Literal["history", "probe", "pretrain"] | None = Field(
        None, description="FedAgg: where the mean-field terms come from (default history; probe for the paper variant)"
    )
    direction: Literal["mixed", "local", "aggregated"] | None = Field(
        None, description="FedAgg: what a client steps along (default mixed; local for the paper variant)"
    )
    pace: Literal["weighted", "distance", "base"] | None = Field(None, description="FedAgg: how the pace is set")
    tolerance: float = Field(1e-3, gt=0, description="FedAgg, paper: the tolerance of Algorithm 1")
    passes: int = Field(1, ge=1, le=1000, description="FedAgg, paper: most passes of Algorithm 1")
    cap: float = Field(1.0, gt=0, description="FedAgg, paper: rates stay under cap over the client's smoothness")
    downlink_bits: int = Field(32, ge=2, le=32, description="bits per number of the mean field sent to clients")

    mu: float | None = Field(None, ge=0, description="FedProx: weight of the proximal term (default 0.01)")
    dyn_alpha: float | None = Field(None, gt=0, description="FedDyn: its α (default 0.01)")
    server_lr: float | None = Field(None, gt=0, description="FedAdam, FedYogi, FedAdagrad: server rate (default 0.01)")
    beta1: float | None = Field(None, ge=0, lt=1, description="FedAdam, FedYogi: first moment (default 0.9)")
    beta2: float | None = Field(None, ge=0, lt=1, description="FedAdam, FedYogi: second moment (default 0.99)")
    tau: float | None = Field(None, gt=0, description="FedAdam, FedYogi, FedAdagrad: adaptivity (default 0.001)")
    global_lr: float | None = Field(None, gt=0, description="SCAFFOLD: server step (default 1)")
    cm_alpha: float | None = Field(None, gt=0, le=1, description="FedCM: weight of the own gradient (default 0.1)")
    exp_eps: float | None = Field(None, ge=0, description="FedExP: its ε (default 0.001)")
    head: str | None = Field(None, description="FedBABU, FedGH: name of the head (default the last layer with parameters)")
    head_lr: float | None = Field(None, gt=0, description="FedGH: rate of the header's training (default 0.1)")
    head_steps: int | None = Field(None, ge=1, description="FedGH: steps of the header's training (default 50)")

    client_optimizer: Literal["sgd", "adam"] = Field("sgd", description="the clients' optimiser")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of the clients' SGD")
    weight_decay: float = Field(0.0, ge=0, description="weight decay on the clients")
    clip: float = Field(0.0, ge=0, description="largest norm of a mini-batch gradient; 0 for no clipping")
    augment: Literal["none", "crop", "crop-flip"] = Field("none", description="shift (and mirror) images at random in training")
    norm: Literal["batch", "group", "none"] | None = Field(None, description="normalisation, where the model has any")
    dropout: float | None = Field(None, ge=0, lt=1, description="the model's dropout, where it has any")

    engine: str = Field("auto", description="where clients run: auto, sequential, batched, distributed")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:0, ...")
    precision: Literal["tf32", "fp32", "bf16"] = Field("tf32", description="arithmetic of matrix products on a GPU")
    chunk: int = Field(0, ge=0, description="clients trained together; 0 chooses from the free memory")
    threads: int = Field(0, ge=0, le=4096, description="processor threads; 0 leaves torch's own choice")

    robust: str = Field("mean", description="how updates are combined: mean, clip, median, trimmed")
    trim: float = Field(0.2, ge=0, lt=0.5, description="share cut off at either end by the trimmed mean")
    dropout_rate: float = Field(0.0, ge=0, le=1, description="simulated faults: share of clients that never answer")
    straggler_rate: float = Field(0.0, ge=0, le=1, description="simulated faults: share that does fewer epochs")
    corrupt_rate: float = Field(0.0, ge=0, le=1, description="simulated faults: share that answers nonsense")
    flip_rate: float = Field(0.0, ge=0, le=1, description="simulated faults: share of hostile, sign-flipping clients")
    flip_scale: float = Field(1.0, gt=0, lt=1e6, description="simulated faults: what hostile clients multiply by, beside -1")

    average: bool = Field(False, description="report the running average of the global models (for every method)")
    eval_every: int = Field(1, ge=1, description="evaluate every so many rounds")
    checkpoint_every: int = Field(
        0, ge=0, description="rounds between checkpoints; 0 for one every 45 seconds, or less often where they are large"
    )
    client_memory: Literal["auto", "ram", "disk"] = Field("auto", description="where per-client vectors live")
    data_dir: str | None = Field(None, description="where data sets are (default FEDAGG_DATA, else the user's cache)")

    @model_validator(mode="after")
    def names_exist(self, info: ValidationInfo) -> Config:
        recorded = bool(info.context and info.context["recorded"])
        for setting, value, known in (
            ("algorithm", self.algorithm, [self.algorithm] if recorded else REGISTRY),
            ("dataset", self.dataset, [*data.names(), "custom"]),
            ("model", self.model, [*models.names(), "custom"]),
            ("partition", self.partition, [*partition.names(), "custom"]),
            ("engine", self.engine, ENGINES),
            ("robust", self.robust, aggregate.RULES),
        ):
            if setting == "dataset" and value not in known and Path(value).suffix in (".csv", ".npy", ".npz", ".pt", ".parquet"):
                raise SettingError(setting, value, "is a file; read it in Python, and give data=fedagg.Dataset(...) to fedagg.run")
            if value not in known:
                raise unknown(setting, value, known)
        if self.algorithm == "fedagg" and self.variant == "default":
            if self.estimator == "pretrain":
                raise SettingError("estimator", "pretrain", "needs --variant paper; the default version takes history or probe")
            if self.direction == "aggregated":
                raise SettingError("direction", "aggregated", "needs --variant paper; the default takes mixed or local")
        return self

    @property
    def method(self) -> str:
        """The algorithm's registered name: the paper's variant of FedAgg is a method of its own."""
        return "fedagg-paper" if self.algorithm == "fedagg" and self.variant == "paper" else self.algorithm

    @property
    def per_round(self) -> int:
        return max(1, round(self.participation * self.clients))

    def changed(self, **settings: Any) -> Config:
        return make({**self.model_dump(), **settings})

    def toml(self) -> str:
        """Complete, so that `fedagg run config.toml` repeats the run; settings left open are left out."""
        return tomli_w.dumps({k: v for k, v in self.model_dump().items() if v is not None})


def make(settings: dict[str, Any], recorded: bool = False) -> Config:
    """A configuration from loose settings, or one line that says which is wrong and what to do. A `recorded` one is of a run that
    was made: its method may be one that a script of the user's has registered, and that is not known here."""
    for key in settings:
        if key not in Config.model_fields:
            raise unknown("setting", key, Config.model_fields, ELSEWHERE)
    try:
        return Config.model_validate(settings, context={"recorded": recorded})
    except ValidationError as error:
        first = error.errors()[0]
        setting = ".".join(str(part) for part in first["loc"][:1]) or "configuration"
        raise SettingError(setting, first.get("input"), advice(setting, first["msg"])) from None


def advice(setting: str, message: str) -> str:
    field = Config.model_fields.get(setting)
    text = message[0].lower() + message[1:]
    return f"{text} ({field.description})" if field else text


def read(path: Path) -> dict[str, Any]:
    """The settings in a TOML file."""
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingError("config", str(path), "there is no such file") from None
    except IsADirectoryError:
        inside = path / "config.toml"
        fix = f"name the file in it, {inside}, or go on with --resume" if inside.exists() else "name a TOML file of settings"
        raise SettingError("config", str(path), f"is a folder; {fix}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("config", str(path), f"cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:  # also whole numbers and nesting beyond what Python reads
        raise SettingError("config", str(path), f"is not TOML: {error}") from None
    for key, value in settings.items():
        if isinstance(value, (dict, list)):
            raise SettingError(key, value, "settings are plain values at the top level of the file")
    return settings


def resolve(options: dict[str, Any], file: Path | None = None, preset: str | None = None) -> Config:
    """Option, then file, then preset, then default."""
    settings = read(file) if file else {}
    preset = preset or settings.pop("preset", None)
    settings.pop("preset", None)
    base: dict[str, Any] = {}
    if preset is not None:
        if preset not in PRESETS:
            raise unknown("preset", preset, PRESETS)
        base = PRESETS[preset]
    return make({**base, **settings, **{k: v for k, v in options.items() if v is not None}})


def choices(name: str) -> tuple[str, ...]:
    """The literal values a setting may take, if it is one of a few words."""
    annotation = Config.model_fields[name].annotation
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is Literal:
            return get_args(part)
    return ()
