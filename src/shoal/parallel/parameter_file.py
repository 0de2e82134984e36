"""Parameters of a model under construction, in a mapped file instead of memory.

A factory runs once, in one piece and with real values, so the model equals that of one process to
the bit, whatever the factory does. Parameters move into an unlinked file of the scratch directory
when a module registers them; the kernel can evict pages of a shared file mapping at any moment. A
strategy then partitions one parameter after the other, and the remaining ones get memory of their
own. Nothing here knows how a model is partitioned.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal import system

LEAST_BYTES = 1 << 20
"""Smaller parameters stay in memory: they are not worth a page table entry each."""

RESIDENT_BYTES = 64 << 20
"""Pages of the file that this process may hold before it drops all of them."""

CHUNK_BYTES = 1 << 30
"""Address space mapped at once. Disk space is reserved parameter by parameter."""

_CHECK_EVERY_S = 0.001
_ALONE = 2  # references to a storage with a single tensor, including the Python object that asks


class ParameterFile:
    """Parameters of one model, from the factory's first line until a strategy has partitioned it.

    A parameter that shares memory with another tensor of the script would be separated from it by
    moving: it stays in place until the other one is gone.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._chunks: list[_FileChunk] = []
        self._waiting: list[nn.Parameter] = []
        self._refused: OSError | None = None
        self._bytes_in_memory = 0
        self._ended = threading.Event()
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Context in which parameters registered by modules move into the file."""
        hook = register_module_parameter_registration_hook(self._registered)
        try:
            yield
        finally:
            hook.remove()

    @contextlib.contextmanager
    def open(self) -> Iterator[ParameterFile]:
        """Context in which this process holds few pages of the file. A tensor that is still in it afterwards stays valid.

        Operators of this thread release the pages they touched (`_Touches`). The thread handles
        accesses outside of operators: numpy, or a file that is read into a parameter.
        """
        # Before the thread, which may get to run only when much of the model is built.
        others = _resident_file_bytes()
        thread = threading.Thread(
            target=self._release_periodically, args=(others,), name="shoal-parameter-file", daemon=True
        )
        thread.start()
        try:
            with _Touches(self):
                yield self
        finally:
            self._ended.set()
            thread.join()
            for chunk in self._chunks:
                chunk.close()
            self._chunks.clear()
            self._waiting.clear()

    def move_rest(self, model: nn.Module) -> None:
        """Move parameters that the factory put into its model without `register_parameter`."""
        self._waiting.clear()
        for parameter in dict.fromkeys(model.parameters()):
            self._move(parameter)
            if parameter.nbytes >= LEAST_BYTES and not self.holds(parameter):
                self._bytes_in_memory += parameter.nbytes

    def kept_in_memory(self) -> str | None:
        """Sentence about large parameters that could not move; empty if there are none."""
        if self._bytes_in_memory < RESIDENT_BYTES:
            return None
        why = "the script holds tensors that share it, or they are of a kind of their own"
        if self._refused is not None:
            why = f"the scratch directory {self._directory} has no room ({self._refused.strerror})"
        return f"{self._bytes_in_memory / 2**20:,.0f} MiB of the model are whole in every worker's memory until they are cut: {why}"

    def settle(self, model: nn.Module) -> None:
        """Give parameters still in the file memory of their own, one after the other."""
        with torch.no_grad():
            for parameter in dict.fromkeys(model.parameters()):
                if isinstance(parameter, DTensor):
                    if self.holds(parameter._local_tensor):
                        parameter._local_tensor = parameter._local_tensor.clone()
                elif self.holds(parameter):
                    parameter.data = parameter.data.clone()

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        waiting, self._waiting = self._waiting, []
        for each in (*waiting, *([parameter] if parameter is not None else [])):
            self._move(each)

    def _move(self, parameter: nn.Parameter) -> None:
        if (
            type(parameter) is not nn.Parameter  # a subclass may have more than its data
            or parameter.device.type != "cpu"
            or parameter.layout is not torch.strided
            or parameter.nbytes < LEAST_BYTES
            or not parameter.is_contiguous()
            or self._refused is not None
            or self.holds(parameter)
        ):
            return
        storage = parameter.untyped_storage()
        is_shared = torch._C._storage_Use_Count(storage._cdata) > _ALONE
        if is_shared or storage.nbytes() != parameter.nbytes:
            if all(each is not parameter for each in self._waiting):
                self._waiting.append(parameter)
            return
        try:
            place = self._place(parameter.nbytes)
        except OSError as error:  # a full disk: the rest stays in memory
            self._refused = error
            return
        there = place.view(parameter.dtype).view(parameter.shape)
        there.copy_(parameter.detach())
        parameter.data = there

    def _place(self, num_bytes: int) -> Tensor:
        for chunk in self._chunks[-1:]:
            if chunk.room >= num_bytes:
                return chunk.reserve(num_bytes, self._page_bytes)
        self._chunks.append(
            _FileChunk(self._directory, max(CHUNK_BYTES, _rounded(num_bytes, self._page_bytes)))
        )
        return self._chunks[-1].reserve(num_bytes, self._page_bytes)

    def holds(self, tensor: Tensor) -> bool:
        if tensor.device.type != "cpu" or not tensor.numel():
            return False
        address = tensor.data_ptr()
        return any(chunk.begin <= address < chunk.begin + chunk.num_bytes for chunk in self._chunks)

    def release_pages(self) -> None:
        for chunk in list(self._chunks):
            chunk.release_pages()

    def _release_periodically(self, others: int) -> None:
        """Drop this process's pages of the file whenever they exceed RESIDENT_BYTES, mappings of other files not counted."""
        while not self._ended.wait(_CHECK_EVERY_S):
            if _resident_file_bytes() - others > RESIDENT_BYTES:
                self.release_pages()
                # Libraries grow, too. Not all at once: pages touched again before this line are not theirs.
                others = min(_resident_file_bytes(), others + RESIDENT_BYTES // 2)


class _Touches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Drops the file's pages as soon as operators have touched RESIDENT_BYTES of it.

    In the touching thread: a second thread may not run before the whole model was touched.
    """

    def __init__(self, file: ParameterFile) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._file = file
        self._num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            for each in tree_leaves((args, kwargs)):
                local = each._local_tensor if isinstance(each, DTensor) else each
                if type(local) in (Tensor, nn.Parameter) and self._file.holds(local):
                    self._num_bytes += local.nbytes
            if self._num_bytes > RESIDENT_BYTES // 2:
                self._file.release_pages()
                self._num_bytes = 0
        return result


def _resident_file_bytes() -> int:
    with open("/proc/self/statm", "rb", buffering=0) as statm:
        return int(statm.read(256).split()[2]) * mmap.PAGESIZE


class _FileChunk:
    """One unlinked file, and all of it mapped."""

    def __init__(self, directory: Path, num_bytes: int) -> None:
        self._file: Any = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 -- closed with the chunk
        os.ftruncate(self._file.fileno(), num_bytes)
        self._map = mmap.mmap(self._file.fileno(), num_bytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.begin, self.num_bytes, self._used = self._bytes.data_ptr(), num_bytes, 0

    @property
    def room(self) -> int:
        return self.num_bytes - self._used

    def reserve(self, num_bytes: int, page_bytes: int) -> Tensor:
        # Without the reservation a full disk is a SIGBUS at some later write.
        system.allocate(self._file.fileno(), self._used, num_bytes)
        place = torch.frombuffer(self._map, dtype=torch.uint8, offset=self._used, count=num_bytes)
        self._used += _rounded(num_bytes, page_bytes)
        return place

    def close(self) -> None:
        """Unreference the chunk: the mapping ends with its last tensor, and the unlinked file with the mapping."""
        self._file.close()

    def release_pages(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)


def _rounded(num_bytes: int, unit: int) -> int:
    return math.ceil(num_bytes / unit) * unit
