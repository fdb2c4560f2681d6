"""Data in the forms that people have them in: what each becomes, what is refused, and who owns which samples."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fedagg
from fedagg import Dataset, checks, partition
from fedagg.cli import main
from fedagg.config import resolve
from fedagg.errors import SettingError

RNG = np.random.default_rng(3)
X = RNG.normal(size=(20, 3)).astype(np.float32)
Y = np.arange(20) % 2
WHO = np.array(["ann", "bob", "cid", "bob"] * 5)


def frame(**more: Any) -> pd.DataFrame:
    return pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "c": X[:, 2], "kind": np.where(Y, "yes", "no"), "who": WHO, **more})


def both(data: Dataset) -> torch.Tensor:
    """All samples, in an order that does not depend on the split."""
    every = torch.cat([data.x_train, data.x_test])
    return every[every[:, 0].argsort()]


def refused(words: str, source: Any, **options: Any) -> None:
    with pytest.raises(SettingError) as caught:
        Dataset.of(source, **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


# --- arrays, tensors and torch ---------------------------------------------------------------------------------------


def test_a_fifth_is_held_out_always_the_same() -> None:
    one, two, tensors = Dataset.of((X, Y)), Dataset.of((X, Y)), Dataset.of((torch.tensor(X), torch.tensor(Y)))
    assert (len(one), len(one.x_test)) == (16, 4)
    assert torch.equal(one.x_train, two.x_train)
    assert torch.equal(one.x_train, tensors.x_train)
    assert torch.equal(both(one), torch.tensor(X[X[:, 0].argsort()]))
    assert len(Dataset.of((X, Y), test=0.5)) == 10
    for test in (0, 1.0, 0.001, -1):
        refused("test = ", (X, Y), test=test)


def test_samples_keep_their_labels_and_users_when_some_are_held_out() -> None:
    x = np.arange(20, dtype=np.float32)[:, None]
    data = Dataset.of((x, np.arange(20)), user=[f"u{k}" for k in range(20)])
    assert data.x_train[:, 0].tolist() == data.y_train.tolist()
    assert [f"u{k}" for k in data.y_train.tolist()] == list(data.users)
    back = data.held_back(0.25)
    assert [f"u{k}" for k in back.y_train.tolist()] == list(back.users)


def test_a_test_part_of_its_own() -> None:
    for made in (Dataset.of((X, Y, X[:4], Y[:4])), Dataset.of((X, Y), test=(X[:4], Y[:4]))):
        assert (len(made), len(made.x_test)) == (20, 4)
    refused("already", (X, Y, X, Y), test=0.2)


def test_words_are_numbered_over_both_parts() -> None:
    data = Dataset.of((X[:2], np.array(["b", "a"]), X[:2], np.array(["c", "a"])))
    assert (data.labels, data.y_train.tolist(), data.y_test.tolist()) == (("a", "b", "c"), [1, 0], [2, 0])
    assert data.normalized().labels == data.labels


def test_a_dataset_is_taken_as_it_is() -> None:
    data = Dataset(X, Y, X, Y)
    assert Dataset.of(data) is data
    refused("a Dataset is already complete", data, target="kind")


def test_torch_datasets_and_loaders() -> None:
    pairs = TensorDataset(torch.tensor(X), torch.tensor(Y))
    listed: Any = torch.utils.data.Subset(pairs, range(20))
    for source in (pairs, DataLoader(pairs, batch_size=7, shuffle=True), listed):
        assert torch.equal(both(Dataset.of(source)), both(Dataset.of((X, Y))))
    assert len(Dataset.of((pairs, pairs)).x_test) == 20

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(pairs)

    class Pictures(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise IndexError
            return Image.fromarray(np.full((4, 6, 3), index, dtype=np.uint8)), index

    refused("map-style", Stream())
    pictures = Dataset.of(Pictures(), test=0.2)
    assert pictures.shape == (3, 4, 6)
    ragged: Any = [(torch.zeros(2 + k), 0) for k in range(3)]
    refused("differ in shape", torch.utils.data.Subset(ragged, range(3)))


def test_token_ids_of_different_lengths_are_padded() -> None:
    data = Dataset.of(([[5, 6, 7], [8], [9, 1]], [0, 1, 1]), test=([[2]], [0]))
    assert data.x_train.tolist() == [[5, 6, 7], [8, 0, 0], [9, 1, 0]]
    assert data.x_test.tolist() == [[2, 0, 0]]


def test_samples_targets_and_users_must_be_as_many(tmp_path: Path) -> None:
    for y in (Y[:15], np.tile(Y, 2)):
        words = f"y_train = '{len(y)} labels': x_train has 20 samples; the two must agree"
        refused(words, (X, y))
        refused(words, (torch.tensor(X), torch.tensor(y)))
        np.savez(tmp_path / "uneven.npz", x=X, y=y)
        refused(words, tmp_path / "uneven.npz")
        np.save(tmp_path / "x.npy", X)
        np.save(tmp_path / "y.npy", y)
        refused(words, tmp_path / "x.npy", target=str(tmp_path / "y.npy"))
    refused("y_test = '3 labels': x_test has 4 samples", (X, Y), test=(X[:4], Y[:3]))
    for users in (WHO[:5], np.tile(WHO, 2), "who"):
        refused("give a whole number or a word for each of the 20 training samples", (X, Y), user=users)
    refused("samples and targets need one row each", (3, 4))


def test_test_samples_without_targets_are_refused(tmp_path: Path) -> None:
    for name in ("x_test", "y_test"):
        np.savez(tmp_path / "a.npz", x_train=X, y_train=Y, **{name: X if name == "x_test" else Y})
        refused(f"has {name} alone; give both x_test and y_test, or neither", tmp_path / "a.npz")


def test_torch_targets_may_be_words() -> None:
    named: Any = [(torch.tensor([float(k)]), word) for k, word in enumerate(["dog", "cat", "dog"])]
    whole: Any = torch.utils.data.Subset(named, range(3))
    data = Dataset.of((whole, torch.utils.data.Subset(named, [1])))
    assert (data.labels, data.y_train.tolist(), data.y_test.tolist()) == (("cat", "dog"), [1, 0, 1], [0])
    for rows, what in (
        ([("text", 0)], "samples"),
        ([(torch.zeros(1), None)], "targets"),
        ([(torch.zeros(1), {"box": 1})], "targets"),
    ):
        odd: Any = rows
        refused(f"its {what} are not all numbers", torch.utils.data.Subset(odd, [0]))


def test_sparse_matrices() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    assert torch.equal(both(Dataset.of((sparse.csr_matrix(X), Y))), both(Dataset.of((X, Y))))


@pytest.mark.parametrize("source", [None, 3, (X,), (X, Y, X), object()])
def test_what_is_not_data_is_refused(source: Any) -> None:
    refused("data = ", source)


# --- tables ----------------------------------------------------------------------------------------------------------


def test_a_frame() -> None:
    data = Dataset.of(frame(), target="kind", user="who")
    assert (data.shape, data.classes, data.labels) == ((3,), 2, ("no", "yes"))
    assert torch.equal(both(data), both(Dataset.of((X, Y))))
    assert set(data.users) == {"ann", "bob", "cid"}
    assert repr(data).endswith("classes=2, users=3)")
    few = Dataset.of(frame(), target="kind", features=["c", "a"])
    assert torch.equal(both(few), torch.tensor(X[X[:, 2].argsort()][:, [2, 0]]))
    assert few.users is None
    pair = Dataset.of((frame(), frame()[:5]), target="kind", features=["a"])
    assert (len(pair), len(pair.x_test)) == (20, 5)
    assert torch.equal(both(Dataset.of((frame()[["a", "b", "c"]], frame()["kind"]))), both(data))


def test_arrow_tables() -> None:
    arrow = pytest.importorskip("pyarrow")
    data = Dataset.of(arrow.table({"a": X[:, 0], "b": X[:, 1], "y": Y}))
    assert torch.equal(both(data), both(Dataset.of((X[:, :2], Y))))


def test_categories_and_whole_numbers_are_classes_and_columns_of_numbers_are_features() -> None:
    category = frame(grade=pd.Categorical(np.where(Y, "b", "a"), categories=["b", "a"]))
    assert Dataset.of(category, target="grade", features=["a"]).labels == ("a", "b")
    scores = frame(score=3 + 2 * Y)
    data = Dataset.of(scores, target="score", features="a")
    assert (data.classes, data.labels) == (2, ("3", "5"))
    assert Dataset.of(frame(label=Y), features=["a", "b"]).labels is None  # counts from 0 already; and its name says it all
    assert Dataset.of(scores, target="kind", features=["score"]).x_train.dtype == torch.float32  # not tokens


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "target = None: name the column that holds the labels: a, b, c, kind, who"),
        ({"target": "kindd"}, "did you mean 'kind'?"),
        ({"target": "kind", "user": "whoo"}, "did you mean 'who'?"),
        ({"target": "kind", "features": ["a", "d"]}, "features = 'd'"),
        ({"target": "kind"}, "features = 'who': holds text; turn it into numbers (pandas.get_dummies)"),
        ({"target": "kind", "features": []}, "at least one column"),
    ],
)
def test_wrong_columns_are_named(options: dict[str, Any], words: str) -> None:
    refused(words, frame(), **options)


def test_the_columns_of_the_test_part_are_found_by_name(tmp_path: Path) -> None:
    train, test = frame()[:15], frame(extra=1.0)[15:]
    shuffled = test[["extra", "c", "kind", "a", "b"]]  # no users: test samples need none
    for name, part in (("train", train), ("test", shuffled)):
        part.to_csv(tmp_path / f"{name}.csv", index=False)
    (tmp_path / "parquet").mkdir()
    train.to_parquet(tmp_path / "parquet" / "train.parquet")
    shuffled.to_parquet(tmp_path / "parquet" / "test.parquet")
    roles = {"target": "kind", "user": "who"}
    for made in (
        Dataset.of((train, shuffled), **roles),
        Dataset.of(train, test=shuffled, **roles),
        Dataset.of(tmp_path, **roles),
        Dataset.of((tmp_path / "train.csv", tmp_path / "test.csv"), **roles),
        Dataset.of(tmp_path / "parquet", **roles),
        Dataset.of(tmp_path / "parquet", memory=1e-7, **roles),  # samples on disk: 107 bytes
    ):
        assert torch.allclose(made.x_test, torch.tensor(X[15:]))
        assert made.y_test.tolist() == Y[15:].tolist()
    numbers = train[["a", "b", "c"]]
    for pair in ((numbers, Y[:15], shuffled[["c", "extra", "a", "b"]], Y[15:]), (numbers, Y[:15], X[15:], Y[15:])):
        assert torch.equal(Dataset.of(pair).x_test, torch.tensor(X[15:]))
    words = "test = 'a': the training part has these columns, but the test part does not"
    refused(words, (train, test.rename(columns={"a": "z"})), **roles)
    refused(words, (numbers, Y[:15]), test=(test[["b", "c"]], Y[15:]))
    refused("test = 'kind'", (train, test[["a", "b", "c"]]), **roles)


def test_hugging_face_splits_may_order_their_columns_differently() -> None:
    train = Hugging({"a": X[:, 0], "b": X[:, 1], "label": Y})
    assert torch.equal(
        Dataset.of({"train": train, "test": Hugging({"label": Y, "b": X[:, 1], "a": X[:, 0]})}).x_test, torch.tensor(X[:, :2])
    )


def test_the_target_is_no_feature() -> None:
    words = "features = 'kind': is the target too"
    refused(words, frame(), target="kind", features=["a", "kind"])
    refused(words, frame(), target=["a", "kind"], features="kind")


def test_columns_of_different_lengths_are_refused() -> None:
    refused("features = 'b': has 2 rows, but a has 3", {"a": [1, 2, 3], "b": [1, 2], "y": [0, 1, 0]})
    refused("target = 'q': has 2 rows, but p has 3", {"a": [1, 2, 3], "p": [1, 2, 3], "q": [1, 2]}, target=["p", "q"])
    refused("y_train = '2 labels': x_train has 3 samples", {"a": [1, 2, 3], "y": [0, 1]})


def test_an_empty_word_is_a_missing_value(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,y,who\n1,no,ann\n2, ,bob\n3,yes,\n")
    refused("target = 'y': row 2 is empty; fill it in, or drop the row", path, features="a")
    path.write_text("a,y,who\n1,no,ann\n2,yes,bob\n3,yes,\n")
    refused("row 3 is empty", path, user="who")


def test_whole_floats_are_labels_like_integers() -> None:
    signs = frame(sign=np.where(Y, 1.0, -1.0))  # Y is 0, 1, 0, 1, ...
    data = Dataset.of((signs, signs[1:3]), target="sign", features=["a"])
    assert (data.task, data.labels, data.y_test.tolist()) == ("classification", ("-1", "1"), [1, 0])
    assert data.y_train.tolist() == Y.tolist()
    assert Dataset.of(frame(y=Y.astype(float)), features=["a"]).labels is None  # counts from 0 already
    refused("nan: labels must be whole numbers", frame(y=[*[1.0] * 19, np.nan]), features=["a"], test=frame(y=1.0))
    halves = Dataset.of(frame(y=Y / 2), features=["a"])
    assert halves.task == "regression"


def test_quantities_and_several_targets() -> None:
    table = frame(price=100 * X[:, 0], rooms=1 + Y)
    assert Dataset.of(table, target="price", features=["b"]).task == "regression"
    rooms = Dataset.of(table, target="rooms", features=["b"], task="regression")
    assert (rooms.task, rooms.labels, float(rooms.y_train.max())) == ("regression", None, 2.0)
    two = Dataset.of(table, target=["price", "a"], features=["b"])
    assert (two.task, two.classes) == ("regression", 2)
    result = fedagg.run(data=table[["a", "b", "rooms"]], target="rooms", task="regression", clients=2, **SHORT)
    assert result.config.task == "regression"
    assert result.model(torch.zeros(1, 2)).shape == (1, 1)


def test_missing_values_are_named() -> None:
    table = frame()
    table.loc[:, "a"] = np.nan
    refused("x_train[0] = nan", table, target="kind", features=["a"])


class Hugging:
    """What `datasets.Dataset` can do, as far as it is used: column_names, features, with_format("numpy")[:]."""

    def __init__(self, columns: dict[str, Any], **features: Any) -> None:
        self.columns, self.column_names = columns, list(columns)
        self.features = {name: features.get(name, SimpleNamespace(dtype="float32")) for name in columns}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def with_format(self, kind: str) -> Hugging:
        assert kind == "numpy"
        return self

    def __getitem__(self, which: slice) -> dict[str, Any]:
        return {name: column[which] for name, column in self.columns.items()}


def hugging(count: int) -> Hugging:
    kind = type("Image", (), {})()
    columns = {"image": RNG.integers(0, 256, (count, 4, 5, 3), dtype=np.uint8), "label": np.arange(count) % 2}
    return Hugging(columns, image=kind, label=SimpleNamespace(names=["cat", "dog"]))


def test_hugging_face_data_sets() -> None:
    data = Dataset.of({"train": hugging(6), "test": hugging(2)})
    assert (len(data), len(data.x_test), data.shape, data.labels) == (6, 2, (3, 4, 5), ("cat", "dog"))
    assert float(data.x_train.max()) <= 1.0
    one = hugging(6)
    alone = Dataset.of(one, test=hugging(2), target="label")
    assert torch.equal(alone.x_train, torch.tensor(one.columns["image"].transpose(0, 3, 1, 2) / 255).float())
    refused("no split named train", {"validation": hugging(2)})
    ragged = Hugging({"input_ids": [[4, 5], [6], [7, 8], [9]], "attention_mask": [[1, 1], [1], [1, 1], [1]], "label": Y[:4]})
    refused("name only this column", ragged)
    assert Dataset.of(ragged, features="input_ids").shape == (2,)


# --- files -----------------------------------------------------------------------------------------------------------


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "wine.csv"
    frame().to_csv(path, index=False)
    data = Dataset.of(path, target="kind", user="who")
    assert torch.allclose(both(data), both(Dataset.of((X, Y))))
    assert (data.name, data.labels, set(data.users)) == ("wine", ("no", "yes"), {"ann", "bob", "cid"})
    for content, words in (
        ("1,2\n3,4\n", "the first line must name every column"),
        ("a,a\n3,4\n", "every column once"),
        ("a,b\n", "rows must follow"),
        ("", "rows must follow"),
        ("a,y\n1,0\n2\n", "row 2 has 1 values, but the first line has 2"),
        ("a,y\n1,0\n,1\n2,0\n3,1\n4,0\n", "nan: every number must be finite"),
        (b"\xff\xfe\x00", "cannot be read as CSV"),
    ):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        refused(words, path)
    refused("there is no such file", tmp_path / "none.csv")
    (tmp_path / "data.pkl").write_bytes(b"")
    refused("give a .csv, .parquet, .npz or .npy file", tmp_path / "data.pkl")


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    frame(image=[row.tolist() for row in X]).to_parquet(path)
    assert torch.allclose(both(Dataset.of(path, target="kind", features=["a", "b", "c"])), both(Dataset.of((X, Y))))
    assert torch.allclose(both(Dataset.of(path, target="kind", features="image")), both(Dataset.of((X, Y))))
    path.write_bytes(b"PAR1")
    refused("cannot be read as Parquet", path, target="kind")
    monkeypatch.setattr("fedagg.data.readers.find_spec", lambda name: None)
    refused("pip install pyarrow", path, target="kind")


def test_npz_and_npy(tmp_path: Path) -> None:
    np.savez(tmp_path / "whole.npz", x_train=X, y_train=Y, x_test=X[:3], y_test=Y[:3], users=WHO)
    data = Dataset.of(tmp_path / "whole.npz")
    assert (len(data), len(data.x_test), set(data.users)) == (20, 3, {"ann", "bob", "cid"})
    np.savez(tmp_path / "part.npz", X=X, y=Y)
    assert torch.equal(both(Dataset.of(tmp_path / "part.npz")), both(Dataset.of((X, Y))))
    np.savez(tmp_path / "other.npz", a=X)
    refused("it has a", tmp_path / "other.npz")
    for name, array in (("x", X), ("y", Y), ("w", WHO)):
        np.save(tmp_path / f"{name}.npy", array)
    paths = [str(tmp_path / f"{name}.npy") for name in "xyw"]
    data = Dataset.of(paths[0], target=paths[1], user=paths[2])
    assert torch.equal(both(data), both(Dataset.of((X, Y))))
    assert set(data.users) == {"ann", "bob", "cid"}
    assert torch.equal(both(Dataset.of((paths[0], paths[1]))), both(data))
    refused("name the .npy file with their labels", paths[0])


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "unpickled",))

    evil = np.array([Bomb()] * 4, dtype=object)
    np.savez(tmp_path / "evil.npz", x=evil, y=Y[:4])
    np.save(tmp_path / "evil.npy", evil)
    refused("cannot be read as NPZ", tmp_path / "evil.npz")
    refused("cannot be read as .npy", tmp_path / "evil.npy", target=str(tmp_path / "evil.npy"))
    assert not (tmp_path / "unpickled").exists()


def pictures(folder: Path, kinds: dict[str, int], mode: str = "L") -> None:
    for kind, count in kinds.items():
        (folder / kind).mkdir(parents=True)
        for k in range(count):
            Image.new(mode, (5, 4), color=k if mode == "L" else (k, 2, 3)).save(folder / kind / f"{k}.png")


def test_a_folder_of_images_by_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures(tmp_path / "grey", {"dog": 6, "cat": 4})
    data = Dataset.of(tmp_path / "grey")
    assert (data.shape, data.labels, len(data) + len(data.x_test)) == ((1, 4, 5), ("cat", "dog"), 10)
    assert torch.cat([data.y_train, data.y_test]).bincount().tolist() == [4, 6]
    pictures(tmp_path / "split" / "train", {"cat": 3, "dog": 2}, "RGB")
    pictures(tmp_path / "split" / "test", {"dog": 1}, "RGB")
    data = Dataset.of(tmp_path / "split")
    assert (data.y_train.tolist(), data.y_test.tolist(), data.shape) == ([0, 0, 0, 1, 1], [1], (3, 4, 5))
    assert (data.x_train[2, :, 0, 0] * 255).tolist() == pytest.approx([2, 2, 3])
    pictures(tmp_path / "apart", {"fox": 1, "dog": 2})  # no cat, and a fox that training lacks
    data = Dataset.of((tmp_path / "grey", tmp_path / "apart"))
    assert (data.labels, data.y_test.tolist()) == (("cat", "dog", "fox"), [1, 1, 2])
    Image.new("L", (9, 9)).save(tmp_path / "grey" / "cat" / "odd.png")
    refused("is 9 x 9, but the first one is 5 x 4", tmp_path / "grey")
    (tmp_path / "grey" / "cat" / "odd.png").write_bytes(b"no picture")
    refused("cannot be read as an image", tmp_path / "grey")
    refused("has no images", tmp_path / "grey" / "dog")
    monkeypatch.setattr("fedagg.data.readers.find_spec", lambda name: None)
    refused("pip install Pillow", tmp_path / "grey")


def test_a_folder_of_tables_or_arrays(tmp_path: Path) -> None:
    frame().to_csv(tmp_path / "train.csv", index=False)
    frame()[:5].to_csv(tmp_path / "test.csv", index=False)
    assert len(Dataset.of(tmp_path, target="kind", user="who").x_test) == 5
    (tmp_path / "arrays").mkdir()
    for name, array in (("x_train", X), ("y_train", Y), ("x_test", X[:2]), ("y_test", Y[:2]), ("users", WHO)):
        np.save(tmp_path / "arrays" / f"{name}.npy", array)
    data = Dataset.of(tmp_path / "arrays")
    assert (len(data.x_test), len(np.unique(data.users))) == (2, 3)


# --- runs ------------------------------------------------------------------------------------------------------------

SHORT: dict[str, Any] = {"rounds": 1, "epochs": 1, "participation": 1.0, "engine": "sequential"}


def test_the_same_data_in_any_form_give_the_same_run(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    frame().to_csv(path, index=False)
    forms: list[dict[str, Any]] = [
        {"data": frame(), "target": "kind", "user": "who"},
        {"data": Dataset.of(frame(), target="kind", user="who")},
        {"data": path, "target": "kind", "user": "who"},
        {"dataset": str(path), "target": "kind", "user": "who"},
    ]
    results = [fedagg.run(**form, **SHORT) for form in forms]
    assert {result.accuracy for result in results} == {results[0].accuracy}
    assert {(r.config.partition, r.config.clients) for r in results} == {("user", 3)}
    assert [r.config.dataset for r in results] == ["custom", "custom", str(path), str(path)]


def status(words: list[str]) -> object:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code


def test_a_file_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    frame().to_csv("a.csv", index=False)
    words = ["run", "--dataset", "a.csv", "--target", "kind", "--user", "who", "--rounds", "1", "--json", "--quiet"]
    assert status(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["dataset"], told["partition"]) == ("a.csv", "user")
    assert "-a-linear-user-" in told["run"]
    assert status(["run", "--resume", told["run"], "--rounds", "2", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 2
    for wrong, about in (
        (["--dataset", "b.csv"], "there is no such file"),
        (["--dataset", "a.csv"], "name the column that holds the labels"),
        (["--target", "kind"], "is for files and tables"),
        (["--dataset", "a.csv", "--target", "kind", "--user", "who", "--clients", "4"], "the data have 3 users"),
        (["--partition", "user"], "the data name no users"),
    ):
        assert status(["run", *wrong, "--quiet"]) == 2
        assert about in " ".join(capsys.readouterr().err.split())


def test_clients_follow_from_the_users() -> None:
    data = Dataset(X, Y, X, Y, users=WHO)
    assert fedagg.run(data=data, **SHORT).config.clients == 3
    assert fedagg.run(data=data, preset="mnist-linear", model="linear", **SHORT).config.clients == 3
    assert fedagg.run(data=data, clients=2, **SHORT).config.clients == 2
    assert fedagg.run(data=data, partition="iid", clients=5, **SHORT).config.clients == 5
    assert resolve({"dataset": "hapt"}).partition == "user"
    assert resolve({"dataset": "hapt", "partition": "iid"}).partition == "iid"
    assert resolve({"dataset": "hapt"}, preset="mnist-linear").changed(lr=1.0).model_fields_set.isdisjoint({"clients"})


def test_by_user_takes_the_users_with_the_most_samples() -> None:
    parts = partition.by_user(WHO)
    assert [part.tolist() for part in parts] == [np.flatnonzero(who == WHO).tolist() for who in ("ann", "bob", "cid")]
    assert [len(part) for part in parts] == [5, 10, 5]
    assert partition.by_user(WHO, 1)[0].tolist() == parts[1].tolist()
    assert [part.tolist() for part in partition.by_user(WHO, 2)] == [parts[0].tolist(), parts[1].tolist()]
    with pytest.raises(SettingError, match="3 users"):
        partition.by_user(WHO, 4)


def test_parts_in_every_form() -> None:
    data = Dataset(X, Y, X, Y)
    parts = partition.by_user(WHO)
    masks = [who == WHO for who in ("ann", "bob", "cid")]
    forms: list[Any] = [parts, masks, WHO, WHO.tolist(), pd.Series(WHO), dict(zip("abc", parts, strict=True))]
    numbers = np.unique(WHO, return_inverse=True)[1]
    for form in [*forms, numbers, torch.tensor(numbers)]:
        assert [np.asarray(part).tolist() for part in checks.indices(form, data)] == [part.tolist() for part in parts]
        assert checks.describe_arguments(data, None, form) == {"dataset": "custom", "partition": "custom", "clients": 3}
    assert fedagg.run(data=data, parts=WHO, **SHORT).config.clients == 3
    for wrong in (WHO[:5], 3, {}, "ann"):
        with pytest.raises(SettingError, match="parts"):
            fedagg.run(data=data, parts=wrong, **SHORT)
    with pytest.raises(SettingError, match="client b"):
        fedagg.run(data=data, parts={"a": [0], "b": [99]}, **SHORT)


@pytest.mark.parametrize("users", [WHO[:3], X, np.zeros(20)])
def test_users_must_be_one_for_each_sample(users: Any) -> None:
    with pytest.raises(SettingError, match="users"):
        Dataset(X, Y, X, Y, users=users)


def test_every_class_has_a_name_or_none_has() -> None:
    with pytest.raises(SettingError, match="there are 2 classes"):
        Dataset(X, Y, X, Y, labels=["a"])
