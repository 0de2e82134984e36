"""Drawing of a run's model as SVG: sources, layers and edges, with where each lives and what travels.

Pure: takes the values of `graph.json` (written by `shoal.train.graph`) and
returns text. Light or dark is the viewer's choice, by a style in the file.
"""

from __future__ import annotations

from collections import defaultdict
from html import escape
from typing import Any

MAX_BOXES = 72
"""Of a model with more layers, blocks are drawn: layers that share the beginning of their name."""

MAX_DEPTH = 32
REST = "… and more"

_WIDTH, _GAP, _RISE, _MARGIN = 290, 28, 46, 24
_LINE = 15

_STYLE = """
.box{fill:#ffffff;stroke:#cbd5e1;stroke-width:1.2}.source{fill:#eff6ff;stroke:#60a5fa}.served{fill:#fdf4ff;stroke:#c084fc}
.cut{fill:#fffbeb;stroke:#f59e0b}.joint{fill:#f1f5f9}.name{font-weight:600;fill:#0f172a}.about{fill:#475569}.where{fill:#0369a1}.sent{fill:#c2410c}
.edge{fill:none;stroke:#94a3b8;stroke-width:1.4}.crossing{stroke:#ea580c;stroke-width:2.4;stroke-dasharray:6 3}
.bytes{fill:#64748b;font-size:10.5px}.back{fill:#f8fafc}.over{paint-order:stroke;stroke:#f8fafc;stroke-width:4px}.head{fill:#94a3b8}
text{font:12px ui-sans-serif,system-ui,'DejaVu Sans',sans-serif}
@media (prefers-color-scheme:dark){.box{fill:#1e293b;stroke:#475569}.source{fill:#172554;stroke:#3b82f6}
.served{fill:#3b0764;stroke:#a855f7}.cut{fill:#422006;stroke:#d97706}.joint{fill:#172033}.name{fill:#f1f5f9}.about{fill:#cbd5e1}
.where{fill:#7dd3fc}.sent{fill:#fdba74}.edge{stroke:#64748b}.crossing{stroke:#fb923c}.bytes{fill:#94a3b8}.back{fill:#0f172a}.over{stroke:#0f172a}
.head{fill:#64748b}}
"""


def svg(graph: dict[str, Any]) -> str:
    """The drawing; of a graph that is empty or damaged, a picture that says so."""
    boxes, edges = _collapsed(*_read(graph))
    if not boxes:
        return _document(460, 60, [_text(24, 34, "about", "no graph was recorded for this run")], "no graph")
    places, width, height = _layout(boxes, edges)
    for edge in edges:
        _route(edge, boxes, places)
    around = max((edge["around"] for edge in edges), default=0.0)
    parts = [_edge(edge) for edge in edges]
    parts += [_box(name, box, *places[name]) for name, box in boxes.items()]
    # Of long ones only what is sent is labelled: the rest was said where it was made.
    parts += [_label(edge) for edge in edges if edge["bytes"] and (edge["sent"] or not edge["around"])]
    labels = [edge["x2"] + 8 * len(_said(edge)) for edge in edges if edge["around"] and edge["sent"]]
    width = max([width, width + around * 0.8 - _MARGIN, *labels])
    return _document(width, height, parts, f"{len(boxes)} boxes, {len(edges)} edges")


Box = dict[str, Any]


def _read(graph: dict[str, Any]) -> tuple[dict[str, Box], list[dict[str, Any]]]:
    boxes: dict[str, Box] = {}
    sent: dict[str, list[str]] = defaultdict(list)
    for each in _dicts(graph.get("communication")):
        if "layer" in each:
            sent[str(each["layer"])].append(f"{each.get('what', '')} {_size(each.get('bytes'))}".strip())
    for each in _dicts(graph.get("sources")):
        name = str(each.get("name"))
        boxes[name] = {
            "lines": [str(each.get("shape", ""))],
            "where": "",
            "sent": [],
            "class": "source",
            "count": 1,
        }
    for each in _dicts(graph.get("layers")):
        name, how = str(each.get("name")), str(each.get("how") or "")
        held = f", {_number(each['parameters'])} parameters" if each.get("parameters") else ""
        kind = (
            "joint"
            if each.get("is_join")
            else "served"
            if "server" in str(each.get("where"))
            else "cut"
            if each.get("is_cut")
            else ""
        )
        boxes[name] = {
            "lines": [f"{each.get('kind', '')} → {each.get('shape', '?')}{held}"],
            "where": ""
            if each.get("is_join")
            else " · ".join(part for part in (str(each.get("where") or ""), how) if part),
            "sent": sent.get(name, []),
            "class": kind,
            "count": 1,
        }
    edges = [
        {
            "from": str(each.get("from")),
            "to": str(each.get("to")),
            "bytes": each.get("bytes") or 0,
            "sent": str(each.get("sent") or ""),
        }
        for each in _dicts(graph.get("edges"))
    ]
    return boxes, [edge for edge in edges if edge["from"] in boxes and edge["to"] in boxes]


