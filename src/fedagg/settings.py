"""Every setting of a run, with its default, its range and its meaning. A method's own options are declared in its file."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from fedagg.schedule import Schedule


class Settings(BaseModel):
    """All settings. Options of methods may not have the same names."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())

    algorithm: str = Field("fedagg", description="the method: see `fedagg list`")
    variant: str = Field("default", description="which version of the method, where it has several: default, or paper for FedAgg")
    dataset: str = Field(
        "mnist-mini", description="the data set, the path of a file or folder, or `custom` for data given from Python"
    )
    target: str | None = Field(
        None, description="the column of a file that holds the labels (for a .npy file: the file of the labels)"
    )
    user: str | None = Field(
        None, description="the column of a file that names the user of each row (for a .npy file: the file of the users)"
    )
    model: str = Field("linear", description="the network, or `custom` for a module given from Python")
    task: Literal["classification", "regression", "multilabel", "tokens"] | None = Field(
        None, description="what the targets are (default: inferred from the data)"
    )
    metric: str | None = Field(None, description="the figure a run is judged by (default: the task's own)")
    partition: str = Field(
        "iid",
        description="how samples are dealt to clients: iid, shards, dirichlet, dirichlet-class, quantity, feature, or user for one "
        "client per user (the default where the data name users)",
    )
    sigma: float = Field(0.6, gt=0, description="concentration of the Dirichlet partitions; inf is IID")
    shards: int = Field(2, ge=1, description="shards per client in the shards partition")
    deviation: float = Field(
        1.0,
        ge=0,
        le=10,
        description="standard deviation of the logarithm of clients' sizes in the quantity partition; 0 for equal sizes",
    )
    column: int = Field(0, ge=0, description="the feature that the feature partition sorts samples by")
    clients: int = Field(
        100, ge=1, description="clients in the federation (with the user partition: all users, or those with the most samples)"
    )
    participation: float = Field(
        0.2, gt=0, le=1, description="share of the clients that takes part in a round (at least one client)"
    )
    rounds: int = Field(30, ge=1, description="global rounds, the paper's T")
    epochs: int = Field(3, ge=1, le=10_000, description="local epochs, the paper's L")
    batch_size: int = Field(32, ge=1, description="mini-batch size")
    lr: float = Field(0.01, gt=0, lt=1e6, description="base learning rate; FedAgg only starts from it")
    lr_decay: float = Field(
        1.0, gt=0, le=1, description="factor on the base rate in every round (not for FedAgg, which measures its rates)"
    )
    lr_schedule: Schedule = Field("constant", description="how the base rate changes over the rounds (not for FedAgg)")
    warmup: int = Field(0, ge=0, description="rounds at the start in which the base rate grows to its full value (not for FedAgg)")
    seed: int = Field(0, ge=0, description="seed of everything: partition, initial weights, participants, batches")
    validation: float = Field(
        0.0, ge=0, lt=1, description="share of the training data held back, to evaluate on instead of the test set"
    )
    normalize: bool = Field(
        False, description="standardise inputs (images per channel, rows per feature) instead of scaling them to [0, 1]"
    )

    downlink_bits: int = Field(32, ge=2, le=32, description="bits per number of the mean field sent to clients")

    client_optimizer: Literal["sgd", "adam"] = Field("sgd", description="the clients' optimiser")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of the clients' SGD")
    weight_decay: float = Field(0.0, ge=0, description="weight decay on the clients")
    clip: float = Field(0.0, ge=0, description="largest norm of a mini-batch gradient; 0 for no clipping")
    augment: Literal["none", "crop", "crop-flip"] = Field("none", description="shift (and mirror) images at random in training")
    norm: Literal["batch", "group", "none"] | None = Field(None, description="normalisation, if the model has any")
    dropout: float | None = Field(None, ge=0, lt=1, description="the model's dropout, if it has any")

    engine: str = Field("auto", description="where clients run: auto, sequential, batched, distributed")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:0, ...")
    precision: Literal["tf32", "fp32", "bf16"] = Field("tf32", description="arithmetic of matrix products on a GPU")
    chunk: int = Field(0, ge=0, description="clients trained together; 0 for as many as fit into half of a GPU, or 4 GiB")
    threads: int = Field(0, ge=0, le=4096, description="processor threads; 0 leaves torch's own choice")

    robust: str = Field("mean", description="how updates are combined: mean, clip, median, trimmed")
    outliers: Literal["drop", "keep"] | None = Field(
        None,
        description="what to do with clients that moved absurdly far (default drop, or keep if robust is not mean)",
    )
    trim: float = Field(0.2, ge=0, lt=0.5, description="share cut off at either end by the trimmed mean")
    dropout_rate: float = Field(0.0, ge=0, le=1, description="simulated faults: share of clients that never answer")
    straggler_rate: float = Field(0.0, ge=0, le=1, description="simulated faults: share of clients that do fewer epochs")
    corrupt_rate: float = Field(0.0, ge=0, le=1, description="simulated faults: share of clients that send nonsense")
    flip_rate: float = Field(0.0, ge=0, le=1, description="simulated faults: share of hostile, sign-flipping clients")
    flip_scale: float = Field(
        1.0, gt=0, lt=1e6, description="simulated faults: factor by which hostile clients also enlarge their update"
    )

    stop_at: float | None = Field(None, description="stop when the metric reaches this: 0.9 for an accuracy of 90 %")
    patience: int = Field(0, ge=0, description="stop after this many evaluations in a row without a better metric; 0 for never")
    average: bool = Field(False, description="report the running average of the global models (for every method)")
    eval_every: int = Field(1, ge=1, description="rounds from one evaluation to the next")
    per_client: bool = Field(False, description="evaluate for every client, on the test set weighted by the client's labels")
    client_test: float = Field(
        0.0, ge=0, lt=1, description="share of every client's own samples kept out of training, to evaluate the client on"
    )
    personal: bool = Field(
        False, description="at the end, fine-tune the model for clients with plain steps and evaluate it on them"
    )
    checkpoint_every: int = Field(
        0, ge=0, description="rounds between checkpoints; 0 for one every 45 seconds, or less often if they are large"
    )
    client_memory: Literal["auto", "ram", "disk"] = Field("auto", description="where the vectors that clients remember are kept")
    data_dir: str | None = Field(None, description="where data sets are (default FEDAGG_DATA, else the user's cache)")
    data_memory: float | None = Field(
        None,
        gt=0,
        description="GiB of memory for the samples of a file; more stay on the disk (default half of the machine's memory)",
    )
    plugin: tuple[str, ...] = Field((), description="a Python file or module that adds methods, data sets and more")
