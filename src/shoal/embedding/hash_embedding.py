"""Hash embedding: any int64 id has a row, created when it is first trained on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from shoal.config.row_policy import RowPolicy, refuse_seconds
from shoal.embedding.lookup import LocalRows, RowSource, embedding_forward
from shoal.embedding.rules import rule_of_optimizer
from shoal.errors import ConfigError
from shoal.runtime.transport.messages.client_server import TableSpec

DTYPES: dict[torch.dtype, Literal["float32", "float64"]] = {
    torch.float32: "float32",
    torch.float64: "float64",
}


_are_left_out: ContextVar[bool] = ContextVar("rows are left out", default=False)


@contextlib.contextmanager
def rows_left_out() -> Iterator[None]:
    """Context in which a model's `state_dict()` has no rows of its HashEmbeddings, and none are read for it."""
    token = _are_left_out.set(True)
    try:
        yield
    finally:
        _are_left_out.reset(token)


class HashEmbedding(nn.Module):
    """Rows of `embedding_dim` numbers for any int64 id; a row nobody trained is a function of (seed, id).

    Its rows are not parameters: there is no largest id, so there is no tensor
    of them. Under shoal.Trainer and shoal.setup they are trained with the
    optimizer's first parameter group, by the rule that it has for sparse
    gradients (SGD without momentum, Adagrad, SparseAdam). In a loop without
    shoal, `follow(optimizer)` makes every `optimizer.step()` update them too.

    Two of them that should begin with different rows take different seeds.
    A `policy` says which ids get a row, and which rows go again.

    Under `ps` the rows are on the servers and stay there, also when a fit is
    over: the table may be larger than this process's memory. The module keeps
    looking rows up there, and `state_dict()`, `copy.deepcopy` and
    `Trainer.save` read all of them from there.
    """

    def __init__(
        self,
        embedding_dim: int,
        *,
        init: Literal["zeros", "normal", "uniform"] = "normal",
        scale: float = 0.01,
        seed: int = 0,
        name: str = "",
        dtype: torch.dtype = torch.float32,
        policy: RowPolicy | None = None,
    ) -> None:
        super().__init__()
        if embedding_dim < 1 or init not in ("zeros", "normal", "uniform") or dtype not in DTYPES:
            raise ConfigError(
                "HashEmbedding takes an embedding_dim of at least 1, init 'zeros', 'normal' or 'uniform', and float32 or "
                f"float64, got {embedding_dim}, '{init}' and {dtype}."
            )
        if policy is not None and not isinstance(policy, RowPolicy):
            raise ConfigError(f"HashEmbedding takes a shoal.nn.RowPolicy as policy=, got {policy!r}.")
        self.embedding_dim, self.init, self.scale, self.seed = int(embedding_dim), init, scale, seed
        self.name, self.dtype, self.policy = name, dtype, policy
        self.number = 0  # of its table: which ids share a slot
        self._source: RowSource | None = None

    @property
    def source(self) -> RowSource:
        """The source of its rows: this process, unless a strategy set another."""
        if self._source is None:
            # "add" has no state: what rows need besides their values is known with the optimizer.
            self._source = LocalRows(self.table_spec(rule="add", settings={}, number=self.number))
        return self._source

    def use(self, source: RowSource | None) -> None:
        """Use this source of rows from now on; None: this process, with new rows."""
        self._source = source

    def table_spec(self, *, rule: str, settings: dict[str, float], number: int = 0) -> TableSpec:
        return TableSpec(
            number=number,
            name=self.name or "HashEmbedding",
            dim=self.embedding_dim,
            dtype=DTYPES[self.dtype],
            rule=rule,
            settings=settings,
            init=self.init,
            scale=self.scale,
            seed=self.seed,
            policy=self.policy,
        )

    def be_table(self, number: int) -> None:
        """Set the table's number, which decides which ids share a slot and evict each other."""
        self.number = number
        if isinstance(self._source, LocalRows):
            self._source.renumber(number)

    def follow(self, optimizer: torch.optim.Optimizer, *, group: int = 0) -> None:
        """Have every `optimizer.step()` update the rows too, with the settings of its parameter group `group`."""
        self._rule(optimizer, group)

        def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            self._rule(optimizer, group).apply()

        optimizer.register_step_post_hook(after_step)

    def _rule(self, optimizer: torch.optim.Optimizer, group: int) -> LocalRows:
        rule = rule_of_optimizer(type(optimizer).__name__, optimizer.param_groups[group])
        refuse_seconds(self.name or "rows", self.policy, "in a loop of one process")
        source = self.source
        if isinstance(rule, str) or not isinstance(source, LocalRows):
            why = rule if isinstance(rule, str) else "they are on servers"
            raise ConfigError(
                f"the rows of a HashEmbedding cannot follow this optimizer: {why}. Nothing was changed; use "
                "SGD without momentum, Adagrad or SparseAdam, and have servers' rows trained by their strategy."
            )
        source.train_by(*rule)
        return source

    def _apply(self, fn: Any, recurse: bool = True) -> HashEmbedding:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        if dtype in DTYPES and dtype != self.dtype:  # `model.double()` means its rows too
            self.dtype = dtype
            if isinstance(self._source, LocalRows):
                self._source = self._source.to(DTYPES[dtype])
        return self

    def forward(self, ids: Tensor) -> Tensor:
        return embedding_forward(self.source, ids)

    def extra_repr(self) -> str:
        policy = f", policy={self.policy}" if self.policy is not None else ""
        return f"{self.embedding_dim}, init={self.init!r}, scale={self.scale}, seed={self.seed}{policy}"

    # ---- rows as part of a state_dict ----

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if not _are_left_out.get():
            keys, values = self.source.everything()
            destination[f"{prefix}keys"] = torch.from_numpy(keys)
            destination[f"{prefix}rows"] = torch.from_numpy(values)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given = [state_dict.get(f"{prefix}{name}") for name in ("keys", "rows")]
        if given[0] is None or given[1] is None:
            return  # saved before the row existed
        keys, rows = given[0].numpy(), given[1].to(self.dtype).contiguous().numpy()
        if rows.shape != (len(keys), self.embedding_dim):
            error_msgs.append(
                f"{prefix}rows: {rows.shape} for {len(keys)} keys of {self.embedding_dim} numbers"
            )
        elif isinstance(self.source, LocalRows):
            self.source.replace(np.ascontiguousarray(keys), rows, None, 0)
        else:
            error_msgs.append(f"{prefix}rows: they are on servers; use Trainer.load")