def _collapsed(
    boxes: dict[str, Box], edges: list[dict[str, Any]]
) -> tuple[dict[str, Box], list[dict[str, Any]]]:
    """Blocks in the place of layers, as deep as MAX_BOXES allows."""
    depth = min(MAX_DEPTH, max((name.count(".") + 1 for name in boxes), default=1))
    groups = {name: name for name in boxes}
    while len(set(groups.values())) > MAX_BOXES and depth > 1:
        depth -= 1
        groups = {name: ".".join(name.split(".", depth)[:depth]) for name in boxes}
    drawn = list(dict.fromkeys(groups.values()))
    if len(drawn) > MAX_BOXES:  # as many without a block: those that come last are one
        beyond = set(drawn[MAX_BOXES - 1 :])
        groups = {name: REST if group in beyond else group for name, group in groups.items()}
    found: dict[str, Box] = {}
    for name, box in boxes.items():
        group = found.get(groups[name])
        if group is None:
            found[groups[name]] = {**box, "sent": list(box["sent"])}
        else:
            group["count"] += 1
            group["lines"] = [f"block of {group['count']} layers"]
            group["where"] = group["where"] if group["where"] == box["where"] else "several places"
            group["sent"] = [*group["sent"], *box["sent"]]
    for group in found.values():
        if len(group["sent"]) > 2:
            group["sent"] = [f"{len(group['sent'])} exchanges"]
    joined: dict[tuple[str, str], dict[str, Any]] = {}
    for edge in edges:
        ends = groups[edge["from"]], groups[edge["to"]]
        if ends[0] != ends[1] and (ends not in joined or edge["sent"]):
            joined[ends] = {**edge, "from": ends[0], "to": ends[1]}
    return found, list(joined.values())


def _layout(
    boxes: dict[str, Box], edges: list[dict[str, Any]]
) -> tuple[dict[str, tuple[float, float]], float, float]:
    """Rows by the longest way from a source, columns by the mean place of what leads there."""
    order = {name: index for index, name in enumerate(boxes)}
    row = dict.fromkeys(boxes, 0)
    into: dict[str, list[str]] = defaultdict(list)
    for edge in sorted(edges, key=lambda edge: order[edge["to"]]):
        if order[edge["from"]] < order[edge["to"]]:  # what goes back (a layer used twice) does not push down
            into[edge["to"]].append(edge["from"])
            row[edge["to"]] = max(row[edge["to"]], row[edge["from"]] + 1)
    for name in boxes:  # sources stand right above their first use
        uses = [row[edge["to"]] for edge in edges if edge["from"] == name]
        if boxes[name]["class"] == "source" and uses:
            row[name] = max(0, min(uses) - 1)
    rows: dict[int, list[str]] = defaultdict(list)
    for name in boxes:
        rows[row[name]].append(name)
    column: dict[str, float] = {}
    for number in sorted(rows):
        fallback = {name: float(index) for index, name in enumerate(rows[number])}

        def wish(name: str, fallback: dict[str, float] = fallback) -> float:
            before = [column[other] for other in into[name] if other in column]
            return sum(before) / len(before) if before else fallback[name]

        rows[number].sort(key=wish)
        for index, name in enumerate(rows[number]):
            column[name] = index - (len(rows[number]) - 1) / 2
    widest = max(len(names) for names in rows.values())
    width = 2 * _MARGIN + widest * _WIDTH + (widest - 1) * _GAP
    places, top = {}, float(_MARGIN)
    for number in sorted(rows):
        for name in rows[number]:
            places[name] = (width / 2 + column[name] * (_WIDTH + _GAP) - _WIDTH / 2, top)
        top += max(_height(boxes[name]) for name in rows[number]) + _RISE
    return places, width, top - _RISE + _MARGIN


