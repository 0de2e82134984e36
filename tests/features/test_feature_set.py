"""Features of a table: what fit finds out, what becomes of a batch, and what is refused."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.errors import CheckpointError, ConfigError, DataError, EmptyDataset, NoCheckpoint
from shoal.features import FeatureSet, bag, bucketized, categorical, crossed, embedding, hashed, numeric
from shoal.features.columns import bucket_of, hash_ints, hash_text, hash_together

CITIES = ["Bern", "Zürich", "Genf", "Basel", "Chur", ""]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Rows:
    """Rows of a small table with holes, as dicts."""

    def __init__(self, count: int = 600) -> None:
        draws = np.random.default_rng(0)
        self.age = np.where(draws.random(count) < 0.1, np.nan, draws.normal(40, 12, count))
        self.city = [CITIES[min(int(place), 5)] for place in draws.zipf(1.6, count) - 1]
        self.hour = draws.integers(0, 24, count)
        self.lengths = draws.integers(0, 5, count)
        self.clicked = draws.integers(0, 40, (count, 4))
        self.seconds = draws.random((count, 4))
        self.pair = draws.normal(5, 2, (count, 2))
        for row, length in enumerate(self.lengths):
            self.clicked[row, length:] = -1
            self.seconds[row, length:] = 0

    def __len__(self) -> int:
        return len(self.age)

    def __getitem__(self, row: int) -> Any:
        inputs = {
            "age": self.age[row], "city": self.city[row], "hour": self.hour[row], "clicked": self.clicked[row],
            "seconds": self.seconds[row], "pair": self.pair[row],
        }  # fmt: skip
        return inputs, float(row % 2)


ROWS = Rows()
DATA = shoal.Dataset.from_torch(ROWS)


def made(*features: Any, data: shoal.Dataset = DATA) -> dict[str, torch.Tensor]:
    """All rows, through features that were fitted on them."""
    batch = next(iter(data.batch(len(data))))
    inputs, label = FeatureSet(features).fit(data)(batch)
    assert torch.equal(label, batch[1])
    return dict(inputs)


# ---- numbers ----------------------------------------------------------------------------------------


def test_numbers_get_mean_zero_and_deviation_one_and_missing_ones_the_mean() -> None:
    found = made(numeric("age"), numeric("pair"))["dense"]
    known = ~np.isnan(ROWS.age)
    expected = (ROWS.age - ROWS.age[known].mean()) / ROWS.age[known].std()
    assert found.dtype == torch.float32
    assert found[:, 0].numpy() == pytest.approx(np.where(known, expected, 0), abs=1e-5)
    assert found[:, 1:].numpy() == pytest.approx((ROWS.pair - ROWS.pair.mean(0)) / ROWS.pair.std(0), abs=1e-5)


def test_numbers_may_become_their_rank() -> None:
    found = made(numeric("age", normalize="quantile"))["dense"][:, 0].numpy()
    known = ~np.isnan(ROWS.age)
    ranks = np.argsort(np.argsort(ROWS.age[known])) / (known.sum() - 1)
    assert found[known] == pytest.approx(ranks, abs=0.01)
    assert (found[~known] == 0.5).all()
    features = FeatureSet([numeric("age", normalize="quantile")]).fit(DATA)
    outside = features({"age": [-1e9, 1e9]})["dense"][:, 0]
    assert outside.tolist() == [0.0, 1.0]


def test_a_value_that_fills_half_of_a_column_has_the_middle_of_its_ranks() -> None:
    data = shoal.Dataset.from_arrays({"x": np.array([0.0] * 500 + list(range(1, 501)))})
    features = FeatureSet([numeric("x", normalize="quantile")]).fit(data)
    found = features({"x": [0.0, 1.0, 250.0, 500.0]})["dense"][:, 0].tolist()
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0], abs=0.01)


def test_what_stands_for_missing_numbers_can_be_said() -> None:
    found = made(numeric("age", normalize=None, missing=-1.0, indicator=True))["dense"]
    missing = np.isnan(ROWS.age)
    assert found[:, 0].numpy() == pytest.approx(np.where(missing, -1, ROWS.age), abs=1e-4)
    assert found[:, 1].tolist() == missing.astype(float).tolist()
    with pytest.raises(
        DataError, match=rf"'age' has {missing.sum()} missing values in a batch, and missing='raise'"
    ):
        made(numeric("age", missing="raise"))


def test_a_constant_column_becomes_zero() -> None:
    data = shoal.Dataset.from_arrays({"x": torch.full((50,), 7.0)})
    assert FeatureSet([numeric("x")]).fit(data)({"x": [7.0, 8.0]})["dense"].tolist() == [[0.0], [1.0]]


# ---- ids --------------------------------------------------------------------------------------------


def test_buckets_of_given_boundaries() -> None:
    features = FeatureSet([bucketized("age", [18, 30, 50])])
    found = features({"age": torch.tensor([17.9, 18, 29, 30, 50, 99, math.nan])})["age_bucket"]
    assert found.tolist() == [0, 1, 1, 2, 3, 3, 4]
    assert features.input_layer().out_features == 5


def test_buckets_of_quantiles_hold_about_as_many_rows_each() -> None:
    found = made(bucketized("age", quantiles=8))["age_bucket"]
    counts = np.bincount(found, minlength=9)
    known = (~np.isnan(ROWS.age)).sum()
    assert abs(counts[:8] - known / 8).max() <= 1
    assert counts[8] == np.isnan(ROWS.age).sum()


def test_a_vocabulary_is_ordered_by_frequency_and_keeps_the_frequent() -> None:
    features = FeatureSet(
        [categorical("city", max_size=3, num_unknown=2, missing="own"), categorical("hour", min_count=26)]
    )
    features.fit(DATA)
    assert features.statistics is not None
    counts = Counter(city for city in ROWS.city if city)
    ordered = sorted(counts, key=lambda city: (-counts[city], city))
    assert features.statistics.vocabularies["city"] == tuple(ordered[:3])
    hours = Counter(ROWS.hour.tolist())
    assert features.statistics.vocabularies["hour"] == tuple(
        sorted((hour for hour in hours if hours[hour] >= 26), key=lambda hour: (-hours[hour], hour))
    )
    found = features({"city": np.array([*ordered[:4], "Rom", ""]), "hour": [99, *[0] * 5]})
    unknown = 3 + bucket_of(hash_text(np.array([ordered[3], "Rom"]), 0), 2)
    assert found["city"].tolist() == [0, 1, 2, *unknown.tolist(), 5]
    assert found["hour"][0] == len(features.statistics.vocabularies["hour"])


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda texts: np.array(texts, dtype=object)])
def test_strings_may_come_in_any_array(kind: Any) -> None:
    features = FeatureSet([categorical("city", vocabulary=["Bern", "Genf"], missing="own")])
    assert features({"city": kind(["Genf", "Bern", "Rom", ""])})["city"].tolist() == [1, 0, 2, 3]
    assert features({"city": [None, "Bern", b"Genf"]})["city"].tolist() == [3, 0, 1]


def test_whole_numbers_may_come_as_floats_with_holes() -> None:
    features = FeatureSet([categorical("hour", vocabulary=[7, 3], missing="own", missing_value=-1)])
    assert features({"hour": torch.tensor([3.0, math.nan, 7.0, 5.0, -1.0])})["hour"].tolist() == [
        1,
        3,
        0,
        2,
        3,
    ]


def test_unknown_and_missing_values_may_be_refused() -> None:
    features = FeatureSet([categorical("city", vocabulary=["Bern"], num_unknown=0)])
    with pytest.raises(DataError, match="does not know: 'Rom'"):
        features({"city": ["Bern", "Rom"]})
    with pytest.raises(DataError, match="has 1 missing values in a batch"):
        features({"city": ["Bern", ""]})


def test_hashed_and_crossed_ids_are_what_the_hash_says() -> None:
    found = made(hashed("city", 50, seed=3), crossed(["city", "hour"], 1000), crossed(["hour", "age_bucket"], 99),
                 bucketized("age", [40]))  # fmt: skip
    cities = np.array(ROWS.city)
    assert found["city"].tolist() == bucket_of(hash_text(cities, 3), 50).tolist()
    pairs = hash_together([hash_text(cities, 0), hash_ints(ROWS.hour, 0)], 0)
    assert found["city_x_hour"].tolist() == bucket_of(pairs, 1000).tolist()
    buckets = hash_together([hash_ints(ROWS.hour, 0), hash_ints(found["age_bucket"].numpy(), 0)], 0)
    assert found["hour_x_age_bucket"].tolist() == bucket_of(buckets, 99).tolist()


def test_without_buckets_an_id_is_the_whole_hash_and_has_a_hash_embedding() -> None:
    features = FeatureSet([embedding(hashed("city"), dim=4)])
    found = features({"city": ["Bern", "Rom"]})
    assert found["city"].tolist() == hash_text(np.array(["Bern", "Rom"]), 0).view(np.int64).tolist()
    layer = features.input_layer()
    assert isinstance(layer.tables["of_city"].rows, shoal.nn.HashEmbedding)
    assert layer(found).shape == (2, 4)


# ---- bags -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", ["mean", "sum", "sqrtn"])
@pytest.mark.parametrize("table", ["auto", "hash"])
def test_a_bag_is_the_weighted_sum_of_its_rows(combine: Any, table: Any) -> None:
    features = FeatureSet([bag("clicked", 3, weights="seconds", combine=combine, table=table)]).fit(DATA)
    batch = next(iter(DATA.batch(64)))
    inputs, _ = features(batch)
    layer = features.input_layer()
    rows = layer.tables["of_clicked"].rows
    found = layer(inputs)
    for row in range(64):
        weights, total = ROWS.seconds[row], torch.zeros(3)
        for place in range(ROWS.lengths[row]):
            looked_up = (
                rows(inputs["clicked"][row, place])
                if table == "hash"
                else rows.weight[inputs["clicked"][row, place]]
            )
            total = total + looked_up * weights[place]
        norm = {"sum": 1.0, "mean": weights.sum(), "sqrtn": np.sqrt((weights**2).sum())}[combine]
        assert found[row].tolist() == pytest.approx((total / (norm or 1.0)).tolist(), abs=1e-5)


def test_lists_of_several_lengths_are_padded_and_empty_ones_are_zero() -> None:
    features = FeatureSet([bag("tags", 2, vocabulary=["a", "b"])])
    inputs = features({"tags": [["a"], ["b", "a", "x"], []]})
    assert inputs["tags"].tolist() == [[0, 3, 3], [1, 0, 2], [3, 3, 3]]
    assert inputs["tags.weights"][1].tolist() == pytest.approx([1 / 3] * 3)
    layer = features.input_layer()
    assert layer(inputs)[2].tolist() == [0.0, 0.0]
    assert layer(features({"tags": [[], []]})).tolist() == [[0.0, 0.0]] * 2


def test_weights_of_another_length_are_refused() -> None:
    features = FeatureSet([bag("tags", 2, buckets=10, weights="w")])
    with pytest.raises(DataError, match="lists of up to 2 ids, but its weights, the column 'w', of up to 1"):
        features({"tags": [[1, 2]], "w": [[0.5]]})


# ---- fitting ----------------------------------------------------------------------------------------


EVERYTHING = [
    numeric("age", indicator=True), numeric("pair", normalize="quantile"), bucketized("age", quantiles=5),
    categorical("city", max_size=4), embedding("city", dim=8), hashed("hour", 40),
    crossed(["city", "hour"], 1000), bag("clicked", 6, weights="seconds", min_count=2),
]  # fmt: skip


def test_statistics_are_the_same_for_any_number_of_processes() -> None:
    found = [
        FeatureSet(EVERYTHING).fit(DATA, batch_size=50, workers=workers, key=f"{workers}").statistics
        for workers in (1, 2, 4)
    ]
    assert found[0] is not None
    assert found[0] == found[1] == found[2]
    assert found[0].num_samples == 600


def test_statistics_are_found_again_where_the_data_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    data = shoal.Dataset.from_arrays({"x": torch.arange(100.0)})
    first = FeatureSet([numeric("x")]).fit(data).statistics
    monkeypatch.setattr("shoal.features.statistics.moments_of", None)
    assert FeatureSet([numeric("x")]).fit(data.shuffle(seed=1)).statistics == first


def test_features_that_need_no_statistics_need_no_fit() -> None:
    features = FeatureSet(
        [hashed("city", 10), numeric("x", normalize=None, missing=0.0), bucketized("x", [1.0])]
    )
    found = features({"city": ["a"], "x": [2.0]})
    assert set(found) == {"dense", "city", "x_bucket"}
    assert features.input_layer()(found).shape == (1, 14)


def test_a_batch_may_be_inputs_alone_and_keeps_what_comes_after_them() -> None:
    features = FeatureSet([hashed("a", 5)])
    inputs, label, weight = features(({"a": [1, 2]}, torch.ones(2), torch.zeros(2)))
    assert set(inputs) == {"a"}
    assert label.tolist() == [1, 1]
    assert weight.tolist() == [0, 0]


def test_features_are_a_stage_of_a_pipeline() -> None:
    features = FeatureSet(EVERYTHING).fit(DATA)
    inputs, label = next(iter(DATA.shuffle(seed=0).batch(32).map(features)))
    assert features.input_layer()(inputs).shape[0] == len(label) == 32


def test_features_may_come_before_the_batch() -> None:
    features = FeatureSet([numeric("age"), categorical("city"), hashed("hour", 9)]).fit(DATA)
    before = next(iter(DATA.map(features, batched=True).batch(32)))
    after = next(iter(DATA.batch(32).map(features)))
    assert set(before[0]) == set(after[0])
    for name, tensor in after[0].items():
        assert torch.equal(before[0][name], tensor)


def test_a_table_in_a_file_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "table.csv"
    table.write_text(
        "age,city,bought\n" + "".join(f"{row % 90},city {row % 7},{row % 2}\n" for row in range(300))
    )
    declared = [numeric("age"), categorical("city")]
    first = FeatureSet(declared).fit(shoal.Dataset.from_csv(table, label="bought"))
    assert first.statistics is not None
    assert len(first.statistics.vocabularies["city"]) == 7
    with monkeypatch.context() as patch:
        patch.setattr("shoal.features.statistics.moments_of", None)
        again = FeatureSet(declared).fit(shoal.Dataset.from_csv(table, label="bought"))
    assert again.statistics == first.statistics
    table.write_text(table.read_text() + "17,elsewhere,0\n")
    changed = FeatureSet(declared).fit(shoal.Dataset.from_csv(table, label="bought"))
    assert changed.statistics is not None
    assert len(changed.statistics.vocabularies["city"]) == 8


# ---- the layer and its state ------------------------------------------------------------------------


def test_ids_without_an_embedding_are_a_one_hot_or_rows_by_their_number() -> None:
    features = FeatureSet(
        [hashed("few", 5), hashed("many", 10_000), hashed("few", 5, name="again"), embedding("again", 7)]
    )
    layer = features.input_layer()
    found = layer(features({"few": [1, 2, 3], "many": [4, 5, 6]}))
    assert found.shape == (3, 5 + 10 + 7)
    assert found[:, :5].sum(1).tolist() == [1, 1, 1]
    assert layer.out_features == 22
    assert "out_features=22, few: 5, many: 10, again: 7" in repr(layer)


def test_the_layer_follows_the_dtype_of_its_model() -> None:
    features = FeatureSet(EVERYTHING).fit(DATA)
    inputs, _ = features(next(iter(DATA.batch(8))))
    assert nn.Sequential(features.input_layer()).double()[0](inputs).dtype == torch.float64


def test_a_column_may_be_called_like_anything() -> None:
    names = ["keys", "items", "a.b", "kind", "input", "forward", "__class__"]
    features = FeatureSet([embedding(hashed(name, 9), dim=2) for name in names])
    inputs = features({name: [1, 2] for name in names})
    layer = features.input_layer()
    assert layer(inputs).shape == (2, 14)
    again = FeatureSet.from_layer(layer)
    assert again.features == features.features


def test_features_come_back_from_a_layers_state() -> None:
    features = FeatureSet(EVERYTHING).fit(DATA)
    model = nn.Sequential(features.input_layer(), nn.Linear(5, 1))
    other = nn.Sequential(features.input_layer(), nn.Linear(5, 1))
    other.load_state_dict(model.state_dict())
    again = FeatureSet.from_layer(other)
    assert again.features == features.features
    assert again.statistics == features.statistics
    batch = next(iter(DATA.batch(100)))
    for name, tensor in features(batch)[0].items():
        assert torch.equal(again(batch)[0][name], tensor)
    assert model.state_dict()["0.feature_set"].dtype == torch.uint8


def test_features_are_saved_with_the_model_and_loaded_for_serving(tmp_path: Path) -> None:
    features = FeatureSet(EVERYTHING).fit(DATA)
    layer = features.input_layer()
    model = nn.Sequential(layer, nn.Linear(layer.out_features, 1), nn.Flatten(0))
    trainer = shoal.Trainer(
        model, loss=nn.BCEWithLogitsLoss(), optimizer=lambda params: torch.optim.Adagrad(params), seed=0
    )
    trainer.fit(DATA.batch(100).map(features), epochs=1)
    trainer.save(tmp_path / "model")
    expected = trainer.predict(DATA.batch(100).map(features))

    loaded = FeatureSet.load(tmp_path / "model")
    assert loaded.statistics == features.statistics
    layer = loaded.input_layer()
    serving = nn.Sequential(layer, nn.Linear(layer.out_features, 1), nn.Flatten(0))
    trainer = shoal.Trainer(
        serving, loss=nn.BCEWithLogitsLoss(), optimizer=lambda params: torch.optim.Adagrad(params)
    )
    trainer.load(tmp_path / "model")
    assert torch.equal(trainer.predict(DATA.batch(100).map(loaded)), expected)


def test_what_holds_no_feature_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpoint, match=r"it has no model\.safetensors"):
        FeatureSet.load(tmp_path)
    trainer = shoal.Trainer(
        nn.Linear(1, 1), loss=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params)
    )
    trainer.save(tmp_path / "model")
    with pytest.raises(CheckpointError, match="holds 0 feature sets"):
        FeatureSet.load(tmp_path / "model")
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="cannot be read"):
        FeatureSet.load(tmp_path)
    layer = FeatureSet([hashed("a", 3)]).input_layer()
    layer.feature_set[:] = 7
    with pytest.raises(CheckpointError, match="cannot be understood"):
        FeatureSet.from_layer(layer)
    with pytest.raises(ConfigError, match="this model has 0"):
        FeatureSet.from_layer(nn.Linear(1, 1))


# ---- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: FeatureSet([]), "without features"),
        (lambda: FeatureSet(["age"]), "takes features, as numeric"),
        (lambda: FeatureSet([hashed("a", 2), categorical("a")]), "two features are called 'a'"),
        (lambda: FeatureSet([numeric("a"), numeric("a")]), "two features are called 'a'"),
        (lambda: FeatureSet([embedding("city", 4)]), r"embedding\('city'\) has no ids to look up"),
        (lambda: FeatureSet([hashed("a", 2), embedding(hashed("a", 3), 4)]), "two features are called 'a'"),
        (lambda: FeatureSet([hashed("dense", 2)]), "'dense' is what the numeric features are called"),
        (lambda: FeatureSet([hashed("a")]).input_layer(), r"Add embedding\('a', dim=16\)"),
        (lambda: FeatureSet([embedding(hashed("a"), 4, table="embedding")]).input_layer(), "cannot have an nn.Embedding"),
        (lambda: numeric("a", normalize="log"), r"normalize=\) is one of 'mean_std'"),
        (lambda: numeric("a", missing=math.nan), r"missing=\) is 'mean', 'raise' or a number"),
        (lambda: bucketized("a"), "takes boundaries"),
        (lambda: bucketized("a", [3, 1]), "in increasing order"),
        (lambda: bucketized("a", quantiles=1), r"quantiles=\) takes a whole number of at least 2"),
        (lambda: categorical("a", vocabulary=["a", 1]), "takes strings, or whole numbers, each once"),
        (lambda: categorical("a", max_size=0), r"max_size=\)"),
        (lambda: hashed("a", 0), r"hashed\(buckets=\)"),
        (lambda: hashed(""), "named by a text"),
        (lambda: crossed(["a"], 5), "two or more columns"),
        (lambda: embedding("a", 0), r"embedding\(dim=\)"),
        (lambda: embedding(numeric("a"), 2), "got a Numeric"),
        (lambda: bag("a", 4, buckets=5, min_count=3), "and then no vocabulary"),
    ],
)  # fmt: skip
def test_declarations_that_cannot_be_meant_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_an_unknown_column_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        DataError, match=r"no column 'aeg', which numeric\('aeg'\) asks for. It has age, city, hour"
    ):
        FeatureSet([numeric("aeg")]).fit(DATA)
    with pytest.raises(DataError, match=r"no column 'a', which hashed\('a'\) asks for. It has b"):
        FeatureSet([hashed("a", 3)])({"b": [1]})


def test_nothing_works_before_fit() -> None:
    features = FeatureSet([numeric("age"), categorical("city"), hashed("hour", 3)])
    for use in (features.input_layer, lambda: features({"age": [1.0]})):
        with pytest.raises(
            ConfigError, match=r"nobody has computed yet, for 'age', 'city'\. Call features\.fit\(train\)"
        ):
            use()
    assert "not fitted" in repr(features)


@pytest.mark.parametrize(
    ("feature", "batch", "said"),
    [
        (numeric("x", normalize=None, missing=0.0), {"x": ["a"]}, "needs numbers, but the column 'x' holds strings, for instance 'a'"),
        (numeric("x", normalize=None, missing=0.0), {"x": torch.zeros(2, 3)}, "takes 1 numbers per row"),
        (numeric("x", normalize=None, missing=0.0), {"x": torch.tensor(1.0)}, "was given a single sample"),
        (hashed("x", 3), {"x": "a"}, "was given a single sample"),
        (hashed("x", 3), {"x": torch.zeros(2, 3).long()}, "use bag for lists of ids"),
        (hashed("x", 3), {"x": [0.5]}, "holds numbers like 0.5. Nothing was computed; cut it into buckets"),
        (hashed("x", 3), torch.zeros(3), "need batches with named columns"),
        (bag("x", 2, buckets=3), {"x": [1, 2]}, "needs a list per row"),
        (categorical("x", vocabulary=["a"]), {"x": [3]}, "holds strings, but the column 'x' holds whole numbers now"),
    ],
)  # fmt: skip
def test_columns_of_another_kind_are_refused(feature: Any, batch: Any, said: str) -> None:
    with pytest.raises((DataError, ConfigError), match=said):
        FeatureSet([feature])(batch)


def test_columns_without_a_distribution_are_refused() -> None:
    data = shoal.Dataset.from_arrays(
        {"empty": torch.full((20,), math.nan), "wild": torch.tensor([1.0, math.inf] * 10)}
    )
    with pytest.raises(DataError, match=r"'empty' of numeric\('empty'\) has no value in 20 samples"):
        FeatureSet([numeric("empty")]).fit(data)
    with pytest.raises(DataError, match=r"'wild' of .* has 10 infinite values"):
        FeatureSet([numeric("wild")]).fit(data)
    with pytest.raises(EmptyDataset):
        FeatureSet([numeric("x")]).fit(shoal.Dataset.from_torch([]))


def test_batches_are_no_dataset() -> None:
    with pytest.raises(ConfigError, match=r"fit takes a Dataset, .* but got batches"):
        FeatureSet([numeric("age")]).fit(DATA.batch(3))


def test_a_lone_column_may_be_called_like_an_argument() -> None:
    features = FeatureSet([hashed("input", 3)])
    data = shoal.Dataset.from_arrays(({"input": torch.arange(20)}, torch.ones(20)))
    model = nn.Sequential(features.input_layer(), nn.Linear(3, 1), nn.Flatten(0))
    trainer = shoal.Trainer(
        model, loss=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
    )
    assert len(trainer.predict(data.batch(10).map(features))) == 20


def test_the_layer_says_what_it_misses() -> None:
    layer = FeatureSet([hashed("a", 3)]).input_layer()
    with pytest.raises(DataError, match="misses 'a' for its feature 'a'; the batch has b"):
        layer({"b": torch.zeros(1)})
    with pytest.raises(DataError, match="but got a Tensor"):
        layer(torch.zeros(1))
