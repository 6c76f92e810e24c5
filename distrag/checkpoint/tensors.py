"""Pieces of tensors in the format of torch.distributed.checkpoint: any layout is written, any other is read back.

A rank writes `__<rank>_0.distcp` alone; who wrote what is joined into `.metadata` afterwards. That file is a pickle: it is read by an
unpickler that knows the classes of such a file and no other, and tensors are read as weights only, so that a checkpoint from elsewhere
runs no code.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from distrag.checkpoint.manifest import Damage
from distrag.checkpoint.pieces import Piece, Size

METADATA = ".metadata"
Written = list[dict[str, Any]]
"""Where each piece of a rank went, JSON-able."""


class _Writing(DefaultSavePlanner):
    """Gives the writer its tensors."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self._tensors = {(piece.name, piece.offsets): piece.tensor for piece in pieces}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._tensors[write_item.index.fqn, tuple(write_item.index.offset or ())]


class _Reading(DefaultLoadPlanner):
    """Gives the reader the place that it fills."""

    def __init__(self, piece: Piece) -> None:
        super().__init__()
        self._tensor = piece.tensor

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        place = self._tensor
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            place = place.narrow(dim, begin, length)
        return place


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # the folder is named otherwise once it is whole


def write_pieces(folder: Path, rank: int, pieces: Sequence[Piece]) -> Written:
    """Writes this rank's file, on the disk when it returns; returns where each piece went."""
    # The default copies ahead on a CUDA stream, of which host copies have no need.
    writer = _Writer(folder, overwrite=False, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
    plan = writer.prepare_local_plan(SavePlan([_write_item(piece) for piece in pieces]))
    of = {(piece.name, piece.offsets): piece for piece in pieces}
    results = writer.write_data(plan, _Writing(pieces)).wait()
    return [_entry(of[result.index.fqn, tuple(result.index.offset or ())], result.storage_data) for result in results]


def _write_item(piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)
    data = TensorWriteData(chunk, TensorProperties(dtype=piece.tensor.dtype), torch.Size(piece.size))
    return WriteItem(MetadataIndex(piece.name, piece.offsets), WriteItemType.SHARD, tensor_data=data)


def _entry(piece: Piece, at: _StorageInfo) -> dict[str, Any]:
    shape = {"name": piece.name, "size": piece.size, "offsets": piece.offsets, "sizes": tuple(piece.tensor.shape)}
    dtype = str(piece.tensor.dtype).removeprefix("torch.")
    return {**shape, "dtype": dtype, "file": at.relative_path, "at": at.offset, "bytes": at.length}


def write_metadata(folder: Path, written: Iterable[Written]) -> None:
    """Writes `.metadata` from what all ranks have written."""
    tensors: dict[str, TensorStorageMetadata] = {}
    results = []
    for entry in (entry for rank in written for entry in rank):
        properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
        tensor = tensors.setdefault(entry["name"], TensorStorageMetadata(properties, torch.Size(entry["size"]), []))
        index = MetadataIndex(entry["name"], entry["offsets"], len(tensor.chunks))
        tensor.chunks.append(ChunkStorageMetadata(torch.Size(entry["offsets"]), torch.Size(entry["sizes"])))
        results.append(WriteResult(index, entry["bytes"], _StorageInfo(entry["file"], entry["at"], entry["bytes"])))
    writer = _Writer(folder)
    writer.set_up_storage_writer(True)
    writer.finish(Metadata(dict(tensors)), [results])


_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("torch.distributed.checkpoint.metadata", name) for name in ("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")),
    *(("torch.distributed.checkpoint.metadata", name) for name in ("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
}


class _Unpickler(pickle.Unpickler):
    """Knows what a `.metadata` of ours is made of; a pickle may name anything else of Python, and would call it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of distrag holds")


def read_metadata(folder: Path, files: Collection[str]) -> Metadata:
    """Returns what `.metadata` says, after a look at all of it.

    Args:
        folder: of the checkpoint.
        files: names of its files; pieces lie nowhere else.

    Raises:
        Damage: it cannot be read, or holds what no save of distrag writes.
    """
    try:
        with (folder / METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
        _check_metadata(metadata, files)
    except Damage:
        raise
    except Exception as error:  # of a pickle that is none, anything can go wrong
        raise Damage(f"{METADATA} cannot be read: {error}") from None
    return metadata  # type: ignore[no-any-return]


def _check_metadata(metadata: Any, files: Collection[str]) -> None:
    places = metadata.storage_data
    for index, place in places.items():
        if not isinstance(place, _StorageInfo) or place.relative_path not in files or place.transform_descriptors:
            raise Damage(f"{METADATA} leads out of the checkpoint")
        if type(place.offset) is not int or type(place.length) is not int or min(place.offset, place.length) < 0:
            raise Damage(f"{METADATA} has no place for {index.fqn}")
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):  # bytes are pickles too
            raise Damage(f"{METADATA} holds {name}, which is no tensor")
        volume = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if volume != math.prod(tensor.size) or any(MetadataIndex(name, chunk.offsets) not in places for chunk in tensor.chunks):
            raise Damage(f"{METADATA} does not have all of {name}")


def sizes_of(metadata: Metadata) -> dict[str, Size]:
    """Returns the size of every whole tensor of a checkpoint."""
    return {name: tuple(_stored(metadata, name).size) for name in metadata.state_dict_metadata}


def dtypes_of(metadata: Metadata) -> dict[str, torch.dtype]:
    """Returns the dtype of every tensor of a checkpoint."""
    return {name: _stored(metadata, name).properties.dtype for name in metadata.state_dict_metadata}


def _stored(metadata: Metadata, name: str) -> TensorStorageMetadata:
    stored = metadata.state_dict_metadata[name]
    assert isinstance(stored, TensorStorageMetadata), "read_metadata has refused anything else"
    return stored


def read_pieces(folder: Path, metadata: Metadata, pieces: Iterable[Piece]) -> Iterator[None]:
    """Fills pieces from a checkpoint of any layout; yields after each.

    Raises:
        Damage: a tensor cannot be read, or does not cover the piece.
    """
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    for piece in pieces:
        chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)
        items = create_read_items_for_chunk_list(piece.name, _stored(metadata, piece.name), [chunk])
        if sum(math.prod(item.lengths) for item in items) != piece.tensor.numel():
            raise Damage(f"{METADATA} does not have all of {piece.name}")
        try:
            reader.read_data(LoadPlan(items), _Reading(piece)).wait()
        except Exception as error:
            told = str(error).splitlines()[0][:200] if str(error) else ""
            raise Damage(f"{piece.name} cannot be read: {type(error).__name__}: {told}") from error
        yield


def read_whole(folder: Path, metadata: Metadata, name: str) -> torch.Tensor:
    """Returns a whole tensor of a checkpoint, on the CPU."""
    stored = _stored(metadata, name)
    tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
    for _ in read_pieces(folder, metadata, [Piece(name, tuple(stored.size), (0,) * tensor.dim(), tensor, alike=True)]):
        pass
    return tensor