def _height(box: Box) -> float:
    return 14 + _LINE * (1 + len(box["lines"]) + bool(box["where"]) + len(box["sent"]))


def _box(name: str, box: Box, x: float, y: float) -> str:
    lines = [("name", name), *(("about", line) for line in box["lines"])]
    lines += [("where", box["where"])] if box["where"] else []
    lines += [("sent", f"⇄ {line}") for line in box["sent"]]
    title = escape("\n".join(line for _, line in lines))
    drawn = [
        f"<g><title>{title}</title>",
        f'<rect class="box {box["class"]}" x="{x:.0f}" y="{y:.0f}" width="{_WIDTH}" height="{_height(box):.0f}" rx="7"/>',
    ]
    for index, (kind, line) in enumerate(lines):
        drawn.append(_text(x + 11, y + 19 + index * _LINE, kind, _cut(line)))
    return "".join([*drawn, "</g>"])


def _route(edge: dict[str, Any], boxes: dict[str, Box], places: dict[str, tuple[float, float]]) -> None:
    """Ends of an edge; one that passes other boxes goes around them, on the right."""
    (x0, y0), (x1, y1) = places[edge["from"]], places[edge["to"]]
    low = y0 + _height(boxes[edge["from"]])
    passes = [
        y
        for name, (x, y) in places.items()
        if low < y and y + _height(boxes[name]) < y1 and x < max(x0, x1) + _WIDTH and x + _WIDTH > min(x0, x1)
    ]
    edge["around"] = 34.0 + 12 * min(len(passes), 5) if passes else 0.0
    if passes:
        edge |= {"x0": x0 + _WIDTH, "y0": low - 12, "x1": x1 + _WIDTH, "y1": y1 + 12}
        edge["x2"] = max(x0, x1) + _WIDTH + edge["around"] * 0.75 + 6
    else:
        edge |= {
            "x0": x0 + _WIDTH / 2,
            "y0": low,
            "x1": x1 + _WIDTH / 2,
            "y1": y1,
            "x2": (x0 + x1 + _WIDTH) / 2 + 7,
        }


def _edge(edge: dict[str, Any]) -> str:
    x0, y0, x1, y1, around = (edge[key] for key in ("x0", "y0", "x1", "y1", "around"))
    kind = " crossing" if edge["sent"] else ""
    if around:
        right = max(x0, x1) + around
        way = f"M{x0:.0f} {y0:.0f}C{right:.0f} {y0:.0f} {right:.0f} {y1:.0f} {x1 + 6:.0f} {y1:.0f}"
        head = f"M{x1 + 7:.0f} {y1 - 4:.0f}v8l-7 -4z"
    else:
        bend = max(18.0, (y1 - y0) / 2)
        way = f"M{x0:.0f} {y0:.0f}C{x0:.0f} {y0 + bend:.0f} {x1:.0f} {y1 - bend:.0f} {x1:.0f} {y1 - 5:.0f}"
        head = f"M{x1 - 4:.0f} {y1 - 7:.0f}h8l-4 7z"
    return f'<path class="edge{kind}" d="{way}"/><path class="head" d="{head}"/>'


def _label(edge: dict[str, Any]) -> str:
    middle = (edge["y0"] + edge["y1"]) / 2 + 4
    return _text(edge["x2"], middle, "sent over" if edge["sent"] else "bytes over", _said(edge))


def _said(edge: dict[str, Any]) -> str:
    return f"{edge['sent']} {_size(edge['bytes'])}".strip()


def _text(x: float, y: float, kind: str, said: str) -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{escape(said)}</text>'


def _document(width: float, height: float, parts: list[str], about: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(about)}"><style>{_STYLE}</style>'
        f'<rect class="back" width="100%" height="100%" rx="10"/>{"".join(parts)}</svg>\n'
    )


def _dicts(found: Any) -> list[dict[str, Any]]:
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _cut(line: str, length: int = 42) -> str:
    return line if len(line) <= length else f"{line[: length - 1]}…"


def _number(value: Any) -> str:
    if not isinstance(value, (int, float)):
        return "?"
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:g}"


def _size(value: Any) -> str:
    return (
        f"{_number(value)}B"
        if isinstance(value, (int, float)) and value >= 1000
        else f"{value} B"
        if value
        else ""
    )
