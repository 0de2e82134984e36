"""Which layers are cut over the ranks of `tp`, and why not the others.

Linear layers are paired: those that feed a block's inside are cut by columns,
the one that closes it by rows, and everything between them works on a part of
the features: the two halves of an MLP, the projections of an attention. The
pairs are found by tracing each module's own forward, one level deep. Decides
only; `tensor_cut.py` does it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from difflib import get_close_matches

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from shoal.errors import ConfigError
from shoal.parallel.tensor_parallel.attention import PACKED, why_not_by_heads
from shoal.parallel.tensor_parallel.pairs import pair
from shoal.parallel.tensor_parallel.plan_rows import (
    NORMS,
    Plan,
    Row,
    is_tied,
    tied_parameters,
    why_not,
    why_not_along,
)

__all__ = ["ALONE_BYTES", "STYLES", "Plan", "find_plan"]

STYLES = ("colwise", "rowwise", "heads", "replicated", "sequence")

ALONE_BYTES = 1 << 20
"""A linear layer or embedding without a partner is cut from this size on: its output has to be gathered then."""


def find_plan(
    model: nn.Module, degree: int, user_plan: Mapping[str, str] | None = None, *, sequence: bool = False
) -> Plan:
    """A plan for every layer; the user's patterns first. Refuses a model of which nothing can be cut."""
    plan = Plan(degree, is_sequence=sequence or "sequence" in (user_plan or {}).values())
    tied = tied_parameters(model)
    attentions = {n: each for n, each in model.named_modules() if isinstance(each, nn.MultiheadAttention)}
    for name in attentions:
        plan.fixed |= {name, _out_of(name)}
    _take_users(plan, model, user_plan or {}, tied)
    for name, module in attentions.items():
        _cut_by_heads(plan, name, module, tied)
    for name, module in model.named_modules():
        if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            _pair_transformer(plan, name, module)
        elif any(isinstance(child, (nn.Linear, nn.Sequential)) for child in module.children()):
            pair(plan, name, module, tied)
    _cut_tied(plan, model, tied)
    for row in list(plan.rows.values()):
        if row.style == "colwise" and row.layer not in plan.closed:
            reason = f"{row.reason}; no rowwise layer closes it, so its output is gathered"
            plan.rows[row.layer] = Row(row.layer, "colwise alone", reason)
    for name, module in model.named_modules():
        if sequence and isinstance(module, (*NORMS, _DropoutNd)) and name not in plan.inside:
            _run_along(plan, name, module)
        if any(True for _ in module.parameters(recurse=False)):
            _leave(plan, name, module, tied)
    if not plan.num_cut:
        reasons = "; ".join(f"'{row.layer}': {row.reason}" for row in list(plan.rows.values())[:5])
        raise ConfigError(
            f"no layer of this model can be cut over {degree} ranks ({reasons or 'it has no parameters'}). Nothing was trained; "
            "use --strategy ddp or fsdp, another degree, or say how with tensor_plan={'blocks.*.fc1': 'colwise', ...}."
        )
    return plan


