"""Weights, optimizer state and rows of a rank as pieces, and back.

Tensors are pieces, the rest is JSON, both by parameter name: a checkpoint is
read under another strategy, at another number of workers and by a fresh process
whose parameters are other objects. Rows of HashEmbeddings, which are no
parameters, are "model/<path>.keys" and "model/<path>.rows" by increasing key;
rows on servers are `parallel/ps/`'s business. Reads and writes no file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shoal.collectives.compression import Compressor
from shoal.collectives.reducer import gather_json
from shoal.config.row_policy import refuse_seconds
from shoal.embedding import HashEmbedding
from shoal.embedding.hash_embedding import rows_left_out
from shoal.embedding.lookup import LocalRows
from shoal.embedding.row_statistics import as_admitted, columns_of
from shoal.embedding.rules import RULES, rule_of_optimizer
from shoal.errors import ConfigError, ModelsDiffer, OptimizerMismatch
from shoal.parallel.protocol import PartReader, Piece, PieceReader
from shoal.ps.layout import TABLES_PER_MODEL
from shoal.runtime.serialization import from_plain, to_plain, unlike
from shoal.runtime.transport.messages.client_server import TableSpec

if TYPE_CHECKING:
    from shoal.config.strategy import Axes
    from shoal.parallel.tensor_parallel.packing import Packing

MODEL, OPTIMIZER, _RESIDUAL = "model/", "optimizer/", "residual/"
GONE = "gone/"
"""Prefix of the piece with the keys of rows that are no longer there, before the name of the piece of keys."""

CHANGED = "changed/"
"""Prefix of the piece with the numbers of rows that changed, of a table whose rows are numbered from 0."""

# Execution settings, not results: the loading script decides them, for its own devices.
_EXECUTION = {"foreach", "fused", "capturable", "differentiable"}


def optimizer_pieces(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Piece]:
    """Every tensor of the state, in the order of the groups."""
    for name, state in _named_state(model, optimizer):
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensor = value.detach()
                yield Piece(f"{OPTIMIZER}{name}/{key}", tensor, tuple(tensor.shape), (0,) * tensor.dim())


def optimizer_settings(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Non-tensor state: the class, the groups' hyper-parameters and members, single numbers of the state."""
    names = _names(model, optimizer)
    kind = type(optimizer).__name__
    groups = [
        {
            "params": [names[parameter] for parameter in group["params"]],
            "settings": {
                key: to_plain(value, f"{kind}'s {key}") for key, value in group.items() if key != "params"
            },
        }
        for group in optimizer.param_groups
    ]
    numbers = {
        name: {
            key: to_plain(value, f"{kind}'s state {key} of {name}")
            for key, value in state.items()
            if not isinstance(value, Tensor)
        }
        for name, state in _named_state(model, optimizer)
    }
    return {
        "class": kind,
        "groups": groups,
        "numbers": {name: held for name, held in numbers.items() if held},
    }


def load_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pieces: Mapping[str, Tensor],
    settings: dict[str, Any],
    *,
    path: str = "",
    elsewhere: Collection[str] = (),
) -> None:
    """Load saved state into an optimizer built afresh on `model`. Refuses before it changes anything.

    State under the names in `elsewhere` is loaded by another component. A scheduler must be built
    before: building one sets the learning rate.
    """
    names = _names(model, optimizer)
    _check(optimizer, names, settings, path)
    parameters = {name: parameter for parameter, name in names.items()}
    state = _read(pieces, parameters, path, elsewhere)
    for name, numbers in settings["numbers"].items():
        state.setdefault(name, {}).update({key: from_plain(value) for key, value in numbers.items()})

    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    optimizer.state.clear()
    while state:  # released as they are copied: otherwise saved and loaded state would both be in memory
        name, held = state.popitem()
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: _placed(key, value, parameter, groups[parameter]) if isinstance(value, Tensor) else value
            for key, value in held.items()
        }
    _set_groups(optimizer, settings)


def load_settings(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any], *, path: str = ""
) -> None:
    """Load only the groups' hyper-parameters, where the state is kept elsewhere. Refuses as `load_optimizer` does."""
    _check(optimizer, _names(model, optimizer), settings, path)
    _set_groups(optimizer, settings)


