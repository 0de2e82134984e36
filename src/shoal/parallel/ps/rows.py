"""Embeddings whose rows are on servers: their selection, and the lookup that replaces a module's weight.

An embedding is placed on servers only if that changes nothing: the optimizer must leave a row with
zero gradient alone, and only the module's own forward may use the weight. The first follows from
the optimizer, the second is observed in one forward of the user's model on a real batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.cluster.worker import session
from shoal.data.tree import Tree, leaves
from shoal.embedding.hash_embedding import DTYPES, HashEmbedding
from shoal.embedding.lookup import LocalRows, embedding_bag_forward, embedding_forward, merged, uniques_of
from shoal.embedding.rules import RULES, rule_of_optimizer
from shoal.errors import TrainingError
from shoal.parallel.state import cannot_follow
from shoal.ps.client.bulk_transfer import read_table
from shoal.ps.client.row_cache import CachedRowsPull, RowCache
from shoal.ps.client.server_group import Group
from shoal.ps.client.step import RowsPull
from shoal.runtime.transport.messages.client_server import TableSpec

_LOOKUPS = {
    torch.ops.aten.embedding,
    torch.ops.aten._embedding_bag,
    torch.ops.aten._embedding_bag_forward_only,
}
_KINDS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True, slots=True)
class RowRule:
    """An update rule of the servers and its settings."""

    name: str
    settings: dict[str, float]


@dataclass(slots=True)
class PlacedEmbedding:
    """A module whose weight becomes rows."""

    name: str  # of the weight, as the model names it
    module: nn.Module
    group: int  # parameter group of the optimizer; -1 for rows that are no parameter
    rule: RowRule
    leaf: int | None = None  # number of the batch's tensor that holds its ids; None: computed in forward


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Placement of a model's embeddings."""

    taken: list[PlacedEmbedding]
    """Embeddings that become rows."""

    dense: dict[str, str]
    """Name of the weight: reason why it stays dense."""


def plan(model: nn.Module, optimizer: torch.optim.Optimizer) -> PlacementPlan:
    """The plan, as far as it needs no forward."""
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    taken, dense = [], {}
    for path, module in model.named_modules():
        if isinstance(module, HashEmbedding):
            rule, name = row_rule(optimizer, 0), f"{path}.rows" if path else "rows"
            if isinstance(rule, str):
                raise cannot_follow(name, rule)
            taken.append(PlacedEmbedding(name, module, -1, rule))
            continue
        if not isinstance(module, _KINDS):
            continue
        name = f"{path}.weight" if path else "weight"
        why = _why_dense(module, uses)
        group = groups.get(id(module.weight))
        rule = row_rule(optimizer, group) if group is not None else "the optimizer does not train it"
        if why is None and isinstance(rule, str):
            why = rule
        if why is not None:
            dense[name] = why
        elif group is not None and isinstance(rule, RowRule):
            taken.append(PlacedEmbedding(name, module, group, rule))
    return PlacementPlan(taken, dense)


def row_rule(optimizer: torch.optim.Optimizer, group: int) -> RowRule | str:
    """Server rule equivalent to this optimizer on rows; or the reason why there is none."""
    found = rule_of_optimizer(type(optimizer).__name__, optimizer.param_groups[group])
    return found if isinstance(found, str) else RowRule(*found)


def _why_dense(module: nn.Embedding | nn.EmbeddingBag, uses: Counter[int]) -> str | None:
    if type(module) not in _KINDS:
        return f"{type(module).__name__} is a class of its own"
    weight = module.weight
    if not weight.requires_grad:
        return "it is frozen"
    if uses[id(weight)] > 1:
        return "its weight is tied to another layer's"
    if module.max_norm is not None:
        return "max_norm changes rows in forward"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq looks at the whole batch"
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        return "mode='max' has no sum of gradients"
    if weight.dtype not in (torch.float32, torch.float64):
        return f"rows are float32 or float64, not {str(weight.dtype).removeprefix('torch.')}"
    return None


