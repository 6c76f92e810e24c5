"""Batches of one epoch for one rank: built ahead by a thread, in pinned memory, copied while the step before computes.

`Loader` is what distrag trains with. `Histories` is the same data for a plain torch DataLoader with worker processes.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from distrag.batch import RaggedBatch
from distrag.batching.sampler import StepSamples

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from distrag.batching.collate import Collate
    from distrag.batching.compiled import Floats, Ints
    from distrag.batching.plan import EpochPlan
    from distrag.batching.sampler import TokenBudgetSampler
    from distrag.data.split import View


class Loader:
    """Iterates the RaggedBatches of the sampler's epoch, one a global step; a rank without samples gets a dummy of weight 0.

    Args:
        collate: builds the batches.
        view: the samples' windows.
        sampler: the planned epoch; its `set_epoch` chooses which.
        device: where batches go. To CUDA they are copied from pinned memory on a stream of their own.
        prefetch: batches built ahead by a thread; 0 builds each when it is asked for.
        training: whether negatives are drawn.

    Attributes:
        wait_s: seconds the consumer has waited for batches since the loader was made.
    """

    def __init__(
        self,
        collate: Collate,
        view: View,
        sampler: TokenBudgetSampler,
        *,
        device: torch.device | str = "cpu",
        prefetch: int = 2,
        training: bool = True,
    ) -> None:
        assert len(view) == len(sampler.lengths), "the sampler was made for another view"
        self.collate, self.view, self.sampler = collate, view, sampler
        self.device, self.prefetch, self.training = torch.device(device), prefetch, training
        self.wait_s = 0.0

    def __len__(self) -> int:
        """Steps that iterating yields."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[RaggedBatch]:
        # The plan is taken here and not in the thread, so that a later `set_epoch` cannot reach into this epoch. So are the counts: ranks
        # that cannot read all samples exchange them, which must not meet the collectives of a step.
        plan = self.sampler.plan
        view = self.view.at_epoch(plan.epoch)
        build = self._build_host(plan, self.sampler.start, view, self.collate.counts(view))
        if self.device.type == "cuda":
            build = self._build_cuda(build)
        batches = build if self.prefetch == 0 else _ahead(build, self.prefetch)
        try:
            while True:
                started = time.perf_counter()
                batch = next(batches, None)
                self.wait_s += time.perf_counter() - started
                if batch is None:
                    return
                yield self._arrive(batch)
        finally:
            batches.close()

    def _build_host(self, plan: EpochPlan, start: int, view: View, counts: Floats) -> Generator[Any, None, None]:
        rank = self.sampler.rank
        for step in range(start, plan.num_steps):
            yield self.collate(
                view,
                plan.samples(step, rank),
                step=step,
                epoch=plan.epoch,
                global_count=plan.step_sum(step, counts),
                num_tokens_global=plan.step_tokens(step),
                training=self.training,
            )

    def _build_cuda(self, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        for batch in batches:
            with torch.cuda.stream(stream):  # of this device too: the thread's own default is GPU 0
                copied = batch.pin_memory().to(self.device, non_blocking=True)
                done = stream.record_event()
            yield copied, done  # outside of the block: without a thread the consumer would go on in it

    def _arrive(self, batch: Any) -> RaggedBatch:
        if self.device.type != "cuda":
            return batch  # type: ignore[no-any-return]
        copied, done = batch
        current = torch.cuda.current_stream(self.device)
        current.wait_event(done)
        copied.record_stream(current)
        return copied  # type: ignore[no-any-return]


def _ahead(source: Iterator[Any], depth: int) -> Generator[Any, None, None]:
    """Yields what `source` yields while a thread runs it up to `depth` items ahead; its exception is raised here, with its traceback."""
    ready: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    places, stopped = threading.Semaphore(depth), threading.Event()

    def work() -> None:
        try:
            while True:
                places.acquire()
                if stopped.is_set():
                    return
                item = next(source, None)
                ready.put((item, None))
                if item is None:
                    return
        except BaseException as error:
            ready.put((None, error))

    thread = threading.Thread(target=work, name="distrag-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is None:
                return
            places.release()
            yield item
    finally:
        stopped.set()
        places.release()
        thread.join()


def padding_share(lengths: Ints) -> float:
    """Returns which share of a batch padded to its longest sequence would be padding; 0 where nothing would be padded."""
    cells = len(lengths) * int(lengths.max(initial=0))
    return 1.0 - int(lengths.sum()) / cells if cells else 0.0


class Histories(Dataset[RaggedBatch]):
    """Samples of a view for a plain DataLoader: one list of sample numbers in, one RaggedBatch out.

    `DataLoader(Histories(collate, view), batch_sampler=TokenBudgetSampler(view, ...), collate_fn=Histories.collate_fn, num_workers=k)`.
    Give the sampler `counts=collate.counts`, and its lists carry `global_count` to the worker.

    Args:
        collate: builds the batches; a worker that is not forked maps the store itself.
        view: the samples' windows.
        training: whether negatives are drawn.
    """

    def __init__(self, collate: Collate, view: View, *, training: bool = True) -> None:
        self.collate, self.view, self.training = collate, view, training

    def __len__(self) -> int:
        """Samples in the view."""
        return len(self.view)

    @property
    def lengths(self) -> Ints:
        """Events of each history in epoch 0, int64 `[n]`."""
        return self.view.lengths

    def __getitem__(self, sample: int) -> RaggedBatch:
        """Returns a batch of one sample."""
        return self.__getitems__([sample])

    def __getitems__(self, samples: list[int]) -> RaggedBatch:
        """Returns the batch of these samples, in the step and epoch that the sampler's list names."""
        at = samples if isinstance(samples, StepSamples) else StepSamples(samples)
        return self.collate(
            self.view.at_epoch(at.epoch),
            np.array(at, np.int64),
            step=at.step,
            epoch=at.epoch,
            global_count=at.global_count,
            num_tokens_global=at.num_tokens_global,
            training=self.training,
        )

    @staticmethod
    def collate_fn(batch: RaggedBatch) -> Any:
        """Returns the batch as it is; a worker process sends it by value.

        Each tensor that a worker shares costs open files for as long as it lives: a loop that keeps what an epoch gave runs out of them.
        """
        return batch if get_worker_info() is None else _Sent(batch)


class _Sent:
    """A batch on its way out of a worker process: pickled as plain arrays, and a RaggedBatch again on arrival."""

    def __init__(self, batch: RaggedBatch) -> None:
        self.batch = batch

    def __reduce__(self) -> tuple[Any, ...]:
        batch = self.batch
        arrays = [getattr(batch, name).numpy() for name in _TENSORS]
        ids = batch.ids
        jagged = (list(ids.keys()), ids.values().numpy(), ids.lengths().numpy(), ids.stride(), ids.length_per_key())
        numbers = (batch.step, batch.epoch, batch.global_count, batch.num_tokens_global)
        return _arrived, (jagged, arrays, numbers)


_TENSORS = ("offsets", "numbers", "context", "labels", "weights", "samples")


def _arrived(jagged: tuple[Any, ...], arrays: list[Any], numbers: tuple[Any, ...]) -> RaggedBatch:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    keys, values, lengths, stride, length_per_key = jagged
    ids = KeyedJaggedTensor(
        keys=keys,
        values=torch.from_numpy(values),
        lengths=torch.from_numpy(lengths),
        stride=stride,
        length_per_key=length_per_key,
    )
    tensors: list[Any] = [torch.from_numpy(array) for array in arrays]
    return RaggedBatch(ids, *tensors, *numbers)