def _set_groups(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> None:
    for group, saved in zip(optimizer.param_groups, settings["groups"], strict=True):
        for key, plain in saved["settings"].items():
            if key not in _EXECUTION:
                _set(group, key, from_plain(plain))


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Names of the optimizer's parameters, in the order of its groups."""
    known: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    names = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in known:
                raise ConfigError(
                    f"the optimizer trains a tensor of shape {tuple(parameter.shape)} that is not a parameter of the model, "
                    "so a checkpoint has no name for its state. Nothing was saved or loaded; register it in the model "
                    "with nn.Parameter, or build the optimizer from the parameters it is given."
                )
            names[parameter] = known[parameter]
    return names


def _named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS cannot be saved or spread over workers: it calls the loss several times within one step and keeps a "
            "history that is not per parameter. Nothing was saved; use another optimizer."
        )
    for parameter, name in _names(model, optimizer).items():
        if parameter in optimizer.state:
            yield name, optimizer.state[parameter]


def _check(
    optimizer: torch.optim.Optimizer, names: dict[Tensor, str], settings: dict[str, Any], path: str
) -> None:
    kind, saved_kind = type(optimizer).__name__, settings["class"]
    if kind != saved_kind:
        raise OptimizerMismatch(path=path, problem=f"it is {saved_kind}, the script builds {kind}")
    groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    saved_groups = [group["params"] for group in settings["groups"]]
    if len(groups) != len(saved_groups):
        raise OptimizerMismatch(
            path=path, problem=f"it has {len(saved_groups)} parameter groups, the script builds {len(groups)}"
        )
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if set(group) != set(saved):
            only_saved = sorted(set(saved) - set(group)) or ["nothing"]
            only_here = sorted(set(group) - set(saved)) or ["nothing"]
            raise OptimizerMismatch(
                path=path,
                problem=f"parameter group {number} holds {', '.join(only_saved[:5])} there alone and "
                f"{', '.join(only_here[:5])} here alone",
            )
        plain = settings["groups"][number]["settings"]
        there = {key: from_plain(value) for key, value in plain.items() if key not in _EXECUTION}
        if problem := unlike(there, optimizer.param_groups[number], f"parameter group {number}"):
            raise OptimizerMismatch(path=path, problem=problem)


def _read(
    pieces: Mapping[str, Tensor], parameters: dict[str, Tensor], path: str, elsewhere: Collection[str]
) -> dict[str, dict[str, Any]]:
    state: dict[str, dict[str, Any]] = {}
    for piece in pieces:
        if piece.startswith(OPTIMIZER):
            name, _, key = piece.removeprefix(OPTIMIZER).rpartition("/")
            if name in elsewhere:
                continue
            if name not in parameters:
                raise OptimizerMismatch(
                    path=path, problem=f"it has state for {name}, which the script's optimizer does not train"
                )
            state.setdefault(name, {})[key] = pieces[piece]
    return state


