"""The report as one HTML page: no script, no network, charts as inline SVG, light and dark by the reader's system."""

from __future__ import annotations

import html
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.observe.record import BUSY, COMMUNICATION, RunRecord, while_training

MAX_POINTS = 600
"""Of a curve: beyond it a screen shows no difference."""

COLOURS = {
    "compute": "#2f7ed8",
    "apply": "#1b4f8a",
    "read": "#8bbc21",
    "exchange": "#e4813b",
    "push": "#e4a93b",
    "pull": "#d96b8a",
    "wait": "#c0392b",
    "checkpoint": "#8e6fc1",
    "other": "#b8bcc2",
}

_STYLE = """
:root{--bg:#fff;--fg:#1c2430;--dim:#667080;--line:#dfe3e8;--card:#f6f8fa;--accent:#2f7ed8}
@media(prefers-color-scheme:dark){:root{--bg:#12161c;--fg:#e6e9ee;--dim:#98a2b0;--line:#2b323c;--card:#1a2028;--accent:#6aa9f0}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
main{max-width:1000px;margin:0 auto;padding:24px 16px 60px}h1{font-size:26px;margin:0 0 2px}h2{font-size:18px;margin:34px 0 8px}
p{margin:6px 0}.dim{color:var(--dim)}.verdict{border-left:4px solid var(--accent);background:var(--card);padding:10px 14px;margin:18px 0}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:10px}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
.card b{display:block;font-size:20px;font-variant-numeric:tabular-nums;white-space:nowrap}.card span{color:var(--dim);font-size:13px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:4px 10px;border-bottom:1px solid var(--line);white-space:nowrap}th{color:var(--dim);font-weight:500}
th:first-child,td:first-child{text-align:left}svg{display:block;width:100%;min-width:620px;height:auto}svg text{fill:var(--dim);font:12px system-ui,sans-serif}
.legend span{display:inline-block;margin-right:14px;white-space:nowrap}.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px}
"""


def page(record: RunRecord, figures: Mapping[str, Any]) -> str:
    """The whole document."""
    verdict = " ".join(part for part in (figures["bottleneck"], figures["cure"]) if part)
    parts = [
        f"<h1>{_safe(figures['run'])}</h1>",
        f"<p class=dim>{_safe(_about(figures))}</p>",
        _verdict(verdict),
        _cards(figures),
        *(f"<p class=dim>Missing: {_safe(said)}</p>" for said in figures["missing"]),
        _section("Loss", _loss(record)),
        _section("Throughput", _throughput(record), "Samples per second of all workers."),
        _section("Where the time went", _time_by_worker(figures), "While each worker trained."),
        _section("Waiting for each other", _waiting(figures)),
        _section(
            "Step latency",
            _latencies(record),
            "From one step to the next, rank 0; the axis ends at the 99.5th percentile.",
        ),
        _section("Scaling", _scaling(figures)),
        _section("Servers", _servers(figures)),
        _section("Staleness", _staleness(figures)),
        _section("Processes", _nodes(figures)),
        _section("Faults", _faults(figures)),
        _section("In one sentence", _verdict(verdict)),
        f"<p class=dim>Written by shoal report, {time.strftime('%Y-%m-%d %H:%M')}. The figures are in report.json beside this file.</p>",
    ]
    return document(f"{figures['run']}: report", "\n".join(part for part in parts if part))


def document(title: str, body: str) -> str:
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{_safe(title)}</title><style>{_STYLE}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


def _safe(text: Any) -> str:
    return html.escape(str(text))


def _section(title: str, content: str, note: str = "") -> str:
    if not content:
        return ""
    said = f"<p class=dim>{_safe(note)}</p>" if note else ""
    return f"<h2>{_safe(title)}</h2>{said}{content}"


def _verdict(text: str) -> str:
    return f"<p class=verdict><b>Bottleneck.</b> {_safe(text)}</p>" if text else ""


def _about(figures: Mapping[str, Any]) -> str:
    servers = (
        f", {figures['servers']} server{'s' if figures['servers'] != 1 else ''}" if figures["servers"] else ""
    )
    count = figures["threads"]
    threads = f", {count} thread{'s' if count != 1 else ''} each" if count else ""
    workers = f"{figures['workers']} worker{'s' if figures['workers'] != 1 else ''}"
    return f"{figures['script'] or ''} · {figures['strategy']} · {workers}{threads}{servers} · {figures['state']}"


