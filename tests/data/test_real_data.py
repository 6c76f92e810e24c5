"""The real data sets, where they lie beside the repository, come through `prepare` with every interaction."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.rows import prepared

REAL = [
    ("ml-100k", 943, 100_000, 1_682),
    ("ml-1m", 6_040, 999_611, 3_416),
    ("amazon-beauty-s3", 22_363, 198_502, 12_101),
    ("amazon-sports-s3", 35_598, 296_337, 18_357),
    ("lastfm-s3", 1_090, 52_551, 3_646),
    ("amazon-beauty-bert4rec", 40_226, 353_962, 54_542),
    ("amazon-grocery-rechorus-train", 14_681, 121_892, 8_687),
    ("ebnerd-sample.history", 44, 8_303, 2_194),
]


@pytest.mark.parametrize(("name", "users", "interactions", "items"), REAL, ids=[r[0] for r in REAL])
def test_real_data_sets_keep_every_interaction(
    shared_data: Path, tmp_path: Path, name: str, users: int, interactions: int, items: int
) -> None:
    file = shared_data / f"{name}.parquet"
    store = prepared(file, tmp_path / "out")
    assert (store.num_samples, store.num_positions, store.schema.table("item_id").num_rows) == (users, interactions, items + 1)
    table = pq.read_table(file, columns=["user_id", "item_id"])
    words = np.concatenate([[-1], store.vocabulary("item_id").to_numpy()])
    raw = words[store.position("item_id")]
    assert store.key is not None
    assert store.key.tolist() == table["user_id"].to_pylist()
    assert raw.tolist() == table["item_id"].combine_chunks().flatten().to_pylist()


@pytest.mark.parametrize(
    "name", ["ebnerd-sample.impressions", "amazon-beauty-s3.items", "amazon-sports-s3.items", "lastfm-s3.items", "ml-1m.items"]
)
def test_other_real_files_can_be_prepared_too(shared_data: Path, tmp_path: Path, name: str) -> None:
    store = prepared(shared_data / f"{name}.parquet", tmp_path / "out")
    assert store.num_samples == pq.ParquetFile(shared_data / f"{name}.parquet").metadata.num_rows
