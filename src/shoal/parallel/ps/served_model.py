"""A model whose parameters live on servers: its dense chunks and row tables, and their transfer both ways.

Laid out on the first batch, because only a forward shows which embeddings can be rows. Steps are
`exact.py`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.cluster.coordinator.slot_map import NUM_SLOTS, evenest_seed, place
from shoal.cluster.worker import session
from shoal.config import strategy as strategies
from shoal.config.job import Job
from shoal.data.tree import Tree, leaves
from shoal.embedding import HashEmbedding
from shoal.embedding.lookup import LocalRows
from shoal.embedding.row_table import RowTable
from shoal.embedding.rules import RULES
from shoal.errors import ConfigError
from shoal.parallel.protocol import LayerPlace, Piece, PieceReader, TrainJob
from shoal.parallel.ps import rows as placement
from shoal.parallel.ps.arriving import cut_into_waves
from shoal.parallel.ps.named_tables import load_named, named_pieces
from shoal.parallel.ps.rows import PlacedEmbedding, PlacementPlan, RowModule, RowRule
from shoal.parallel.state import (
    MODEL,
    OPTIMIZER,
    changed_rows_of,
    changes_of,
    layers_of,
    limited,
    pieces_of,
    plain_tensors,
    saved_state,
    saved_table,
)
from shoal.ps.client.bulk_transfer import (
    RowStamps,
    changed_slots,
    read_changes,
    read_chunk,
    read_rows,
    read_table,
    together,
    write_chunk,
    write_evicted,
    write_rows,
)
from shoal.ps.client.row_cache import RowCache
from shoal.ps.client.server_group import AskAll, Group
from shoal.ps.client.step import DensePull, PushStep, RowsPull
from shoal.ps.layout import (
    CHUNK_BYTES,
    CHUNKS_PER_MODEL,
    DEVICE_CHUNK_BYTES,
    TABLES_PER_MODEL,
    dtype_name,
    plan_chunks,
)
from shoal.ps.server.dense import as_flat
from shoal.runtime import events
from shoal.runtime.transport.messages.client_server import (
    AskTables,
    ChunkSpec,
    DeclareDense,
    DeclareTable,
    TableTiers,
)

# ---- dense parameters ----------------------------------------------------------------------------


@dataclass(slots=True)
class _Chunk:
    spec: ChunkSpec
    dtype: torch.dtype
    numel: int
    # Per part: its parameter, first element there, first element here, elements.
    views: list[tuple[nn.Parameter, int, int, int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # elements of each part
    accelerator: torch.device | None = None  # device that has all of its parameters, if there is one
    missing: int = 0  # parameters without a gradient yet in this backward
    is_sent: bool = False
    _targets: list[Tensor | None] = field(default_factory=list)
    _pointers: list[int] = field(default_factory=list)
    _parts: Sequence[Tensor] = ()
    _address: int = 0

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def targets(self) -> list[Tensor | None]:
        """Each part where it lies in its parameter, None if that is not contiguous; made anew when a parameter moved."""
        pointers = [view[0].data_ptr() for view in self.views]
        if pointers != self._pointers:
            self._pointers, self._targets = pointers, [_target(*view) for view in self.views]
        return self._targets

    def parts_of(self, memory: memoryview) -> Sequence[Tensor]:
        """Each part of a pulled chunk. A server's own memory, which is read in place, is the same at every step."""
        if self.accelerator is not None:
            # One synchronous copy: the pulled memory is released after it.
            return as_flat(memory, self.dtype).to(self.accelerator).split_with_sizes(self.sizes)
        if not memory.readonly:
            return as_flat(memory, self.dtype).split_with_sizes(self.sizes)
        address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        if address != self._address:
            self._address, self._parts = address, as_flat(memory, self.dtype).split_with_sizes(self.sizes)
        return self._parts


