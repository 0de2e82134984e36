"""`trainer.summary()`: layers of the user's model with their parameters, before a strategy partitioned it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shoal.embedding import HashEmbedding


@dataclass(frozen=True, slots=True)
class LayerLine:
    """One layer."""

    name: str
    kind: str
    num_parameters: int
    num_trainable: int
    num_bytes: int
    remark: str = ""


def layer_lines(model: nn.Module) -> list[LayerLine]:
    """Modules with parameters of their own, in the model's order; a tied parameter counts at its first place."""
    lines, seen = [], set[int]()
    for name, module in model.named_modules():
        if isinstance(module, HashEmbedding):
            lines.append(LayerLine(name or "model", "HashEmbedding", 0, 0, 0, "rows by key, as they come"))
            continue
        own = [each for each in module._parameters.values() if each is not None]
        if not own:
            continue
        new = [each for each in own if id(each) not in seen]
        seen.update(map(id, own))
        lines.append(
            LayerLine(
                name or "model",
                type(module).__name__,
                sum(each.numel() for each in new),
                sum(each.numel() for each in new if each.requires_grad),
                sum(each.nbytes for each in new),
                "tied" if len(new) < len(own) else "",
            )
        )
    return lines


def summary_text(lines: list[LayerLine], *, title: str, footer: list[str]) -> str:
    rows = [("layer", "kind", "parameters", "")]
    for line in lines:
        frozen = "frozen" if line.num_parameters and not line.num_trainable else ""
        rows.append(
            (line.name, line.kind, f"{line.num_parameters:,}", ", ".join(filter(None, (frozen, line.remark))))
        )
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    drawn = [
        f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {number:>{widths[2]}}  {remark}".rstrip()
        for name, kind, number, remark in rows
    ]
    rule = "-" * max(map(len, drawn))
    total, trainable = sum(line.num_parameters for line in lines), sum(line.num_trainable for line in lines)
    megabytes = sum(line.num_bytes for line in lines) / 1e6
    totals = f"{total:,} parameters, {trainable:,} trained, {total - trainable:,} frozen, {megabytes:,.1f} MB"
    return "\n".join([title, drawn[0], rule, *drawn[1:], rule, totals, *footer])