def _take_users(plan: Plan, model: nn.Module, patterns: Mapping[str, str], tied: set[int]) -> None:
    layers = {name: module for name, module in model.named_modules() if name}
    for pattern, style in patterns.items():
        if style not in STYLES:
            raise ConfigError(
                f"tensor_plan says '{style}' for '{pattern}', which is no way to cut a layer. Nothing was trained; a layer is "
                f"{', '.join(STYLES)}."
            )
        found = [name for name in layers if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            close = get_close_matches(pattern, layers, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            some = ", ".join(f"'{name}'" for name in list(layers)[:5]) + (", ..." if len(layers) > 5 else "")
            raise ConfigError(
                f"tensor_plan names '{pattern}', and no layer of the model is called so.{hint} Nothing was trained; its layers are "
                f"{some or 'none: the model is one layer itself'}, and a pattern may hold * and ?."
            )
        for name in found:
            module = layers[name]
            if style != "replicated":
                reason = _why_not_users(plan, name, module, style)
                if reason is None and style != "sequence" and is_tied(module, tied):
                    reason = "its weight is shared with another layer, and is cut with it or not at all"
                if reason:
                    raise ConfigError(
                        f"tensor_plan cuts '{name}' {style} over {plan.degree} ranks, which cannot be: {reason}. Nothing was trained; "
                        f"leave '{pattern}' out of it, or say 'replicated'."
                    )
            plan.add(name, style, f"tensor_plan: '{pattern}'")


def _run_along(plan: Plan, name: str, module: nn.Module) -> None:
    why = why_not_along(module)
    plan.add(name, "replicated" if why else "sequence", why or "runs on a part of the sequence")


def _why_not_users(plan: Plan, name: str, module: nn.Module, style: str) -> str | None:
    if style == "heads":
        if isinstance(module, nn.MultiheadAttention):
            return why_not_by_heads(module, plan.degree)
        return f"it is a {type(module).__name__}, and an nn.MultiheadAttention can be cut by heads"
    if name in plan.fixed:
        return "an nn.MultiheadAttention is cut by heads with all its projections, or not at all"
    return why_not(module, style, plan.degree)


def _out_of(attention: str) -> str:
    return f"{attention}.out_proj" if attention else "out_proj"


def _cut_by_heads(plan: Plan, name: str, module: nn.MultiheadAttention, tied: set[int]) -> None:
    """All of an attention, or nothing of it: its forward reads the weights of its projections past the layers that hold them."""
    out, prefix = _out_of(name), f"{name}." if name else ""
    why = why_not_by_heads(module, plan.degree)
    if any(is_tied(each, tied) for each in module.modules()):
        why = "its weight is shared with another layer"
    users = next((plan.rows[each] for each in (name, out) if each in plan.rows), None)
    if users is not None and users.style != "heads":
        why = users.reason
    if why is None:
        share = f"{module.num_heads // plan.degree} of its {module.num_heads} heads on each rank"
        plan.add(name, "heads", share)
        plan.rows[out] = Row(out, "heads", f"closes {name or 'the attention'}")
        parameters = dict(module.named_parameters(recurse=False))
        plan.packed |= {prefix + key: 3 for key in PACKED if key in parameters}
        return
    plan.add(name, "replicated", why)
    plan.add(out, "replicated", f"belongs to {name or 'an attention'}, which is not cut")


def _cut_tied(plan: Plan, model: nn.Module, tied: set[int]) -> None:
    """A large table that is also the weight of the layer that scores its rows: both are cut by rows of it."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in tied:
                holders.setdefault(id(parameter), []).append(name)
    for names in holders.values():
        modules = {name: model.get_submodule(name) for name in names}
        tables = [name for name, module in modules.items() if isinstance(module, nn.Embedding)]
        scoring = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
        if (
            not tables
            or len(tables) + len(scoring) != len(names)
            or any(plan.is_settled(name) for name in names)
        ):
            continue
        num_bytes = sum(each.numel() * each.element_size() for each in modules[tables[0]].parameters())
        if num_bytes < ALONE_BYTES or any(why_not(modules[name], "rowwise", plan.degree) for name in tables):
            continue
        for name in tables:
            plan.rows[name] = Row(
                name, "rowwise", f"its weight is also that of {', '.join(sorted({*names} - {name}))}"
            )
        for name in scoring:
            plan.rows[name] = Row(
                name, "colwise alone", f"its weight is also that of {tables[0]}; its output is gathered"
            )


def _pair_transformer(plan: Plan, name: str, module: nn.Module) -> None:
    prefix = f"{name}." if name else ""
    first, second = module.get_submodule("linear1"), module.get_submodule("linear2")
    why = why_not(first, "colwise", plan.degree) or why_not(second, "rowwise", plan.degree)
    if why is None:
        plan.add(f"{prefix}linear1", "colwise", f"closed by {prefix}linear2")
        plan.add(f"{prefix}linear2", "rowwise", f"closes {prefix}linear1")
        plan.closed.add(f"{prefix}linear1")
    for child_name, child in module.named_children():
        if isinstance(child, nn.Dropout) and child_name == "dropout":
            plan.inside.add(prefix + child_name)  # between the two


def _leave(plan: Plan, name: str, module: nn.Module, tied: set[int]) -> None:
    """A layer without a partner."""
    if plan.is_settled(name):
        return
    num_bytes = sum(
        parameter.numel() * parameter.element_size() for parameter in module.parameters(recurse=False)
    )
    if isinstance(module, (nn.Linear, nn.Embedding)):
        if is_tied(module, tied):
            plan.rows[name] = Row(name, "replicated", "its weight is shared with another layer")
            return
        why = why_not(module, "colwise", plan.degree)
        if why is None and num_bytes >= ALONE_BYTES:
            plan.rows[name] = Row(name, "colwise alone", "no partner; its output is gathered")
            return
        plan.add(name, "replicated", why or "no partner, and too small to cut alone")
        return
    own = [f"'{key}'" for key, _ in module.named_parameters(recurse=False)] if not name else []
    what = f"{', '.join(own[:3])} of the model itself" if own else f"a {type(module).__name__}"
    plan.add(name, "replicated", f"{what} is not cut")