def _cards(figures: Mapping[str, Any]) -> str:
    latency, scaling, target, money = (
        figures[key] for key in ("step_latency", "scaling", "time_to_target", "money")
    )
    cards = [
        ("samples/s", _number(figures["samples_per_s"])),
        ("steps", _number(figures["steps"])),
        ("from launch to end", _seconds(figures["seconds"])),
        ("loss of the last step", _number(figures["loss"])),
        ("step, median", _seconds(latency and latency["median_s"])),
        ("step, 99th percentile", _seconds(latency and latency["p99_s"])),
        ("restarts", _number(figures["restarts"])),
        ("core-seconds", _number(figures["core_seconds"])),
        ("peak memory of a process", in_bytes(figures["peak_bytes"])),
    ]
    if figures["gpu_seconds"]:
        cards.append(("GPU-seconds", _number(figures["gpu_seconds"])))
    if figures["device_peak_bytes"]:
        cards.append(("peak memory of a device", in_bytes(figures["device_peak_bytes"])))
    if scaling:
        cards.insert(0, (f"efficiency of {figures['workers']} workers", f"{scaling['efficiency']:.0%}"))
        cards.insert(0, ("speedup over one worker", f"{scaling['speedup']:.2f} ×"))
    if target:
        cards.append(
            (f"to {target['target']}", _seconds(target["seconds"]) if target["seconds"] else "not reached")
        )
    if money:
        cards.append((f"cost at {money['price_per_host_hour']:g} per host-hour", f"{money['cost']:.4g}"))
    for name, value in (figures["metrics"] or {}).items():
        if isinstance(value, float) and name not in ("loss", "time"):
            cards.append((name, _number(value)))
    return (
        "<div class=cards>"
        + "".join(
            f"<div class=card><b>{_safe(value)}</b><span>{_safe(name)}</span></div>" for name, value in cards
        )
        + "</div>"
    )


# ---- charts ---------------------------------------------------------------------------------------