def watch(found: PlacementPlan, batch: Tree, run: Callable[[], Any]) -> PlacementPlan:
    """Run the model once; weights used outside of their lookup stay dense. Also finds ids in the batch.

    `run` must be a forward without gradients and side effects.
    """
    columns = {
        (leaf.data_ptr(), leaf.shape): number
        for number, leaf in enumerate(leaves(batch))
        if isinstance(leaf, Tensor)
    }
    seen: dict[int, list[int | None]] = {id(each.module): [] for each in found.taken}

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs.get("input")
        at = columns.get((ids.data_ptr(), ids.shape)) if isinstance(ids, Tensor) else None
        seen[id(module)].append(at)
        watching.inside = names[id(module)]

    def after(module: nn.Module, args: Any, output: Any) -> None:
        watching.inside = ""

    names = {id(each.module): each.name for each in found.taken}
    hooks = [each.module.register_forward_pre_hook(before, with_kwargs=True) for each in found.taken]
    hooks += [each.module.register_forward_hook(after) for each in found.taken]
    weights = {
        each.module.weight.untyped_storage()._cdata: each.name
        for each in found.taken
        if isinstance(each.module, _KINDS)
    }
    watching = _Uses(weights)
    try:
        with watching:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    taken, dense = [], dict(found.dense)
    for each in found.taken:
        if each.name in watching.outside:
            dense[each.name] = "its weight is used outside of its own lookup"
            continue
        places = seen[id(each.module)]
        each.leaf = places[0] if len(places) == 1 else None
        taken.append(each)
    return PlacementPlan(taken, dense)


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Weights read by any operation other than the lookup of their own module, which is `inside` while it runs."""

    def __init__(self, weights: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = weights
        self.outside: set[str] = set()
        self.inside = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own = self.inside if func.overloadpacket in _LOOKUPS else ""
        if func is not torch.ops.aten.detach.default:
            for arg in (*args, *(kwargs or {}).values()):
                for each in arg if isinstance(arg, (list, tuple)) else (arg,):
                    if isinstance(each, Tensor):
                        name = self._weights.get(each.untyped_storage()._cdata)
                        if name is not None and name != own:
                            self.outside.add(name)
        return func(*args, **(kwargs or {}))


def describe(found: PlacementPlan) -> list[str]:
    lines = [
        f"{each.name}: rows on the servers ({each.rule.name}"
        + (", pulled ahead of the step)" if each.leaf is not None else ")")
        for each in found.taken
    ]
    return lines + [f"{name}: dense, because {why}" for name, why in found.dense.items()]


class RowModule:
    """One placed module: pulls rows for its forward and keeps their gradients for the step.

    The strategy sets `clock` and `is_training` before the model runs. Outside of training a pull is
    a copy, and gradients are dropped.
    """

    is_resident = False
    """True if the module's own weight is trained: `worker_rows.py`."""

    def __init__(self, taken: PlacedEmbedding, number: int, group: Group, *, seed: int) -> None:
        self.taken, self.module = taken, taken.module
        self.clock, self.is_training = 0, True
        self.unpushed = 0  # batches of `clock` whose gradients this worker still keeps
        self.weight = 1.0  # weight of gradients, in a script's own loop
        self.staleness: Counter[int] = Counter()
        self.newest = 0  # most updates of any row pulled so far
        module = taken.module
        rule: dict[str, Any] = {"rule": taken.rule.name, "settings": taken.rule.settings}
        if isinstance(module, HashEmbedding):
            self.spec = msgspec.structs.replace(module.table_spec(number=number, **rule), name=taken.name)
        else:
            assert isinstance(module, _KINDS)
            self.spec = TableSpec(
                number=number,
                name=taken.name,
                dim=int(module.embedding_dim),  # a numpy number in models that compute it
                dtype=DTYPES[module.weight.dtype],
                num_rows=int(module.num_embeddings),
                seed=seed,
                **rule,
            )
        self.dim = self.spec.dim
        self.np_dtype = np.dtype(self.spec.dtype)
        self._group = group
        self._ahead: RowsPull | None = None
        self._seen: tuple[Tensor, NDArray[np.int64], NDArray[Any]] | None = None
        self._pulls: list[RowsPull] = []
        self.cache: RowCache | None = None  # of relaxed strategies
        self._gradients: list[tuple[NDArray[np.int64], NDArray[Any]]] = []
        self._copy: tuple[int, str] | None = None

    # ---- in the place of the weight -------------------------------------------------------------

    def install(self) -> None:
        """Replace the module's forward by a lookup here."""
        module = self.module
        if isinstance(module, _KINDS):
            module.weight.grad = None
        if isinstance(module, HashEmbedding):
            module.use(self)
        elif isinstance(module, nn.EmbeddingBag):
            bag = module
            module.forward = lambda input, offsets=None, per_sample_weights=None: embedding_bag_forward(  # type: ignore[method-assign]
                self,
                input,
                offsets,
                mode=bag.mode,
                per_sample_weights=per_sample_weights,
                include_last_offset=bag.include_last_offset,
                padding_idx=bag.padding_idx,
            )
        else:
            assert isinstance(module, nn.Embedding)
            padding_idx = module.padding_idx
            module.forward = lambda input: embedding_forward(self, input, padding_idx=padding_idx)  # type: ignore[method-assign]

    @property
    def is_frozen(self) -> bool:
        """Whether the script has frozen the module's weight since it became rows."""
        weight = getattr(self.module, "weight", None)
        return weight is not None and not weight.requires_grad

    def uniques(self, ids: Tensor) -> tuple[NDArray[np.int64], NDArray[Any]]:
        if self._seen is not None and self._seen[0] is ids:
            return self._seen[1:]
        return uniques_of(ids)

    def note_copy(self) -> None:
        """The weight in this process is as the servers' rows were: a script must not write into it."""
        self._copy = self._look_at_copy()

    @property
    def is_written(self) -> bool:
        """Whether torch counted a write into the weight since then."""
        weight = getattr(self.module, "weight", None)
        return weight is not None and self._copy is not None and weight._version != self._copy[0]

    @property
    def has_changed_copy(self) -> bool:
        """Whether the weight has other values than then; also where they were written through `.data`."""
        if self._copy is None:
            return False
        now, before = self._look_at_copy(), self._copy[1]
        self._copy = now
        return now is not None and now[1] != before

    def _look_at_copy(self) -> tuple[int, str] | None:
        weight = getattr(self.module, "weight", None)
        if weight is None or self.is_resident:
            return None
        return weight._version, repr(float(weight.detach().sum(dtype=torch.float64)))  # by repr: nan != nan

    def pull(self, keys: NDArray[np.int64]) -> Tensor:
        wrong = self._out_of_range(keys)
        if wrong is not None:  # torch's own error message for a local weight
            raise IndexError(
                f"id {wrong} is out of range: the embedding of '{self.taken.name}' has {self.spec.num_rows} rows"
            )
        ahead, self._ahead = self._ahead, None
        if ahead is not None and (ahead.keys is keys or np.array_equal(ahead.keys, keys)):
            pull = ahead
        else:
            if ahead is not None:
                self._pulls.append(ahead)
            pull = self._new_pull(keys, self.clock)
            self._group.start(pull)
        self._group.finish(pull)
        self.newest = max(self.newest, pull.updates)
        if not self.is_training or not torch.is_grad_enabled():  # no step may follow that would release it
            rows = torch.from_numpy(pull.rows).clone()
            pull.release()
            return rows
        self.staleness[pull.staleness] += 1
        self._pulls.append(pull)
        return torch.from_numpy(pull.rows)

    def push(self, keys: NDArray[np.int64], gradients: NDArray[Any]) -> None:
        """Keep gradients of pulled rows for the step."""
        if self.is_training and self.weight and not self.is_frozen:  # a borrowed sample contributes nothing
            self._gradients.append((keys, gradients if self.weight == 1.0 else gradients * self.weight))

    def everything(self) -> tuple[NDArray[np.int64], NDArray[Any]]:
        keys, values, state, *_ = read_table(self._group, self.spec)
        policy = self.spec.policy
        if policy is None:
            return keys, values
        is_admitted = state[:, RULES[self.spec.rule].state_dim(self.dim)] >= policy.admit_after
        return keys[is_admitted], values[is_admitted]

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalRows:
        """A copied model gets the rows that are on the servers now, in this process."""
        copied = LocalRows(self.spec)
        copied.replace(*self.everything(), None, 0)
        return copied

    # ---- for the strategy -----------------------------------------------------------------------

    def pull_ahead(self, ids: Tensor, clock: int) -> None:
        keys, inverse = uniques_of(ids)
        if self._out_of_range(keys) is not None:
            return  # reported where they are used
        self._seen = (ids, keys, inverse)
        if self._ahead is not None:
            self._pulls.append(self._ahead)
        self._ahead = self._new_pull(keys, clock)
        self._group.start(self._ahead)

    def _out_of_range(self, keys: NDArray[np.int64]) -> int | None:
        if self.spec.num_rows is None or not len(keys) or (keys[0] >= 0 and keys[-1] < self.spec.num_rows):
            return None
        return int(keys[0] if keys[0] < 0 else keys[-1])

    def merge_gradients(self) -> None:
        """Merge the gradients of backward, each key once."""
        held = self.take_gradients()
        self._gradients = [held] if held is not None else []

    @property
    def gradients(self) -> tuple[NDArray[np.int64], NDArray[Any]] | None:
        """Result of `merge_gradients`; None where the module was not used."""
        return self._gradients[0] if self._gradients else None

    def take_gradients(self) -> tuple[NDArray[np.int64], NDArray[Any]] | None:
        """Take the gradients of backward, merged; None where the module was not used."""
        weight = getattr(self.module, "weight", None)
        if weight is not None and weight.grad is not None:
            raise TrainingError(
                f"'{self.taken.name}' got a gradient of its own: something besides its module's forward used it, which the "
                "first batch did not show, and its rows are on the servers. Nothing of this step was updated; call the "
                "module instead of using its weight, or use --strategy ddp."
            )
        gradients, self._gradients = self._gradients, []
        return merged(gradients) if gradients else None

    def scale(self, share: float) -> None:
        """Weight the gradients of backward; drops them if this worker has no share."""
        self._gradients = [(keys, values * share) for keys, values in self._gradients] if share else []

    def release(self) -> None:
        for pull in self._pulls:
            pull.release()
        self._pulls = []

    def forget(self) -> None:
        self._gradients = []
        self.release()

    def _new_pull(self, keys: NDArray[np.int64], clock: int) -> RowsPull:
        # Only training pulls are compressed; other reads are exact.
        codec = self._group.compression.pull if self.is_training else ""
        what = (self.spec.number, keys, self.dim, self.np_dtype)
        unpushed = self.unpushed if self.is_training else 0
        if self.cache is not None and self.is_training:
            pull = CachedRowsPull(self.cache, *what, clock=clock, codec=codec, unpushed=unpushed)
            session.cached(num_hits=pull.num_hits, num_misses=len(keys) - pull.num_hits)
            return pull
        lies_here = self._group.reads_in_place and self.spec.num_rows is not None and not codec
        in_place = self.spec if lies_here else None
        return RowsPull(*what, clock=clock, codec=codec, unpushed=unpushed, in_place=in_place)