def _placed(key: str, value: Tensor, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """A copy on the optimizer's device. Keeps the saved dtype: torch's own loading rounds to the parameter's."""
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    device = parameter.device if on_device else torch.device("cpu")
    if value.shape == parameter.shape and value.dim() > 0:
        # Strides like the parameter's, as the optimizer would have created it.
        return torch.empty_like(parameter, dtype=value.dtype, device=device, requires_grad=False).copy_(value)
    return value.to(device=device, copy=True)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    held = group.get(key)
    if isinstance(held, Tensor) and isinstance(value, (Tensor, float)):
        held.fill_(value)  # in place: a scheduler, or a compiled step, may hold the same tensor
    elif isinstance(value, Tensor):
        group[key] = value.to(group["params"][0].device) if group.get("capturable") else value
    else:
        group[key] = value


def hash_embeddings(model: nn.Module) -> dict[str, HashEmbedding]:
    """Hash embeddings of a model, by the name of their rows in its state_dict."""
    return {
        f"{path}.rows" if path else "rows": module
        for path, module in model.named_modules()
        if isinstance(module, HashEmbedding)
    }


def limited(modules: Iterable[nn.Module]) -> list[HashEmbedding]:
    """Embeddings with a limited number of rows. They are the first tables of a model wherever it is
    trained: ids that share a slot evict each other, and slots are by table.
    """
    hashed = [each for each in modules if isinstance(each, HashEmbedding)]
    return [each for each in hashed if each.policy is not None and each.policy.max_rows is not None]


def keys_name(rows_name: str) -> str:
    return rows_name.removesuffix("rows") + "keys"


def cannot_follow(rows_name: str, why: str) -> ConfigError:
    return ConfigError(
        f"the rows of the HashEmbedding '{layer_of(rows_name)}' cannot be trained by this optimizer: {why}. Nothing was "
        "trained; use SGD without momentum and weight decay, Adagrad without weight decay, or SparseAdam."
    )


def layer_of(rows_name: str) -> str:
    return rows_name.removesuffix("rows").removesuffix(".") or "the model itself"


class HashedRows:
    """Hash embeddings of one model in this process, with gradient and update as a parameter has `grad` and `step()`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, number: int = 0) -> None:
        """`number` of the model among those of the script."""
        self._optimizer, self._modules = optimizer, hash_embeddings(model)
        for table, module in enumerate(limited(self._modules.values()), number * TABLES_PER_MODEL):
            module.be_table(table)
        for name, module in self._modules.items():
            refuse_seconds(name, module.policy, "in this strategy")
        self._follow()

    def sum_of_squares(self) -> float:
        return sum(rows.sum_of_squares() for rows in self._sources())

    def apply(self, factor: float) -> None:
        for rows in self._follow():
            rows.apply(factor)

    def drop_gradients(self) -> None:
        for rows in self._sources():
            rows.drop_gradients()

    def _follow(self) -> list[LocalRows]:
        for name, module in self._modules.items():
            rule = rule_of_optimizer(type(self._optimizer).__name__, self._optimizer.param_groups[0])
            if isinstance(rule, str):
                raise cannot_follow(name, rule)
            if isinstance(module.source, LocalRows):
                module.source.train_by(*rule)
        return self._sources()

    def _sources(self) -> list[LocalRows]:
        found = [module.source for module in self._modules.values()]
        return [source for source in found if isinstance(source, LocalRows)]


def local_pieces(model: nn.Module) -> Iterator[Piece]:
    """The rows that are in this process, and their optimizer state."""
    for name, module in hash_embeddings(model).items():
        if isinstance(module.source, LocalRows):
            table = module.source.table
            yield from pieces_of(name, table.spec, *table.read_all(), table.step, table.num_evicted)


def pieces_of(
    name: str,
    spec: TableSpec,
    keys: NDArray[np.int64],
    values: NDArray[Any],
    state: NDArray[Any],
    step: int,
    num_evicted: int,
) -> Iterator[Piece]:
    """One table, by increasing key, under the names that every strategy knows."""
    tensors = {MODEL + keys_name(name): torch.from_numpy(keys), MODEL + name: torch.from_numpy(values)}
    for key, columns in state_columns(spec).items():
        tensors[f"{OPTIMIZER}{name}/{key}"] = torch.from_numpy(np.ascontiguousarray(state[:, columns]))
        tensors[f"{OPTIMIZER}{name}/step"] = torch.tensor(float(step))
    if spec.policy is not None:
        tensors[f"{OPTIMIZER}{name}/evictions"] = torch.tensor(num_evicted)
    for piece, tensor in tensors.items():
        yield Piece(piece, tensor, tuple(tensor.shape), (0,) * tensor.dim())


def changes_of(
    name: str,
    spec: TableSpec,
    keys: NDArray[np.int64],
    values: NDArray[Any],
    state: NDArray[Any],
    step: int,
    num_evicted: int,
) -> Iterator[Piece]:
    """The same for changed rows; deleted ones have no sightings left."""
    is_there = np.ones(len(keys), np.bool_)
    if spec.policy is not None:
        is_there = state[:, RULES[spec.rule].state_dim(spec.dim)] > 0
    of_keys = MODEL + keys_name(name)
    for piece in pieces_of(name, spec, keys[is_there], values[is_there], state[is_there], step, num_evicted):
        yield replace(piece, changed_keys=of_keys) if piece.tensor.dim() else piece
    gone = torch.from_numpy(keys[~is_there])
    yield Piece(GONE + of_keys, gone, tuple(gone.shape), (0,))


def changed_rows_of(
    name: str,
    spec: TableSpec,
    keys: NDArray[np.int64],
    values: NDArray[Any],
    state: NDArray[Any],
    step: int,
) -> Iterator[Piece]:
    """Changed rows of a table whose rows are numbered from 0, under the names of the whole one; none is ever deleted."""
    of_keys = CHANGED + name
    tensors = {of_keys: torch.from_numpy(keys), MODEL + name: torch.from_numpy(values)}
    for key, columns in state_columns(spec).items():
        tensors[f"{OPTIMIZER}{name}/{key}"] = torch.from_numpy(np.ascontiguousarray(state[:, columns]))
        tensors[f"{OPTIMIZER}{name}/step"] = torch.tensor(float(step))
    for piece, tensor in tensors.items():
        of = of_keys if tensor.dim() and piece != of_keys else ""
        yield Piece(piece, tensor, tuple(tensor.shape), (0,) * tensor.dim(), of)


def saved_table(name: str, pieces: PieceReader) -> tuple[NDArray[np.int64], NDArray[Any]] | None:
    if MODEL + name not in pieces.tensors:
        return None
    keys, values = (pieces.tensors[MODEL + each].contiguous().numpy() for each in (keys_name(name), name))
    return keys, values


def state_columns(spec: TableSpec) -> dict[str, slice]:
    """Columns of a table's state by name: the rule's, and statistics where the table has a policy."""
    rule = RULES[spec.rule]
    behind = rule.state_dim(spec.dim)
    statistics = {
        name: slice(behind + span.start, behind + span.stop) for name, span in columns_of(spec.policy).items()
    }
    return {**rule.state_columns(spec.dim), **statistics}


def saved_state(
    name: str, spec: TableSpec, saved: PieceReader | None
) -> tuple[NDArray[Any] | None, int, int]:
    """State of rows as a table keeps it, the number of updates and of evictions; None and 0 if it was not saved.

    Statistics missing in the checkpoint are those of newly admitted rows.
    """
    prefix = f"{OPTIMIZER}{name}/"
    columns = state_columns(spec)
    needed = [prefix + key for key in RULES[spec.rule].state]
    if saved is None or saved.optimizer_settings is None or not all(n in saved.tensors for n in needed):
        return None, 0, 0
    told = {key: saved.tensors.get(f"{prefix}{key}") for key in ("step", "evictions")}
    step, num_evicted = (int(each) if each is not None else 0 for each in told.values())
    if not columns:
        return None, step, num_evicted
    num_rows = len(saved.tensors[MODEL + name])
    state = np.empty((num_rows, max(span.stop for span in columns.values())), spec.dtype)
    if spec.policy is not None:
        behind = RULES[spec.rule].state_dim(spec.dim)
        state[:, behind:] = as_admitted(spec.policy, num_rows, step, 0.0, spec.dtype)
    for key, span in columns.items():
        if prefix + key in saved.tensors:
            state[:, span] = saved.tensors[prefix + key].numpy()
    return state, step, num_evicted


def load_local(model: nn.Module, pieces: PieceReader) -> None:
    """Replace the rows of this process by the saved ones."""
    for name, module in hash_embeddings(model).items():
        table, source = saved_table(name, pieces), module.source
        if table is None or not isinstance(source, LocalRows):
            continue
        if pieces.optimizer_settings is None:  # weights alone: the optimizer keeps its state, here too
            source.replace_values(*table)
        else:
            state, step, num_evicted = saved_state(name, source.table.spec, pieces)
            source.replace(*table, state, step, num_evicted)


def expected_shapes(model: nn.Module) -> dict[str, tuple[tuple[int | None, ...], torch.dtype]]:
    """Shape (None: any) and dtype expected in a checkpoint for a model's rows, by key of its state_dict."""
    shapes: dict[str, tuple[tuple[int | None, ...], torch.dtype]] = {}
    for name, module in hash_embeddings(model).items():
        shapes[keys_name(name)] = ((None,), torch.int64)
        shapes[name] = ((None, module.embedding_dim), module.dtype)
    return shapes


def plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's state_dict without rows of HashEmbeddings: tensors of the model itself, no copies."""
    with rows_left_out():
        return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


def parameter_of(piece: str) -> str:
    """Name in the model that a piece of the state belongs to."""
    if piece.startswith(OPTIMIZER):
        return piece.removeprefix(OPTIMIZER).rpartition("/")[0]
    return piece.removeprefix(MODEL)


def state_pieces(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[Piece]:
    """Every tensor a fresh process needs to continue, except rows on servers."""
    for name, tensor in plain_tensors(model).items():
        yield Piece(MODEL + name, tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim())
    yield from local_pieces(model)
    if optimizer is not None:
        yield from optimizer_pieces(model, optimizer)


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer | None, pieces: PieceReader) -> None:
    with torch.no_grad():
        for name, tensor in plain_tensors(model).items():
            tensor.copy_(pieces.tensors[MODEL + name])
    load_local(model, pieces)
    if optimizer is not None and pieces.optimizer_settings is not None:
        load_optimizer(
            model,
            optimizer,
            pieces.tensors,
            pieces.optimizer_settings,
            path=pieces.path,
            elsewhere=hash_embeddings(model).keys(),
        )


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank. Collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Norm of all of them together. Collective if some are sharded: one sum for all with the same placements."""
    cut_alike: dict[tuple[DeviceMesh, tuple[int, ...]], list[Tensor]] = {}
    alone: list[Tensor] = []
    for tensor in tensors:
        if not isinstance(tensor, DTensor) or any(placement.is_partial() for placement in tensor.placements):
            alone.append(whole(tensor))
            continue
        axes = tuple(axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate())
        cut_alike.setdefault((tensor.device_mesh, axes), []).append(tensor.to_local())
    squares = float(nn.utils.get_total_norm(alone)) ** 2 if alone else 0.0
    for (mesh, axes), parts in cut_alike.items():
        held = nn.utils.get_total_norm(parts).double() ** 2
        for axis in axes:
            dist.all_reduce(held, group=mesh.get_group(axis))
        squares += float(held)
    return math.sqrt(squares)


def layers_of(model: nn.Module) -> Iterator[str]:
    """Paths of the modules that have parameters themselves."""
    return (
        name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))
    )


def tied_parameters(model: nn.Module) -> set[int]:
    """Parameters that more than one layer holds, by identity."""
    seen: set[int] = set()
    tied: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (tied if id(parameter) in seen else seen).add(id(parameter))
    return tied


def attribute(model: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:160]


def ties_of(model: nn.Module, prefix: str) -> dict[str, str]:
    """Further names of a tied parameter -> its first name."""
    first: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            ties[prefix + name] = prefix + first[id(parameter)]
    return ties


def whole_pieces(
    pieces: Iterable[Piece], *, keep: bool, packing: Packing, ties: Mapping[str, str] | None = None
) -> Iterator[Piece]:
    """The pieces with whole tensors, gathered one at a time; without `keep` each is freed at once.

    Collective: every rank goes through all of them, and only the writer needs them. A tied tensor
    is gathered once, and is one memory under both names, as in one process.
    """
    ties = ties or {}
    gathered: dict[str, Tensor] = {}
    for piece in pieces:
        tensor = gathered.get(ties.get(piece.name, ""))
        if tensor is None:
            tensor = packing.to_user_layout(piece.name, whole(piece.tensor))
        shape = tuple(piece.tensor.shape)
        if not keep:
            tensor = torch.empty(0, dtype=tensor.dtype)
        if piece.name in ties.values():
            gathered[piece.name] = tensor
        yield Piece(piece.name, tensor, shape, (0,) * len(shape))


def local_part(value: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this rank holds of one cut like `like`; whole where that is not cut."""
    if not isinstance(like, DTensor):
        return value
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    part = value
    for dim, (begin, length) in enumerate(zip(offset, shape, strict=True)):
        part = part.narrow(dim, begin if length else 0, length)
    return part


def is_first_holder(tensor: Tensor, at: Axes) -> bool:
    """Whether this rank, at `at` in its mesh, is the first of those that hold the same numbers of a tensor."""
    sharded_over: set[str] = set()
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        sharded_over = {
            name for name, place in zip(names, tensor.placements, strict=True) if not place.is_replicate()
        }
    return all(getattr(at, axis) == 0 for axis in ("dp", "fsdp", "tp") if axis not in sharded_over)


def local_block(tensor: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """The numbers that this rank has of a tensor, their offset in it, and its whole shape."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim(), tuple(tensor.shape)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(offset), tuple(tensor.shape)


def cut_like(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor sharded as `like` is, without communication: every rank has it."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return as_part_of(like, local_part(value, like).to(like.device).contiguous())


def as_part_of(like: DTensor, part: Tensor) -> DTensor:
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=torch.empty(like.shape, device="meta").stride(),
    )


def read_like(pieces: Mapping[str, Tensor], name: str, like: Tensor | None, packing: Packing) -> Tensor:
    """A saved tensor, sharded as `like` is; only this rank's part is read if rows are stored in that order."""
    if isinstance(pieces, PartReader) and isinstance(like, DTensor) and not packing.packs(name):
        if pieces.describe(name)[0] != tuple(like.shape):
            return pieces[name]
        shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
        return as_part_of(like, pieces.part(name, offset, shape).to(like.device))
    whole = packing.to_rank_layout(name, pieces[name])
    return whole if like is None else cut_like(whole, like)


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each read when it is asked for."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Tensor]) -> None:
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def parameter_names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}


def rebind_optimizer(
    optimizer: torch.optim.Optimizer, before: dict[int, str], model: nn.Module, strategy: str
) -> None:
    """Rebind `optimizer`, built on the parameters named `before`, to those that the model now has under these names."""
    refuse_stepped(optimizer, f"'{strategy}' cuts the parameters that its state belongs to")
    now = dict(model.named_parameters(remove_duplicate=False))
    initial = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        # Tensors that are no parameters of the model are refused where the optimizer is taken over.
        bound = [now.get(before.get(id(each), ""), each) for each in group["params"]]
        for old, new in zip(group["params"], bound, strict=True):
            if old in initial:  # Adagrad has a state before its first step, one number everywhere
                optimizer.state[new] = {
                    key: torch.full_like(new.detach(), float(value.flatten()[0]))
                    if value.dim() and value.numel()
                    else value
                    for key, value in initial[old].items()
                }
        group["params"] = bound


def refuse_stepped(optimizer: torch.optim.Optimizer, why: str) -> None:
    """Refuse an optimizer with state of its own steps. That of Adagrad before its first step is none."""
    if any(float(state.get("step", 1.0)) for state in optimizer.state.values()):
        raise ConfigError(
            f"the optimizer that was given has taken steps already, and {why}. Nothing was trained; give one that has not (the Trainer "
            "takes a function, optimizer=lambda params: torch.optim.Adam(params)), and take the state over with a checkpoint."
        )


_SAME = "same/"  # what all ranks have alike


def residual_pieces(compressor: Compressor, gather: Callable[[Tensor], list[Tensor]]) -> Iterator[Piece]:
    """A row for each rank. Collective."""
    for name, mine in compressor.state().items():
        tensor = mine if name.startswith(_SAME) else torch.stack(gather(mine))
        yield Piece(_RESIDUAL + name, tensor, tuple(tensor.shape), (0,) * tensor.dim())


def load_residuals(compressor: Compressor, saved: PieceReader, rank: int, num_workers: int) -> None:
    """This rank's row; at another number of ranks an even share of all, so that nothing is lost."""
    state: dict[str, Tensor] = {}
    for piece in saved.tensors:
        if not piece.startswith(_RESIDUAL):
            continue
        name, value = piece.removeprefix(_RESIDUAL), saved.tensors[piece]
        if name.startswith(_SAME):
            state[name] = value
        elif len(value) == num_workers:
            state[name] = value[rank]
        else:
            state[name] = value.sum(0) / num_workers
    compressor.load(state)


def refuse_different_models(model: nn.Module, gather: Callable[[Tensor], list[Tensor]]) -> None:
    """Compare names, shapes and dtypes over the ranks; the first rank that differs from rank 0 is named."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    mine = {
        name: f"{tuple(t.shape)} {t.dtype}" + (", frozen" if name in frozen else "")
        for name, t in plain_tensors(model).items()
    }
    mine |= {
        name: f"rows of {hashed.extra_repr()} in {hashed.dtype}"
        for name, hashed in hash_embeddings(model).items()
    }
    described = gather_json(gather, mine)
    for rank, other in enumerate(described):
        differences = [
            f"'{name}' is {described[0].get(name, 'absent')} on rank 0 and {other.get(name, 'absent')} on rank {rank}"
            for name in dict.fromkeys([*described[0], *other])
            if described[0].get(name) != other.get(name)
        ]
        if not differences and list(other) != list(described[0]):
            differences = ["its parameters come in another order"]
        if differences:
            raise ModelsDiffer(rank=rank, differences=differences)