class DenseParameters:
    """Every trained parameter that is not rows."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter, int]],
        *,
        optimizer: str,
        num_servers: int,
        num_copies: int,
        first_chunk: int,
        in_place: bool,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """`named`: name, parameter and its group in the optimizer. With `in_place` weights are read in place."""
        self._in_place = in_place
        described = [(name, tuple(p.shape), dtype_name(p.dtype), group) for name, p, group in named]
        slots = slots_at_launch(num_servers, num_copies)
        specs = plan_chunks(
            described,
            optimizer=optimizer,
            slots_by_server=slots,
            chunk_bytes=chunk_bytes,
            first_number=first_chunk,
        )
        self._parameters = parameters = {name: parameter for name, parameter, _ in named}
        self._versions: dict[int, int] = {}  # of the parameters, as the last pull left them
        self._chunks: list[_Chunk] = []
        self._of_parameter: dict[int, list[_Chunk]] = {}
        for spec in specs:
            chunk = _Chunk(spec, getattr(torch, spec.dtype), 0)
            for part in spec.parts:
                parameter = parameters[part.parameter]
                numel = torch.Size(part.shape).numel()
                chunk.views.append((parameter, part.offset, chunk.numel, numel))
                chunk.numel += numel
                self._of_parameter.setdefault(id(parameter), []).append(chunk)
            chunk.sizes = [view[3] for view in chunk.views]
            first, *others = {view[0].device for view in chunk.views}
            chunk.accelerator = first if not others and first.type != "cpu" else None
            self._chunks.append(chunk)
        self._step: PushStep | None = None
        # Chunks that a device may still be copying out: their parts without a gradient, and the event of
        # the copy.
        self._leaving: deque[tuple[_Chunk, list[int], torch.Event]] = deque()
        self.newest = 0  # most updates of anything pulled so far
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
            for _, parameter, _ in named
        ]

    @property
    def specs(self) -> list[ChunkSpec]:
        return [chunk.spec for chunk in self._chunks]

    # ---- pushing --------------------------------------------------------------------------------

    def arm(self, step: PushStep) -> None:
        """Gradients of backward from now on belong to this step and are its last."""
        self._step = step
        self._leaving.clear()
        for chunk in self._chunks:
            chunk.missing, chunk.is_sent = len({id(view[0]) for view in chunk.views}), False

    def send_rest(self) -> None:
        """After backward: send chunks it did not reach, which have no gradient on this worker."""
        for chunk in self._chunks:
            if not chunk.is_sent:
                self._send(chunk)
        while self._leaving:
            chunk, unused, is_out = self._leaving.popleft()
            is_out.synchronize()
            self._push(chunk, unused)
        self._step = None

    def disarm(self) -> None:
        """Gradients of backward belong to no step from now on."""
        self._step = None

    def _ready(self, parameter: Tensor) -> None:
        if self._step is None:
            return
        for chunk in self._of_parameter[id(parameter)]:
            chunk.missing -= 1
            if not chunk.missing:
                self._send(chunk)
        while self._leaving and self._leaving[0][2].query():
            self._push(*self._leaving.popleft()[:2])
            self._step.flush()  # the server's device takes it while this one computes

    def _send(self, chunk: _Chunk) -> None:
        assert self._step is not None
        chunk.is_sent = True
        memory = self._step.chunk_memory(chunk.spec.number, chunk.spec.slot, chunk.nbytes)
        flat = torch.frombuffer(memory, dtype=chunk.dtype)
        gradients = [_piece(*view) for view in chunk.views]
        unused = [number for number, gradient in enumerate(gradients) if gradient is None]
        device = chunk.accelerator
        whole = [
            torch.zeros(view[3], dtype=chunk.dtype, device=device or "cpu") if gradient is None else gradient
            for gradient, view in zip(gradients, chunk.views, strict=True)
        ]
        if device is None:
            with torch.no_grad():  # backward(create_graph=True) leaves gradients that have a graph
                torch.cat([gradient.cpu() for gradient in whole], out=flat)
            self._push(chunk, unused)
            return
        # Copied as one, without waiting: otherwise backward would wait for the device at every chunk.
        flat.copy_(torch.cat(whole), non_blocking=True)
        is_out = torch.Event(device)
        is_out.record()
        self._leaving.append((chunk, unused, is_out))

    def _push(self, chunk: _Chunk, unused: list[int]) -> None:
        assert self._step is not None
        has_codec = chunk.dtype in (torch.float32, torch.float64)
        self._step.push_dense(chunk.spec.number, unused, chunk.spec.dtype if has_codec else "")

    # ---- pulling --------------------------------------------------------------------------------

    @property
    def _has_codecs(self) -> bool:
        return all(chunk.dtype in (torch.float32, torch.float64) for chunk in self._chunks)

    def pull(self, clock: int, codec: str = "", unpushed: int = 0, *, some: range | None = None) -> DensePull:
        """Pull of all chunks, or of `some`."""
        wanted = self._chunks if some is None else [self._chunks[number] for number in some]
        chunks = [(c.spec.number, c.spec.slot, c.nbytes) for c in wanted]
        codec = codec if codec and self._has_codecs else ""
        dtypes = {c.spec.number: c.spec.dtype for c in wanted} if codec else None
        return DensePull(
            chunks,
            clock=clock,
            in_place=self._in_place and not codec,
            codec=codec,
            dtypes=dtypes,
            unpushed=unpushed,
        )

    def waves(self) -> list[range]:
        """Groups of chunks to pull together, in parameter order, which is mostly that of forward."""
        return cut_into_waves([chunk.nbytes for chunk in self._chunks])

    def parameters_of(self, some: range) -> Iterator[nn.Parameter]:
        return (view[0] for number in some for view in self._chunks[number].views)

    @torch.no_grad()
    def take(self, pull: DensePull) -> None:
        self.newest = max(self.newest, pull.updates)
        targets: list[Tensor] = []
        values: list[Tensor] = []
        arrived = [each for each in self._chunks if each.spec.number in pull.arrived]
        for chunk in arrived:
            parts = chunk.parts_of(pull.arrived[chunk.spec.number])
            for view, target, value in zip(chunk.views, chunk.targets(), parts, strict=True):
                if target is not None:
                    targets.append(target)
                    values.append(value)
                else:
                    parameter, offset, _, numel = view
                    whole = parameter.detach().reshape(-1).clone()
                    whole[offset : offset + numel] = value
                    parameter.copy_(whole.view(parameter.shape))
        if targets:
            torch._foreach_copy_(targets, values)
        # Of these alone: another may have been written since it arrived.
        self._versions |= {id(view[0]): view[0]._version for chunk in arrived for view in chunk.views}
        pull.release()

    @property
    def is_written(self) -> bool:
        """Whether something besides a pull has written into a parameter in place; torch does not count writes through `.data`."""
        return any(p._version != self._versions.get(id(p), p._version) for p in self._parameters.values())

    @torch.no_grad()
    def changed_name(self, group: Group, clock: int, *, is_whole: bool) -> str | None:
        """Name of a parameter that is not as the last pull left it, if there is one. They are pulled again."""
        before = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self.refresh(group, clock, is_whole=is_whole)
        return next(
            (
                name
                for name, parameter in self._parameters.items()
                if not torch.allclose(before[name], parameter, rtol=0, atol=0, equal_nan=True)
            ),
            None,
        )

    def flat(self, chunk: ChunkSpec) -> Tensor:
        """A chunk's elements, from the parameters of this process."""
        found = next(each for each in self._chunks if each.spec.number == chunk.number)
        return torch.cat(
            [p.detach().reshape(-1)[offset : offset + numel].cpu() for p, offset, _, numel in found.views]
        )

    def refresh(self, group: Group, clock: int, *, is_whole: bool = False) -> None:
        """Pull the training weights; `is_whole`: exact ones, also if pulls are compressed."""
        pull = self.pull(clock, "" if is_whole else group.compression.pull)
        group.run(pull)
        self.take(pull)


def _target(parameter: nn.Parameter, offset: int, at: int, numel: int) -> Tensor | None:
    return parameter.detach().view(-1)[offset : offset + numel] if parameter.is_contiguous() else None


def _piece(parameter: nn.Parameter, offset: int, at: int, numel: int) -> Tensor | None:
    """Part of a parameter's gradient in a chunk, if backward left one."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.layout is torch.sparse_coo:
        gradient = gradient.to_dense()
    flat = gradient.reshape(-1)
    return flat if numel == flat.numel() else flat[offset : offset + numel]


def slots_at_launch(num_servers: int, num_copies: int) -> list[list[int]]:
    """Slots of each server at launch: chunks are balanced over these, whatever the number of servers is now."""
    names = [f"server-{number}" for number in range(num_servers)]
    weights = dict.fromkeys(names, 1.0)
    seed = evenest_seed(weights, [1.0] * NUM_SLOTS, num_copies=num_copies) if num_servers > 1 else 0
    placed = place(weights, num_copies=num_copies, seed=seed)
    return [[slot for slot, holders in enumerate(placed) if holders[0] == name] for name in names]


def plain_settings(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: float(value)
        if isinstance(value, Tensor)
        else [None if each is None else float(each) for each in value]  # Adafactor's first eps
        if isinstance(value, (tuple, list))
        else value
        for key, value in group.items()
        if key != "params"
    }


# ---- the model -----------------------------------------------------------------------------------


BLOCK_BYTES = 4 << 20
"""Rows written or read at a time: bounds exchange buffers and copies on both sides."""


class StateOnServers(dict[Any, Any]):
    """`optimizer.state` of a script's optimizer that never steps in a worker: what a script reads or writes there would be lost."""

    def __init__(self, strategy: str) -> None:
        super().__init__()
        self._strategy = strategy

    def refuse(self, *_: object, **__: object) -> Any:
        raise ConfigError(
            f"the script reads or changes the state of its optimizer (optimizer.state, state_dict or load_state_dict), and under "
            f"'{self._strategy}' this state is on the servers: a worker has none of it. Nothing was changed; save it with "
            "trainer.save_checkpoint (in a loop of your own shoal.checkpoint), begin anew with another Trainer, or use --strategy ddp."
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = refuse
    items = keys = values = pop = popitem = setdefault = update = clear = refuse


class ServedModel:
    """The parameters of one model on the servers."""

    def __init__(
        self,
        job: TrainJob,
        optimizer: torch.optim.Optimizer,
        group: Group,
        launched: Job,
        *,
        rows_only: bool = False,
    ) -> None:
        """`rows_only`: dense parameters stay with the workers."""
        self._rows_only = rows_only
        self._job, self._optimizer, self._group, self._launched = job, optimizer, group, launched
        self.rows: list[RowModule] = []
        self.plan = PlacementPlan([], {})
        self._declared_settings: list[dict[str, Any]] = []
        self._settings: list[dict[str, Any]] = []  # as of the last step
        self._table_settings: dict[int, dict[str, float]] = {}
        self._state_here: StateOnServers | None = None

    def lay_out(self, batch: Tree | None, run: Callable[[], Any]) -> None:
        """Decide what is rows and what is chunks. Without a batch only those that must be rows are."""
        found = placement.plan(self._job.model, self._optimizer)
        if batch is None:
            hashed = [each for each in found.taken if isinstance(each.module, HashEmbedding)]
            others = {e.name: "the loop is the script's own" for e in found.taken if e not in hashed}
            found = PlacementPlan(hashed, {**found.dense, **others})
        elif found.taken:
            found = placement.watch(found, batch, run)
        self._settle(found)

    def lay_out_as(self, layout: dict[str, Any]) -> None:
        """Lay out as the `layout` of the worker that this one replaces."""
        found = placement.plan(self._job.model, self._optimizer)
        taken = {each.name: each for each in found.taken}
        for name, leaf, settings in layout["rows"]:
            taken[name].leaf, taken[name].rule = leaf, RowRule(taken[name].rule.name, settings)
        self._settle(PlacementPlan([taken[name] for name, _, _ in layout["rows"]], {}))
        self._declared_settings = layout["groups"]

    @property
    def layout(self) -> dict[str, Any]:
        """The plan and its declarations, as plain values."""
        rows = [[each.taken.name, each.taken.leaf, dict(each.spec.settings)] for each in self.rows]
        return {"rows": rows, "groups": self._declared_settings}

    def _settle(self, found: PlacementPlan) -> None:
        job, optimizer = self._job, self._optimizer
        self.plan = found
        self._members = self._sizes_of_groups()
        self._refuse_untrained()
        self._declared_settings = [plain_settings(group) for group in optimizer.param_groups]
        first = limited(taken.module for taken in found.taken)
        in_order = sorted(found.taken, key=lambda taken: all(taken.module is not each for each in first))
        for number, taken in enumerate(in_order):
            number += job.number * TABLES_PER_MODEL
            self.rows.append(self._row_module(taken, number))
        rows = {id(taken.module.weight) for taken in found.taken if hasattr(taken.module, "weight")}
        groups = {
            id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        is_on_cpu = self._launched.server_device == "cpu"
        self.dense = DenseParameters(
            [
                (name, parameter, groups[id(parameter)])
                for name, parameter in job.model.named_parameters()
                if parameter.requires_grad
                and id(parameter) in groups
                and id(parameter) not in rows
                and not self._rows_only
            ],
            optimizer=type(optimizer).__name__,
            num_servers=self._launched.num_servers,
            num_copies=self._launched.num_replicas,
            first_chunk=job.number * CHUNKS_PER_MODEL,
            # Values on a device cannot be read from here, and torch's calls there cost more than the bytes.
            in_place=strategies.parse(self._launched.strategy).mode == "exact" and is_on_cpu,
            chunk_bytes=CHUNK_BYTES if is_on_cpu else DEVICE_CHUNK_BYTES,
        )

    def _row_module(self, taken: PlacedEmbedding, number: int) -> RowModule:
        module = RowModule(taken, number, self._group, seed=self._job.seed)
        num_rows = self._launched.row_cache
        if num_rows is not None:
            bound, max_age = strategies.parse(self._launched.strategy).bound, self._launched.pull_every
            module.cache = RowCache(num_rows, module.dim, module.np_dtype, max_age=max_age, bound=bound)
        return module

    def places(self) -> Iterator[LayerPlace]:
        """Places: rows by their keys, the rest in chunks; layers not on servers are left out."""
        last = self._launched.num_servers - 1
        where = f"servers 0-{last}" if last else "server 0"
        taken = {module.taken.name.rpartition(".")[0] for module in self.rows}
        for layer in layers_of(self._job.model):
            if layer in taken:
                sends: tuple[tuple[str, dict[str, float]], ...] = (("pull rows, push their gradients", {}),)
                yield LayerPlace(layer, where, "rows by key", is_cut=True, sends=sends)
            elif not self._rows_only:
                sends = (("pull weights, push gradients", {"parameters": 2.0}),)
                yield LayerPlace(layer, where, "in chunks", sends=sends)

    def declare(self) -> None:
        """Declare everything to all servers, present and future."""
        for message in self.declarations():
            self._group.declare(message)

    def declarations(self) -> list[DeclareTable | DeclareDense]:
        found: list[DeclareTable | DeclareDense] = [DeclareTable(module.spec) for module in self.rows]
        kind = type(self._optimizer).__name__
        if self.dense.specs:
            found.append(DeclareDense(self.dense.specs, kind, self._declared_settings, self._job.number))
        return found

    def clear_cache(self) -> None:
        """Drop cached rows after they were overwritten."""
        for module in self.rows:
            if module.cache is not None:
                module.cache.clear()

    def write(
        self, saved: PieceReader | None, *, keeps_state: bool = False, but: Collection[RowModule] = ()
    ) -> None:
        """Write this process's model to the servers, except tables in `but`, and the optimizer state
        of `saved`, or their present one.
        """
        if saved is not None and saved.optimizer_settings is not None:
            load_named(self._group, saved)
        for module in self.rows:
            if module in but:
                continue
            if isinstance(module.module, HashEmbedding):
                self._write_hashed(module, saved, keeps_state)
                continue
            weight = module.module.weight
            assert isinstance(weight, Tensor)
            if keeps_state:
                for slot in read_rows(self._group, module.spec):
                    values = weight.detach().cpu()[torch.from_numpy(slot.keys)].numpy()
                    self._write_rows(module, slot.keys, values, slot.state, slot.step)
                continue
            state, step, _ = saved_state(module.taken.name, module.spec, saved)
            self._write_rows(
                module, np.arange(len(weight), dtype=np.int64), weight.detach().cpu().numpy(), state, step
            )
        for spec in self.dense.specs:
            chunk = read_chunk(self._group, spec)[1] if keeps_state else self._saved_chunk(spec, saved)
            write_chunk(self._group, spec, self.dense.flat(spec), chunk)

    def _write_rows(self, module: RowModule, keys: Any, values: Any, state: Any, step: int) -> None:
        num_rows = _block_rows(module)
        for first in range(0, len(keys), num_rows):
            block = slice(first, first + num_rows)
            some = None if state is None else state[block]
            write_rows(self._group, module.spec, keys[block], values[block], some, step)

    def _write_hashed(self, module: RowModule, saved: PieceReader | None, keeps_state: bool) -> None:
        assert isinstance(module.module, HashEmbedding)
        source, name = module.module.source, module.taken.name
        table = saved_table(name, saved) if saved is not None else None
        if table is None:
            if isinstance(source, LocalRows):
                self._write_rows(module, *source.everything(), None, 0)
            return
        state, step, num_evicted = saved_state(name, module.spec, saved)
        if not isinstance(source, LocalRows):  # rows missing in the saved table are as if never written
            had, _, had_state, had_step, _ = read_table(self._group, module.spec)
            others = np.setdiff1d(had, table[0], assume_unique=True)
            values = np.empty((len(others), module.dim), module.np_dtype)
            RowTable(module.spec).pull(others, values)
            gone = None  # with a policy they are deleted: no sightings
            if module.spec.policy is not None:
                gone = np.zeros((len(others), had_state.shape[1]), module.np_dtype)
            self._write_rows(module, others, values, gone, step)
            if keeps_state:
                self._write_rows(module, *table, None, had_step)
                both, new, old = np.intersect1d(table[0], had, assume_unique=True, return_indices=True)
                self._write_rows(module, both, table[1][new], had_state[old], had_step)
                return
        self._write_rows(module, *table, state, step)
        if num_evicted:
            write_evicted(self._group, module.spec, num_evicted, step)

    def install(self) -> None:
        for module in self.rows:
            module.install()
            module.note_copy()

    def push_rows(self, step: PushStep) -> None:
        for module in self.rows:
            gradients = module.take_gradients()
            if gradients is not None and len(gradients[0]):
                step.push_rows(module.spec.number, *gradients)

    @property
    def is_written(self) -> bool:
        """Whether something besides a pull has written in place into what this process has of the model."""
        return self.dense.is_written or any(module.is_written for module in self.rows)

    def changed_name(self, clock: int, *, is_whole: bool) -> str | None:
        """Name of a weight that is not as the last pull left it, if there is one."""
        rows = (module.taken.name for module in self.rows if module.has_changed_copy)
        return self.dense.changed_name(self._group, clock, is_whole=is_whole) or next(rows, None)

    def keep_state_there(self) -> None:
        """From now on the optimizer's state is on the servers, and only there."""
        self._state_here = StateOnServers(self._launched.strategy)
        self._optimizer.state = self._state_here  # type: ignore[assignment]

    def pull_rows_ahead(self, batch: Tree, clock: int) -> None:
        """Request the rows of the next batch, if its ids are in it."""
        columns = list(leaves(batch))
        for module in self.rows:
            leaf = module.taken.leaf
            if leaf is not None and isinstance(columns[leaf], Tensor):
                module.pull_ahead(columns[leaf], clock)

    def settings(self) -> tuple[list[dict[str, Any]], dict[int, dict[str, float]]]:
        """Present hyper-parameters of groups and tables, which a scheduler may have changed.

        They go with every step: a server that only received changes would have to know what it
        missed.
        """
        settings = [plain_settings(group) for group in self._optimizer.param_groups]
        if self._state_here is not None:
            self._refuse_changed_optimizer(self._state_here)
        if settings != self._settings:
            self._settings = settings
            self._table_settings = {module.spec.number: self._rule_now(module.taken) for module in self.rows}
        return settings if self.dense.specs else [], self._table_settings

    def _refuse_changed_optimizer(self, state: StateOnServers) -> None:
        if self._optimizer.state is not state:
            state.refuse()
        if self._sizes_of_groups() != self._members:
            raise ConfigError(
                f"the parameter groups of the optimizer had {self._members} parameters when they were laid out on the servers, and now have "
                f"{self._sizes_of_groups()}. Nothing of this step was updated; give the optimizer all of them before the first step, with a "
                "learning rate of 0 for those that are trained later, or use another Trainer from there on."
            )

    def _sizes_of_groups(self) -> list[int]:
        return [len(group["params"]) for group in self._optimizer.param_groups]

    def _refuse_untrained(self) -> None:
        """Refuse a norm over gradients that are not pushed: of parameters that the optimizer does not have."""
        known = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        others = [n for n, p in self._job.model.named_parameters() if p.requires_grad and id(p) not in known]
        if self._job.clip_norm is not None and others and not self._rows_only:
            raise ConfigError(
                f"clip_norm= is of the gradients of all parameters, and the optimizer does not have {len(others)} of them ('{others[0]}'), "
                f"which under '{self._launched.strategy}' are not sent to the servers. Nothing was trained; freeze what is not trained, "
                "requires_grad_(False), or give all of them to the optimizer."
            )

    def _rule_now(self, taken: PlacedEmbedding) -> dict[str, float]:
        rule = placement.row_rule(self._optimizer, max(taken.group, 0))
        if isinstance(rule, str):
            raise ConfigError(
                f"the settings of the optimizer were changed so that the rows of '{taken.name}' on the servers cannot follow it: {rule}. "
                "Nothing of this step was updated; set it before the first step, when the embedding is laid out for it, or use --strategy "
                "ddp."
            )
        return rule.settings

    # ---- all of it ------------------------------------------------------------------------------

    @torch.no_grad()
    def pull_weights(self, clock: int, *, with_rows: bool = True) -> None:
        """Load the servers' weights into this process's model, except unbounded rows."""
        session.shared(self._group.bytes_shared)
        session.saved_keys(self._group.key_bytes_saved)
        self._group.key_bytes_saved = 0
        self._report_tiers()
        self.dense.refresh(self._group, clock, is_whole=True)
        for module in self.rows:
            module.clock, module.is_training = clock, False
            weight = getattr(module.module, "weight", None)
            if not with_rows or not isinstance(weight, Tensor) or module.is_resident:
                continue
            num_rows = _block_rows(module)
            for first in range(0, len(weight), num_rows):
                last = min(first + num_rows, len(weight))
                keys = np.arange(first, last, dtype=np.int64)
                pull = RowsPull(module.spec.number, keys, module.dim, module.np_dtype, clock=clock)
                self._group.run(pull)
                weight[first:last].copy_(torch.from_numpy(pull.rows))
                pull.release()
            module.note_copy()

    def _report_tiers(self) -> None:
        """Tell where the rows are, for summary.json."""
        is_of_interest = self._launched.table_memory is not None or any(
            module.spec.policy is not None for module in self.rows
        )
        if not is_of_interest or self._launched.rank or not self.rows:
            return
        asking = AskAll(lambda _: AskTables())
        self._group.run(asking)
        told = [answer for answer, _ in asking.answers if isinstance(answer, TableTiers)]
        facts = {name: sum(getattr(each, name) for each in told) for name in TableTiers.__struct_fields__}
        lookups = facts["num_hits"] + facts["num_misses"]
        events.emit("tables", **facts, hit_rate=facts["num_hits"] / lookups if lookups else 1.0)

    @torch.no_grad()
    def optimizer_pieces(self, changes: RowStamps | None = None) -> Iterator[Piece]:
        """The optimizer's state, by parameter, whole.

        With `changes`, tables with a weight in this process are read here, weight and state of a row
        at once: whole into the weight, or rows that changed as pieces.
        """
        parameters = dict(self._job.model.named_parameters())
        whole: dict[str, Tensor] = {}
        for spec in self.dense.specs:
            _, state = read_chunk(self._group, spec)
            for (number, key), tensor in state.items():
                part = spec.parts[number]
                parameter = parameters[part.parameter]
                name = f"{OPTIMIZER}{part.parameter}/{key}"
                numel = torch.Size(part.shape).numel()
                if tensor.numel() == numel and numel != parameter.numel():
                    target = whole.setdefault(name, torch.zeros(parameter.shape, dtype=tensor.dtype))
                    target.view(-1)[part.offset : part.offset + numel] = tensor.reshape(-1)
                elif tensor.numel() == parameter.numel() and tensor.dim():
                    whole[name] = tensor.reshape(parameter.shape)
                else:
                    whole[name] = tensor
        for module in self.rows:
            columns = RULES[module.spec.rule].state_columns(module.dim)
            weight = getattr(module.module, "weight", None)
            if not isinstance(weight, Tensor) or module.is_resident or not (columns or changes):
                continue
            name, table = module.taken.name, module.spec
            changed = changed_slots(self._group, table, name, changes) if changes is not None else None
            if changed is not None:
                keys, values, states, step, _ = together(changed)
                yield from changed_rows_of(name, table, keys, values, states, step)
                continue
            held = {
                key: torch.zeros(len(weight), span.stop - span.start, dtype=weight.dtype)
                for key, span in columns.items()
            }
            num_updates = 0
            for slot in read_rows(self._group, table, is_tracked=changes is not None):
                at = torch.from_numpy(slot.keys)
                # A slot without rows reports none before a checkpoint.
                num_updates = max(num_updates, slot.step)
                for key, span in columns.items():
                    held[key][at] = torch.from_numpy(np.ascontiguousarray(slot.state[:, span]))
                if changes is not None:
                    changes.note(name, slot)
                    weight[at] = torch.from_numpy(slot.values).to(weight.device)
            if changes is not None:
                module.note_copy()
            for key, tensor in held.items():
                whole[f"{OPTIMIZER}{name}/{key}"] = tensor
            if columns:
                whole[f"{OPTIMIZER}{name}/step"] = torch.tensor(float(num_updates))
        for name, tensor in whole.items():
            yield Piece(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())

    def table_pieces(self, changes: RowStamps | None = None) -> Iterator[Piece]:
        """Tables of any ids, also those of `shoal.ps.connect()`: whole, or rows that changed."""
        for module in self.rows:
            name, spec = module.taken.name, module.spec
            if not isinstance(module.module, HashEmbedding):
                continue
            table, is_whole = read_changes(self._group, spec, name, changes)
            yield from pieces_of(name, spec, *table) if is_whole else changes_of(name, spec, *table)
        yield from named_pieces(self._group, changes)

    def _saved_chunk(self, spec: Any, saved: PieceReader | None) -> dict[tuple[int, str], Tensor]:
        if saved is None or saved.optimizer_settings is None:
            return {}
        state: dict[tuple[int, str], Tensor] = {}
        parameters = dict(self._job.model.named_parameters())
        for number, part in enumerate(spec.parts):
            prefix = f"{OPTIMIZER}{part.parameter}/"
            numel = torch.Size(part.shape).numel()
            for name in saved.tensors:
                if not name.startswith(prefix) or "/" in name.removeprefix(prefix):
                    continue
                tensor = saved.tensors[name]
                if tensor.dim() and tensor.numel() == parameters[part.parameter].numel():
                    tensor = tensor.reshape(-1)[part.offset : part.offset + numel].reshape(part.shape)
                state[number, name.removeprefix(prefix)] = tensor
        return state

    def model_pieces(self) -> Iterator[Piece]:
        """The model's own tensors; `pull_weights` first."""
        for name, tensor in plain_tensors(self._job.model).items():
            yield Piece(MODEL + name, tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim())


def _block_rows(module: RowModule) -> int:
    return max(1, BLOCK_BYTES // (8 + module.dim * module.np_dtype.itemsize))
