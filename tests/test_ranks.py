from __future__ import annotations

import os
import re
import signal
import time
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_ranks

if TYPE_CHECKING:
    from pathlib import Path


def test_results_come_in_rank_order_and_tensors_travel() -> None:
    def sum_of_ranks(offset: int) -> tuple[int, torch.Tensor]:
        time.sleep(0.2 * (2 - dist.get_rank()))  # the last rank answers first
        total = torch.tensor([dist.get_rank() + offset])
        dist.all_reduce(total)
        return dist.get_rank(), total

    results = run_ranks(sum_of_ranks, 3, 10)
    assert [number for number, _ in results] == [0, 1, 2]
    assert all(total.tolist() == [33] for _, total in results)


def test_ranks_see_the_environment_of_torchrun_and_one_thread() -> None:
    def look() -> list[int]:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        return [*(int(os.environ[name]) for name in names), torch.get_num_threads()]

    assert run_ranks(look, 2) == [[0, 0, 2, 2, 1], [1, 1, 2, 2, 1]]
    assert "LOCAL_WORLD_SIZE" not in os.environ


def test_one_rank_is_a_world_too() -> None:
    assert run_ranks(dist.get_world_size, 1) == [1]


def test_the_rank_that_raised_is_named_first_with_its_traceback() -> None:
    def fail_on_one() -> None:
        if dist.get_rank() == 1:
            raise ValueError("bad row 17")
        dist.barrier()

    with pytest.raises(RankError, match=re.compile(r"^rank 1 of 2 raised.*in fail_on_one.*ValueError: bad row 17", re.S)):
        run_ranks(fail_on_one, 2)


def test_a_rank_that_dies_is_named_with_its_signal() -> None:
    def die_on_one() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankError, match=r"^rank 1 of 2 died of SIGKILL"):
        run_ranks(die_on_one, 2)


def test_a_hang_ends_in_time_and_shows_where(tmp_path: Path) -> None:
    def hang_on_zero() -> None:
        if dist.get_rank() == 0:
            (tmp_path / "pid").write_text(str(os.getpid()))
            wait_for_ever()

    def wait_for_ever() -> None:
        while True:
            time.sleep(1)

    start = time.monotonic()
    with pytest.raises(RankError, match=re.compile(r"^rank 0, 1 of 2 had not ended after 2 s.*in wait_for_ever", re.S)):
        run_ranks(hang_on_zero, 2, timeout_s=2)
    assert time.monotonic() - start < 8
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_rank() -> None:
    def make_lambda() -> object:
        return lambda: None

    with pytest.raises(RankError, match=re.compile("raised.*pickle", re.S | re.I)):
        run_ranks(make_lambda, 1)


def test_sharded_tables_train_under_the_warnings_of_this_project() -> None:
    """The exceptions named in pyproject are all that torchrec needs: building, sharding and stepping warn of nothing else."""
    assert run_ranks(_train_sharded, 2) == [(2, 4), (2, 4)]


def _train_sharded() -> tuple[int, int]:
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    tables = EmbeddingCollection(tables=[EmbeddingConfig(name="item", embedding_dim=4, num_embeddings=8, feature_names=["item"])])
    _apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1})
    sharder = EmbeddingCollectionSharder()
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    plan = construct_module_sharding_plan(
        tables, {"item": row_wise(compute_kernel="fused")}, sharder, local_size=2, world_size=2, device_type="cpu"
    )
    model = DistributedModelParallel(tables, env=env, device=torch.device("cpu"), plan=ShardingPlan({"": plan}), sharders=[sharder])
    ids = KeyedJaggedTensor(keys=["item"], values=torch.tensor([1, 5]), lengths=torch.tensor([0, 2]))
    vectors = model(ids)["item"].values()
    vectors.sum().backward()
    return tuple(vectors.shape)
