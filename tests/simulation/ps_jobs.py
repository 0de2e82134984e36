"""Jobs of simulated workers, their expected results, and the oracle that compares.

An exact job is compared with a run in one place that knows no servers: every
pull, every result and the final rows and chunks, bit for bit. A relaxed job
adds whole numbers, whose sum is the same in any order: every batch must be in
every slot exactly once, whatever happened.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.ps.layout import slot_of
from shoal.ps.server.contents import ServerTable
from shoal.ps.server.dense import DenseStore
from shoal.runtime.transport.messages.client_server import (
    ChunkSpec,
    DeclareDense,
    DeclareMode,
    DeclareTable,
    DensePart,
    TableSpec,
)
from shoal.runtime.transport.messages.message import Message
from simulation.ps_cluster import Simulated
from simulation.ps_workers import Client, ExactWorker, RelaxedWorker
from simulation.world import Violated


class Job(Simulated):
    """A table and some chunks."""

    spec: TableSpec
    chunks: list[ChunkSpec]
    chunk_dtype: Any
    mode: DeclareMode
    declarations: list[Message]

    def declare(
        self, spec: TableSpec, dtype: str, optimizer: str, settings: dict[str, Any], mode: DeclareMode
    ) -> None:
        self.spec, self.chunk_dtype, self.mode = spec, np.dtype(dtype), mode
        self.chunks = [
            ChunkSpec(number, slot, dtype, [DensePart(f"w{number}", [3], 0, 0)])
            for number, slot in enumerate((0, 77, 200))
        ]
        self.dense = DeclareDense(self.chunks, optimizer, [settings])
        self.declarations = [DeclareTable(spec), self.dense, mode]

    def chunk_bytes(self, chunk: ChunkSpec) -> int:
        return 3 * self.chunk_dtype.itemsize

    def primary_rows(self) -> dict[int, tuple[bytes, bytes]]:
        """Key: value and state, as the primaries have them."""
        found = {}
        for number, server in self.servers.items():
            primary = np.array([holders[0] == number for holders in self.newest.holders])
            if primary.any():
                found |= _rows(server.core.state.contents.tables[0], primary)
        return found

    def primary_chunk(self, chunk: ChunkSpec) -> Any:
        server = self.servers[self.newest.holders[chunk.slot][0]]
        return server.core.state.contents.dense.read(chunk.number)[0].numpy()


def _rows(table: ServerTable, slots: Any) -> dict[int, tuple[bytes, bytes]]:
    keys, values, state = table.read_rows(np.arange(table.num_rows))
    inside = slots[slot_of(0, keys)]
    return {
        key: (values[at].tobytes(), state[at].tobytes()) for at, key in enumerate(keys.tolist()) if inside[at]
    }


class Reference:
    """The same steps without servers: tables and chunks in one place, ranks in order."""

    def __init__(self, job: Exact) -> None:
        self.table, self.dense = ServerTable(job.spec), DenseStore()
        self.dense.declare(job.chunks, job.dense.optimizer, job.dense.groups)
        for chunk in job.chunks:
            self.dense.write(chunk.number, job.first_dense(chunk.number))
        self.pulls: dict[tuple[int, int], tuple[Any, dict[int, Any]]] = {}
        self.results: dict[int, bytes] = {}
        num_applied = 0
        for step in range(1, job.num_steps + 1):
            num_applied += self._step(job, step, num_applied)

    def _step(self, job: Exact, step: int, num_applied: int) -> bool:
        sums: dict[int, Any] = {}
        dense: dict[int, Any] = {}
        total: Any = None
        for rank in range(job.num_workers):
            keys = job.keys(rank, step)
            rows = np.zeros((len(keys), job.spec.dim), job.spec.dtype)
            self.table.pull(keys, rows)
            chunks = {each.number: self.dense.read(each.number)[0].numpy().copy() for each in job.chunks}
            self.pulls[rank, step] = (rows, chunks)
            keys, grads, pushed, vector = job.contribution(rank, step, rows, chunks)
            for at, key in enumerate(keys.tolist()):
                sums[key] = sums[key] + grads[at] if key in sums else grads[at].copy()
            for number, gradient in pushed.items():
                dense[number] = dense[number] + gradient if number in dense else gradient
            total = vector if total is None else total + vector
        keys = np.array(sorted(sums), np.int64)
        grads = np.array([sums[key] for key in keys.tolist()], job.spec.dtype)
        squares = np.zeros(256)
        wide = (grads.astype(np.float64) ** 2).sum(axis=1)
        np.add.at(squares, slot_of(0, keys), wide)
        for chunk in job.chunks:
            squares[chunk.slot] += self.dense.sum_of_squares(chunk.number, dense[chunk.number])
        factor, applies, norm = job.decide(total, squares)
        if applies:
            groups, tables = job.settings(step)
            self.table.step, self.table.settings = num_applied, tables[0]
            self.table.apply(keys, grads, factor)
            for chunk in job.chunks:
                self.dense.update(chunk.number, dense[chunk.number], (), groups, factor=factor)
        self.results[step] = np.append(total, [float(applies), norm]).tobytes()
        return applies


class Exact(Job):
    """`ps`: all ranks, every step, the same bits."""

    num_global = 8.0
    is_clipped = False

    def prepare(self) -> None:
        random = self.world.random
        self.num_steps = random.randint(2, 6)
        self.committed_at: dict[int, float] = {}
        self.salt = random.randrange(1000)
        self.nan_step = random.randint(1, 12)
        self.script = [0]  # 0: a gather; else a step
        for step in range(1, self.num_steps + 1):
            self.script += [step, 0] if random.random() < 0.3 else [step]
        is_alone = self.num_servers == 1
        if is_alone:
            self.fault_kinds = tuple(kind for kind in self.fault_kinds if kind != "scale")
        two_phase = not is_alone or random.random() < 0.3
        wants_norm = two_phase and random.random() < 0.6
        rule, settings = random.choice(
            [("adagrad", {"lr": 0.1}), ("adam", {"lr": 0.01}), ("sgd", {"lr": 0.1})]
        )
        spec = TableSpec(0, "rows", 2, "float32", rule, settings, None, "normal", 1.0, self.salt)
        mode = DeclareMode(self.num_workers, "exact", two_phase=two_phase, wants_norm=wants_norm)
        self.declare(spec, "float32", "SGD", {"lr": 0.05, "momentum": 0.9}, mode)
        self.reference = Reference(self)

    def make_worker(self, rank: int, incarnation: int) -> Client:
        return ExactWorker(self, rank, incarnation)

    # ---- what is computed: functions of rank, step and weights ----------------------------------

    def keys(self, rank: int, step: int) -> Any:
        draw = np.random.default_rng((self.salt, rank, step))
        return np.unique(draw.integers(0, 60, 12)).astype(np.int64)

    def first_dense(self, number: int) -> Any:
        return np.random.default_rng((self.salt, number)).normal(size=3).astype(np.float32)

    def contribution(
        self, rank: int, step: int, rows: Any, dense: dict[int, Any]
    ) -> tuple[Any, Any, Any, Any]:
        draw = np.random.default_rng((self.salt, rank, step, 1))
        grads = (rows * np.float32(0.3) + draw.normal(size=rows.shape).astype(np.float32)).astype(np.float32)
        chunks = {
            number: (value * np.float32(0.2) + draw.normal(size=3).astype(np.float32)).astype(np.float32)
            for number, value in sorted(dense.items())
        }
        losses = np.zeros(self.num_workers)
        losses[rank] = float(
            rows.astype(np.float64).sum() + sum(each.astype(np.float64).sum() for each in dense.values())
        )
        if step == self.nan_step and rank == 0:
            losses[rank] = np.nan
        count = 1.0 + (rank + step) % 3
        return self.keys(rank, step), grads, chunks, np.array([count, 0.0, 0.0, 0.0, *losses])

    def settings(self, step: int) -> tuple[list[dict[str, float]], dict[int, dict[str, float]]]:
        """Of groups and of tables: a schedule changes them at every second step."""
        bent = 0.5 ** (step // 2)
        return [{"lr": 0.05 * bent}], {0: {"lr": self.spec.settings["lr"] * bent}}

    def decide(self, vector: Any, squares: Any) -> tuple[float, bool, float]:
        factor = self.num_global / vector[0]
        applies = bool(np.isfinite(vector[4 : 4 + self.num_workers]).all())
        if not self.mode.wants_norm:
            return float(factor), applies, 0.0
        norm = float(np.sqrt(sum(squares.tolist())) * factor)
        return float(factor * min(1.0, 2.0 / (norm + 1e-6))), applies, norm

    def factor(self, vector: Any, norm: float) -> float:
        """As `decide` has it, from what is kept of a step."""
        factor = self.num_global / vector[0]
        return float(factor * min(1.0, 2.0 / (norm + 1e-6)) if self.mode.wants_norm else factor)

    def posted(self, rank: int, index: int) -> bytes:
        return f"rank {rank} at {index}".encode()

    # ---- what must hold -------------------------------------------------------------------------

    def check_pull(self, worker: Client, step: int, rows: Any, dense: dict[int, Any]) -> None:
        expected_rows, expected = self.reference.pulls[worker.rank, step]
        is_same = rows.tobytes() == expected_rows.tobytes() and all(
            dense[number].tobytes() == expected[number].tobytes() for number in expected
        )
        if not is_same:
            raise Violated(f"{worker.name} pulled other weights for step {step} than the undisturbed run")

    def check_ahead(self, worker: Client, step: int, rows: bytes) -> None:
        if step <= self.num_steps and rows != self.reference.pulls[worker.rank, step][0].tobytes():
            raise Violated(f"{worker.name} pulled ahead other rows for step {step} than the undisturbed run")

    def check_result(self, worker: Client, index: int, is_commit: bool, frame: bytes) -> None:
        step = self.script[index]
        if is_commit != (step > 0):
            raise Violated(f"exchange {index + 1} was recalled as something else")
        if is_commit and frame != self.reference.results[step]:
            raise Violated(
                f"{worker.name}: step {step} gave {np.frombuffer(frame)}, not {np.frombuffer(self.reference.results[step])}"
            )

    def lose_step(self, rank: int) -> None:
        """Its contribution to a step is lost: its worker must have been killed, and a view have taken it away."""
        newest = max(self.committed_at, default=0)
        is_viewed = self.viewed_at >= self.committed_at.get(newest - 1, 0.0) - 0.5
        versions = {
            int(self.servers[holders[0]].core.state.applied.version[slot])
            for slot, holders in enumerate(self.newest.holders)
        }
        if not self.workers[rank].incarnation or not is_viewed or len(versions) == 1:
            raise Violated(
                f"the job goes back for a contribution of rank {rank}, though nothing took it away"
            )
        self.counts["a step that cannot be summed again"] += 1
        self.is_lost = True

    def check_end(self) -> None:
        if self.primary_rows() != _rows(self.reference.table, np.ones(256, bool)):
            raise Violated("the final rows are not those of the undisturbed run")
        for chunk in self.chunks:
            if (
                self.primary_chunk(chunk).tobytes()
                != self.reference.dense.read(chunk.number)[0].numpy().tobytes()
            ):
                raise Violated(f"chunk {chunk.number} is not that of the undisturbed run")


class Relaxed(Job):
    """`ps:ssp` and `ps:async`: every batch of every lease exactly once in every slot."""

    def prepare(self) -> None:
        random = self.world.random
        self.num_batches, self.num_leases = random.randint(1, 3), random.randint(2, 5)
        self.leases = list(range(1, self.num_leases + 1))
        self.held: dict[int, int] = {}
        self.done: set[int] = set()
        self.ledger: set[tuple[int, int]] = set()
        kind = random.choice(("ssp", "async"))
        spec = TableSpec(0, "rows", 1, "float64", "sgd", {"lr": 1.0})
        mode = DeclareMode(self.num_workers, kind, bound=random.randint(0, 2) if kind == "ssp" else 0)
        self.declare(spec, "float64", "SGD", {"lr": 1.0}, mode)

    def make_worker(self, rank: int, incarnation: int) -> Client:
        return RelaxedWorker(self, rank, incarnation)

    def worker_died(self, rank: int) -> None:
        lease = self.held.pop(rank, None)
        if lease is not None:
            self.leases.insert(0, lease)

    @property
    def all_done(self) -> bool:
        return len(self.done) == self.num_leases

    @property
    def done_below(self) -> int:
        return next(lease for lease in range(1, self.num_leases + 2) if lease not in self.done)

    def finished(self, rank: int, lease: int) -> None:
        del self.held[rank]
        self.done.add(lease)

    # ---- what is pushed -------------------------------------------------------------------------

    def keys(self, lease: int, seq: int) -> Any:
        """Some that all share, and some of this batch alone."""
        own = 1000 + 100 * lease + 10 * seq
        return np.array([1, 2, 3, 4, 5, 6, *range(own, own + 6)], np.int64)

    def gradient(self, lease: int, seq: int) -> tuple[Any, Any, dict[int, Any]]:
        keys = self.keys(lease, seq)
        grads = np.arange(1.0, len(keys) + 1).reshape(-1, 1) * (10 * lease + seq)
        return keys, grads, {chunk.number: np.full(3, 100.0 * lease + seq) for chunk in self.chunks}

    def acknowledged(self, worker: Client, lease: int, seq: int) -> None:
        if (lease, seq) in self.ledger:
            self.counts["batch acknowledged again"] += 1
        self.ledger.add((lease, seq))

    def check_own(self, worker: Client, lease: int, seq: int, rows: Any) -> None:
        _, grads, _ = self.gradient(lease, seq)
        if not np.array_equal(rows[6:], -grads[6:]):
            raise Violated(
                f"{worker.name} was told that batch {lease}/{seq} counts, and pulls {rows[6:].T} instead of {-grads[6:].T}"
            )

    def check_end(self) -> None:
        rows: dict[int, float] = {}
        dense = np.zeros(3)
        for lease in range(1, self.num_leases + 1):
            for seq in range(1, self.num_batches + 1):
                keys, grads, chunks = self.gradient(lease, seq)
                for key, grad in zip(keys.tolist(), grads[:, 0].tolist(), strict=True):
                    rows[key] = rows.get(key, 0.0) - grad
                dense -= chunks[0]
        found = {key: float(np.frombuffer(value)[0]) for key, (value, _) in self.primary_rows().items()}
        if found != rows:
            wrong = {
                key: (found.get(key), rows.get(key))
                for key in found.keys() | rows.keys()
                if found.get(key) != rows.get(key)
            }
            raise Violated(
                f"not every batch counts exactly once: {dict(sorted(wrong.items())[:5])} (found, expected)"
            )
        for chunk in self.chunks:
            if not np.array_equal(self.primary_chunk(chunk), dense):
                raise Violated(f"chunk {chunk.number} is {self.primary_chunk(chunk)}, expected {dense}")