def thinned(x: NDArray[Any], y: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """As many points as a screen shows: the smallest and the largest of each stretch, so that no spike is lost."""
    if len(x) <= MAX_POINTS:
        return x, y
    bounds = np.linspace(0, len(x), MAX_POINTS // 2 + 1).astype(int)
    kept = []
    for start, stop in itertools.pairwise(bounds):
        part = y[start:stop]
        kept += sorted({start + int(part.argmin()), start + int(part.argmax())})
    return x[kept], y[kept]


def _smooth(values: NDArray[Any]) -> NDArray[Any]:
    width = max(1, len(values) // 50)
    sums = np.cumsum(np.concatenate([[0.0], values]))
    smooth: NDArray[Any] = (sums[width:] - sums[:-width]) / width
    return smooth


def lines(
    series: Sequence[tuple[str, str, NDArray[Any], NDArray[Any]]],
    *,
    x_name: str,
    y_name: str,
    from_zero: bool = False,
    dots: bool = False,
    x_ticks: Sequence[float] | None = None,
) -> str:
    """A chart of (name, colour, x, y). A colour that ends in "-" is drawn thin and dashed."""
    series = [each for each in series if len(each[2])]
    if not series:
        return ""
    width, height, left, bottom, top = 960, 300, 66, 36, 12
    x_all, y_all = (np.concatenate([each[k] for each in series]) for k in (2, 3))
    x0, x1 = float(x_all.min()), float(x_all.max())
    y0, y1 = float(y_all.min()), float(y_all.max())
    if from_zero:
        y0 = min(0.0, y0)
    x1, y1 = (x1 if x1 > x0 else x0 + 1), (y1 if y1 > y0 else y0 + (abs(y0) or 1))

    def at_x(value: float) -> float:
        return left + (value - x0) / (x1 - x0) * (width - left - 12)

    def at_y(value: float) -> float:
        return height - bottom - (value - y0) / (y1 - y0) * (height - bottom - top)

    out = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{_safe(y_name)} by {_safe(x_name)}">']
    for tick in ticks(y0, y1):
        y = at_y(tick)
        out.append(f'<line x1="{left}" x2="{width - 12}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        out.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    out += [
        f'<text x="{at_x(tick):.1f}" y="{height - bottom + 18}" text-anchor="middle">{_number(tick)}</text>'
        for tick in (x_ticks if x_ticks is not None else ticks(x0, x1))
    ]
    out.append(f'<text x="{width - 12}" y="{height - 2}" text-anchor="end">{_safe(x_name)}</text>')
    for _, colour, xs, ys in series:
        points = " ".join(
            f"{at_x(float(a)):.1f},{at_y(float(b)):.1f}" for a, b in zip(*thinned(xs, ys), strict=True)
        )
        look = 'stroke-width="1" stroke-dasharray="5 4"' if colour.endswith("-") else 'stroke-width="2"'
        out.append(
            f'<polyline points="{points}" fill="none" stroke="{colour.rstrip("-")}" {look} stroke-linejoin="round"/>'
        )
        if (dots or len(xs) == 1) and not colour.endswith("-"):  # a line of one point shows nothing
            out += [
                f'<circle cx="{at_x(float(a)):.1f}" cy="{at_y(float(b)):.1f}" r="4" fill="{colour}"/>'
                for a, b in zip(xs, ys, strict=True)
            ]
    return _chart(out) + legend(
        [(name, colour.rstrip("-")) for name, colour, _, _ in series] if len(series) > 1 else []
    )


def _chart(parts: Sequence[str]) -> str:
    """The drawing, which scrolls where it would be too small to read."""
    return "<div class=scroll>" + "".join(parts) + "</svg></div>"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between the two."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * k for k in (1, 2, 2.5, 5, 10) if power * k >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def legend(entries: Sequence[tuple[str, str]]) -> str:
    if not entries:
        return ""
    return (
        "<p class=legend>"
        + "".join(
            f'<span><i style="background:{colour}"></i>{_safe(name)}</span>' for name, colour in entries
        )
        + "</p>"
    )


def _loss(record: RunRecord) -> str:
    steps, loss = record.steps.step, record.steps.loss
    finite = np.isfinite(loss)
    steps, loss = steps[finite], loss[finite]
    if len(steps) < 2:
        return ""
    series = [("each step", "#9db8d6-", steps, loss)]
    smooth = _smooth(loss)
    series.append(("running mean", "#2f7ed8", steps[len(steps) - len(smooth) :], smooth))
    for name in sorted(
        {key for line in record.epochs for key in line if key.startswith("val_") and key.endswith("loss")}
    ):
        points = [
            (line["step"], line[name])
            for line in record.epochs
            if isinstance(line.get("step"), int)
            and isinstance(line.get(name), float)
            and math.isfinite(line[name])
        ]
        if points:
            series.append(
                (name, "#e4813b", np.array([p[0] for p in points]), np.array([p[1] for p in points]))
            )
    return lines(series, x_name="step", y_name="loss")


def _throughput(record: RunRecord) -> str:
    training = [part for each in record.workers.values() if (part := while_training(each))]
    if not training:
        return ""
    began = min(part[0]["at"] - part[0].get("interval_s", 1.0) for part in training)
    ended = max(part[-1]["at"] for part in training)
    width = max(
        1.0, *(line.get("interval_s", 1.0) for part in training for line in part), (ended - began) / 240
    )
    bins = np.zeros(max(1, math.ceil((ended - began) / width)))
    for part in training:
        for line in part:
            middle = line["at"] - line.get("interval_s", 1.0) / 2
            # At an end where its clock was set back meanwhile.
            bins[max(0, min(int((middle - began) / width), len(bins) - 1))] += line.get("samples", 0)
    if len(bins) < 4:
        return ""
    bins = bins[:-1]  # of which only a part was
    x = (np.arange(len(bins)) + 0.5) * width
    return lines(
        [("samples/s", "#2f7ed8", x, bins / width)],
        x_name="seconds since the first step",
        y_name="samples/s",
        from_zero=True,
    )


def _time_by_worker(figures: Mapping[str, Any]) -> str:
    by_worker = figures["time_by_worker"]
    if not any(sum(each["seconds"].values()) for each in by_worker.values()):
        return ""
    kinds = [
        kind for kind in (*BUSY, "other") if any(each["seconds"].get(kind) for each in by_worker.values())
    ]
    row, left, width = 30, 90, 960
    shown = list(by_worker.items())[:64]
    out = [f'<svg viewBox="0 0 {width} {row * len(shown) + 6}" role="img" aria-label="time by worker">']
    for index, (name, each) in enumerate(shown):
        total = sum(each["seconds"].values()) or 1.0
        x, y = float(left), index * row + 3
        slow = figures["stragglers"].get(name)
        out.append(
            f'<text x="{left - 8}" y="{y + 17}" text-anchor="end">{"▲ " if slow else ""}{_safe(name)}</text>'
        )
        for kind in kinds:
            share = each["seconds"].get(kind, 0.0) / total
            wide = share * (width - left - 10)
            about = f"{name}: {kind} {each['seconds'].get(kind, 0.0):.2f} s, {share:.1%}"
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{row - 6}" fill="{COLOURS[kind]}"><title>{_safe(about)}</title></rect>'
            )
            if wide > 44:
                out.append(
                    f'<text x="{x + wide / 2:.1f}" y="{y + 17}" text-anchor="middle" style="fill:#fff">{share:.0%}</text>'
                )
            x += wide
    notes = [
        f"▲ {name} needs {times:g} times as long for a step as the others."
        for name, times in figures["stragglers"].items()
    ]
    notes += (
        [f"{len(by_worker) - len(shown)} more workers are in report.json."]
        if len(by_worker) > len(shown)
        else []
    )
    exposed = [each["exposed_communication"] for each in by_worker.values()]
    notes.insert(
        0,
        f"Exposed communication, {', '.join(COMMUNICATION)}: {sum(exposed) / len(exposed):.1%} of a worker's time on average, "
        f"{min(exposed):.1%} to {max(exposed):.1%}.",
    )
    return (
        _chart(out)
        + legend([(kind, COLOURS[kind]) for kind in kinds])
        + "".join(f"<p>{_safe(each)}</p>" for each in notes)
    )


def _waiting(figures: Mapping[str, Any]) -> str:
    found = figures["exchange"]
    if not found:
        return ""
    rows = [
        [name, _seconds(waited), f"{found['was_last'][name]:.0%}"]
        for name, waited in list(found["waited_s_per_step"].items())[:64]
    ]
    said = (
        f"In the last {found['steps']:,} steps of which all workers have spans, the exchange itself took "
        f"{_seconds(found['transfer_s_per_step'])} a step once the last worker had come."
    )
    return f"<p>{_safe(said)}</p>" + _table(
        ["worker", "waited for the last, per step", "was the last itself"], rows
    )


def _latencies(record: RunRecord) -> str:
    spent = record.steps.latencies_s()
    if len(spent) < 20:
        return ""
    top = float(np.percentile(spent, 99.5))
    counts, edges = np.histogram(np.clip(spent, 0, top), bins=60)
    width, height, left = 960, 180, 66
    high = counts.max()
    out = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="histogram of step latency">']
    wide = (width - left - 12) / len(counts)
    for index, count in enumerate(counts):
        tall = count / high * (height - 40)
        about = f"{_seconds(edges[index])} to {_seconds(edges[index + 1])}: {count:,} steps"
        out.append(
            f'<rect x="{left + index * wide:.1f}" y="{height - 26 - tall:.1f}" width="{wide - 1:.1f}" height="{tall:.1f}" fill="#2f7ed8"><title>{_safe(about)}</title></rect>'
        )
    for tick in ticks(float(edges[0]), float(edges[-1])):
        x = left + (tick - edges[0]) / (edges[-1] - edges[0] or 1) * (width - left - 12)
        out.append(f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{_seconds(tick)}</text>')
    return _chart(out)


def _scaling(figures: Mapping[str, Any]) -> str:
    found = figures["scaling"]
    if not found:
        return ""
    threads = f", {found['baseline_threads']} threads" if found.get("baseline_threads") else ""
    return (
        f"<p>{_safe(figures['workers'])} workers train {_number(figures['samples_per_s'])} samples/s, one worker "
        f"{_number(found['baseline_samples_per_s'])} (measured in {_safe(found['baseline'])}{threads}): a speedup of "
        f"{found['speedup']:.2f}, {found['efficiency']:.0%} of the ideal.</p>"
    )


def _servers(figures: Mapping[str, Any]) -> str:
    rows = []
    for name, each in figures["servers_load"].items():
        held = f"{sum(each['rows'].values()):,}" if each["rows"] else "-"
        busy = "-" if each["busy"] is None else f"{each['busy']:.0%}"
        rows.append(
            [
                name,
                busy,
                _number(each["requests"]),
                _seconds(each["queue_s"]),
                _number(each["slots"]),
                _number(each["replicas"]),
                held,
            ]
        )
    return _table(["server", "busy", "requests", "queue delay", "slots", "replicas", "rows"], rows)


def _staleness(figures: Mapping[str, Any]) -> str:
    counted = figures["staleness"]
    total = sum(counted.values())
    if not total:
        return ""
    rows = [
        [f"{distance} steps behind", f"{count:,}", f"{count / total:.1%}"]
        for distance, count in list(counted.items())[:24]
    ]
    if cached := figures.get("row_cache"):
        rows.append(["rows found in a worker's cache", f"{cached['hits']:,}", f"{cached['hit_rate']:.1%}"])
    return _table(["pulls", "number", "share"], rows)


def _nodes(figures: Mapping[str, Any]) -> str:
    rows = [
        [
            name,
            in_bytes(each["sent_bytes"]),
            in_bytes(each["received_bytes"]),
            f"{in_bytes(each['bytes_per_s'])}/s" if each["bytes_per_s"] else "–",
            f"{each['share_of_bandwidth']:.2%}" if each["share_of_bandwidth"] else "–",
            _seconds(each["waited_s"]),
            _seconds(each["cpu_s"]),
            in_bytes(each["peak_bytes"]),
        ]
        for name, each in list(figures["nodes"].items())[:128]
    ]
    rows += [
        [
            f"{name}, {each['processes']} processes",
            in_bytes(each["sent_bytes"]),
            in_bytes(each["received_bytes"]),
            f"{in_bytes(each['bytes_per_s'])}/s" if each["bytes_per_s"] else "–",
            "–",
            _seconds(each["waited_s"]),
            _seconds(each["cpu_s"]),
            "–",
        ]
        for name, each in list(figures["hosts"].items())[:128]
    ]
    said = "; ".join(f"{name} {value:.2f}" for name, value in figures["imbalance"].items())
    note = f"<p class=dim>Imbalance, largest over mean: {_safe(said)}.</p>" if said else ""
    links = ", ".join(f"{name} {in_bytes(moved)}" for name, moved in figures["links"].items())
    note += f"<p class=dim>Bytes by link: {_safe(links)}.</p>" if links else ""
    link = figures["bandwidth"]
    if link is not None:
        note += f"<p class=dim>Of the link: {_safe(in_bytes(link['bytes_per_s']))}/s, {_safe(link['measured_by'])}.</p>"
    return (
        _table(
            [
                "process",
                "sent",
                "received",
                "rate",
                "of the link",
                "waiting",
                "processor time",
                "peak memory",
            ],
            rows,
        )
        + note
    )


def _faults(figures: Mapping[str, Any]) -> str:
    rows = [
        [
            each["what"],
            time.strftime("%H:%M:%S", time.localtime(each["time"])),
            _number(each["step"]),
            _seconds(each["cost_s"]),
            _number(each["repeated_steps"]),
        ]
        for each in figures["faults"][:64]
    ]
    return _table(["died", "at", "during step", "cost", "steps repeated"], rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{_safe(each)}</th>" for each in heads)
    body = "".join("<tr>" + "".join(f"<td>{_safe(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>"


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value == 0:
        return "0 s"
    if abs(value) < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if abs(value) < 1:
        return f"{value * 1e3:.3g} ms"
    if abs(value) < 120:
        return f"{value:.3g} s"
    hours, rest = divmod(int(value), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


def in_bytes(value: float | None) -> str:
    if not value:
        return "-"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError
