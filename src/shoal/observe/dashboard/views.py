"""Views: the content of each dashboard page for a run, in plain values.

Pure functions of a feed, which the caller has locked and polled. A missing file, or one of an older
run, leaves its part of a page empty; no value is made up.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from shoal.config import strategy as strategies
from shoal.errors import ConfigError
from shoal.observe import figures, record, runs
from shoal.observe.dashboard.feed import RunFeed
from shoal.observe.planner.cost_model import PAYS_FROM
from shoal.runtime.signal_names import signal_name

RECENT_S = 30.0
"""How far back "now" reaches: speed, shares of time, stragglers."""

LANES_S = 120.0
"""Length of the lanes of workers."""

MAX_SHOWN_EVENTS = 500
MAX_ESTIMATED = 1024
"""Workers up to which the estimate of the overview looks."""

GROUPS = {
    "data": ("read",),
    "compute": ("compute", "apply"),
    "communication": ("exchange", "push", "pull"),
    "waiting": ("wait",),
    "checkpoint": ("checkpoint",),
}
"""Kinds of spans as a lane shows them."""

OUTSIDE = "outside"
"""Time in none of the groups."""

_GROUP_OF = {kind: group for group, kinds in GROUPS.items() for kind in kinds}

Values = dict[str, Any]


def head(feed: RunFeed) -> Values:
    """Head of every page."""
    summary = feed.summary
    restarts = summary.get("restarts")
    if restarts is None:
        restarts = sum(event.get("event") in ("worker-replaced", "server-replaced") for event in feed.events)
    error = summary.get("error")
    return {
        "name": feed.name,
        "state": str(feed.state),
        "strategy": feed.config.get("strategy"),
        "workers": feed.config.get("workers"),
        "servers": feed.config.get("servers") or 0,
        "script": " ".join(
            str(part) for part in [feed.config.get("script", "-"), *(feed.config.get("args") or [])]
        ),
        "started": feed.config.get("started"),
        "ended": summary.get("ended"),
        "exit": summary.get("exit"),
        "error": error if isinstance(error, str) else None,
        "restarts": restarts,
        "seed": feed.config.get("seed"),
        "versions": feed.config.get("versions") or {},
        "hosts": len(feed.config.get("hosts") or []) or 1,
        "unread_bytes": feed.left_bytes if feed.is_sampled else 0,
    }


def progress(feed: RunFeed) -> Values:
    """Progress, speed and expected end."""
    rate = feed.steps.rate()
    step = runs.last_step([feed.last] if feed.last else [], feed.summary).get("step")
    told = _newest_report(feed)
    num_steps = _count(told.get("num_steps"))
    speed = _recent(rate, "steps_per_s")
    eta_s = None
    if feed.state is runs.RunState.ALIVE and num_steps and step is not None and speed:
        eta_s = told["eta_s"] if _is_number(told.get("eta_s")) else max(0, num_steps - step) / speed
    is_over = feed.state is runs.RunState.FINISHED
    done = 1.0 if is_over else step / num_steps if num_steps and step is not None else None
    return {
        "step": step,
        "num_steps": num_steps or (step if is_over else None),
        "epoch": _epoch(feed),
        "num_epochs": told.get("num_epochs"),
        "done": min(1.0, done) if done is not None else None,
        "loss": feed.last.get("loss"),
        "samples": feed.summary.get("samples"),
        "samples_per_s": feed.summary.get("samples_per_s") or _recent(rate, "rate"),
        "eta_s": eta_s,
        "seconds": _seconds(feed),
    }


def _seconds(feed: RunFeed) -> float | None:
    """How long it ran, over all launches; the time between them left out."""
    started, ended = feed.config.get("started"), feed.summary.get("ended")
    if not _is_number(ended):
        ended = time.time() if feed.state is runs.RunState.ALIVE else None
    if not _is_number(started) or ended is None:
        return None
    seen = [each for each in feed.events if _is_number(each.get("time"))]
    down = 0.0
    for before, after in itertools.pairwise(seen):
        if before.get("event") == "job-ended":
            down += after["time"] - before["time"]
        elif before["time"] < started <= after["time"]:  # the launch before was killed, and told no end
            signs = (line["at"] for lines in feed.activity.values() for line in lines if line["at"] < started)
            down += started - max([before["time"], *signs])
    began = min([started, *(each["time"] for each in seen[:1])])
    return max(0.0, float(ended - began - max(0.0, down)))


def _epoch(feed: RunFeed) -> int | None:
    """The epoch that is being trained, or was last, counted from one; files count from zero."""
    epoch = _count(feed.last.get("epoch"))
    if epoch is None and feed.epochs:
        epoch = len(feed.epochs) - (feed.state is not runs.RunState.ALIVE)
    return epoch + 1 if epoch is not None else None


def _newest_report(feed: RunFeed) -> Values:
    """Newest line in which a worker reports its planned end."""
    lines = (
        line for name in sorted(feed.activity, key=record.by_number) for line in reversed(feed.activity[name])
    )
    return next((line for line in lines if line.get("num_steps") and record.is_of_fit(line)), {})


def _recent(rate: Mapping[str, list[float]], name: str) -> float | None:
    """The newest speed, over the last of the buckets that are long enough to mean something."""
    if not rate["step"]:
        return None
    end = rate["seconds"][-1]
    weights = [end - at <= RECENT_S for at in rate["seconds"]]
    chosen = [value for value, near in zip(rate[name], weights, strict=True) if near]
    return statistics.median(chosen) if chosen else None


def overview(feed: RunFeed) -> Values:
    names = [name for name in feed.steps.names if name not in ("step", "time", "samples", "loss")]
    by_epoch: dict[str, list[list[float]]] = {}
    for line in feed.epochs:
        for name, value in line.items():
            if name not in ("epoch", "step", "time") and _is_number(value) and _is_number(line.get("step")):
                by_epoch.setdefault(name, []).append([line["step"], value])
    progressed = progress(feed)
    return {
        "progress": progressed,
        "loss": feed.steps.curve("loss"),
        "rate": feed.steps.rate(),
        "metrics": {name: feed.steps.curve(name) for name in names},
        "epochs": by_epoch,
        "final": _final(feed),
        "marks": [mark for mark in faults(feed) if mark["at"] is not None],
        "answers": answers(feed, progressed["samples_per_s"]),
    }


def answers(feed: RunFeed, speed: float | None) -> list[Values]:
    """Answers to the first questions, in sentences: is it learning, is it fast, what holds it up, what died, would more workers pay."""
    spent = _spent(feed)
    return [
        {"question": "Is it learning?", **_learning(feed)},
        {"question": "Is it fast?", **_fast(speed, _by_group(spent))},
        {"question": "What holds it up?", **_bottleneck(feed, _by_group(spent))},
        {"question": "What died?", **_died(feed)},
        {"question": "Would another worker pay?", **_another_worker(feed, spent)},
    ]


def _learning(feed: RunFeed) -> Values:
    means = feed.steps.curve("loss")["mean"]
    if len(means) < 8:
        return {"answer": "too few steps to say", "level": "unknown"}
    tenth = max(1, len(means) // 10)
    first, before, last = (
        statistics.fmean(part) for part in (means[:tenth], means[-2 * tenth : -tenth], means[-tenth:])
    )
    if feed.last.get("loss") is None:
        return {"answer": "the loss is not a finite number", "level": "bad"}
    change = f"loss {_short(first)} → {_short(last)}"
    if last >= first:
        return {"answer": f"no: {change}", "level": "bad"}
    validated = [line["val_loss"] for line in feed.epochs if _is_number(line.get("val_loss"))]
    if validated and validated[-1] - min(validated) > 0.01 * abs(min(validated)):
        rise = f"val_loss {_short(min(validated))} → {_short(validated[-1])}"
        return {
            "answer": f"the training data alone: {change}, but {rise} since its best epoch",
            "level": "fair",
        }
    if before - last <= 0.001 * abs(before):
        return {"answer": f"{change}; hardly any more in the last tenth", "level": "fair"}
    return {"answer": f"yes: {change}", "level": "good"}


def _fast(speed: float | None, shares: Mapping[str, float]) -> Values:
    if speed is None:
        return {"answer": "no speed measured yet", "level": "unknown"}
    total = sum(shares.values())
    if not any(shares.get(name) for name in GROUPS):
        return {"answer": f"{_short(speed)} samples/s", "level": "fair"}
    busy = shares.get("compute", 0.0) / total
    level = "good" if busy >= 0.7 else "fair" if busy >= 0.4 else "bad"
    return {"answer": f"{_short(speed)} samples/s; workers compute {busy:.0%} of the time", "level": level}


def _bottleneck(feed: RunFeed, shares: dict[str, float]) -> Values:
    slow = figures.stragglers({name: record.totals(lines) for name, lines in _lately(feed).items()})
    if slow:
        said = ", ".join(
            f"{name} needs {times:.3g} times as long for a step as the others"
            for name, times in [*slow.items()][:3]
        )
        return {"answer": said, "level": "bad"}
    total = sum(shares.values())
    if not any(shares.get(name) for name in GROUPS):
        return {"answer": "no activity recorded", "level": "unknown"}
    if shares[OUTSIDE] <= 0.3 * total:
        del shares[OUTSIDE]
    kind, seconds = max(shares.items(), key=lambda item: item[1])
    said = {
        "compute": "computing: more workers, or faster ones, would help",
        "data": "reading data: more reader processes, or a cache",
        "communication": "communication: larger batches, compression or fewer workers",
        "waiting": "waiting for each other or for servers",
        "checkpoint": "writing checkpoints: save less often",
        OUTSIDE: "code outside of the step: callbacks, metrics, the script between steps",
    }[kind]
    return {"answer": f"{said} ({seconds / total:.0%})", "level": "good" if kind == "compute" else "fair"}


def _another_worker(feed: RunFeed, spent: Mapping[str, float]) -> Values:
    """By the time that a worker more makes shorter, where the rest of a step is as long as now: the estimate that `shoal plan` measures."""
    found = _estimate(feed, spent)
    if isinstance(found, str):
        said, level = found, "unknown"
    else:
        gained, limit = found
        pays = gained >= PAYS_FROM
        ends = f"the next one stops paying at {limit}" if limit > 1 else "a second one does not pay"
        ends = ends if limit < MAX_ESTIMATED else f"the next one pays up to {limit:,} workers"
        said = f"{'yes' if pays else 'hardly'}: about {gained:.0%} of what one adds alone; by the same estimate {ends}"
        level = "good" if pays else "fair"
    planned = feed.plan.get("stops_paying")
    return {
        "answer": f"{said}. Its plan: {planned}" if planned else f"{said}; shoal plan measures it",
        "level": level,
    }


def _estimate(feed: RunFeed, spent: Mapping[str, float]) -> tuple[float, int] | str:
    """What the next worker adds, in that which one trains alone, and at how many it adds less than PAYS_FROM; or why it is not known."""
    workers = _count(feed.config.get("workers"))
    if not any(spent.values()):
        return "no activity recorded"
    try:
        strategy = strategies.parse(str(feed.config.get("strategy")))
    except ConfigError:
        return "not known: config.json names no strategy"
    if not workers:
        return "not known: config.json names no number of workers"
    if feed.config.get("sync_every") is not None or not strategy.is_exact:
        which = "--sync-every" if strategy.is_exact else feed.config.get("strategy")
        return f"not known: under {which} a worker steps without the others, and its time tells nothing of one more"
    if not spent["compute"]:
        return "not known: no computing was recorded"
    # The optimizer is whole in every worker, unless the strategy cuts the parameters.
    divided = ("compute", "apply") if strategy.base == "mesh" else ("compute",)
    batch_s = workers * sum(spent[kind] for kind in divided)
    rest_s = sum(seconds for kind, seconds in spent.items() if kind not in divided)
    alone_s = batch_s + (spent["apply"] if "apply" not in divided else 0.0)

    def gained(number: int) -> float:
        return alone_s * (1 / (batch_s / (number + 1) + rest_s) - 1 / (batch_s / number + rest_s))

    limit = next((number for number in range(1, MAX_ESTIMATED) if gained(number) < PAYS_FROM), MAX_ESTIMATED)
    return gained(workers), limit


def _died(feed: RunFeed) -> Values:
    found = faults(feed)
    if not found:
        return {"answer": "nothing", "level": "good"}
    back = [
        each for each in found if each["live_after_s"] is not None or each["replaced_after_s"] is not None
    ]
    names = ", ".join(dict.fromkeys(each["process"] for each in found[-3:]))
    if len(back) == len(found):
        return {"answer": f"{names}; {len(found)} in all, all replaced", "level": "fair"}
    return {"answer": f"{names}; {len(found) - len(back)} of {len(found)} not replaced", "level": "bad"}


# ---- workers and servers -------------------------------------------------------------------------------


def workers(feed: RunFeed, *, with_lanes: bool = True) -> Values:
    started = {
        f"worker-{each['rank']}": each
        for each in runs.processes(
            list(feed.events), feed.state, num_workers=_count(feed.config.get("workers"))
        )
    }
    seen = sorted((name for name in feed.activity if name.startswith("worker-")), key=record.by_number)
    names = sorted({*started, *seen}, key=record.by_number)
    end = _end(feed, names)
    totals: dict[str, record.Totals] = {}
    lately = _lately(feed)
    lease = runs.leases([feed.leases]) or feed.summary.get("leases") or {}
    found = []
    for name in names:
        lines, recent = list(feed.activity.get(name, ())), lately.get(name, [])
        seconds, did = sum(map(record.interval_s, recent)), record.totals(recent)
        totals[name] = did
        process = started.get(name, {})
        had = lease.get(name.removeprefix("worker-"))
        found.append(
            {
                "process": name,
                "state": process.get("state", "-"),
                "pid": process.get("pid"),
                "host": process.get("host", lines[-1].get("host") if lines else None),
                "restarts": process.get("restarts", 0),
                "step": lines[-1].get("step") if lines else None,
                "samples_per_s": did.samples / seconds if seconds else None,
                "steps_per_s": did.steps / seconds if seconds else None,
                "shares": _fractions(_grouped(recent), seconds),
                "rss_bytes": lines[-1].get("rss_bytes") if lines else None,
                "cpu": did.cpu_s / seconds if seconds else None,
                "bytes_per_s": (did.sent_bytes + did.received_bytes) / seconds if seconds else None,
                "leases": had if isinstance(had, list) else None,
                "is_straggler": False,
                "lane": _lane(_since(lines, end - LANES_S), end) if with_lanes else [],
            }
        )
    slowness, slow = figures.slowness(totals), figures.stragglers(totals)
    for worker in found:
        if times := slowness.get(worker["process"]):
            worker |= {"slowness": times, "is_straggler": worker["process"] in slow}
    return {
        "workers": found,
        "groups": list(GROUPS),
        "end": end,
        "length_s": LANES_S,
        "straggles": figures.STRAGGLES,
    }


def _lane(lines: list[Values], end: float) -> list[list[float]]:
    """A lane's intervals: [begin, end, then the share of each group of GROUPS]."""
    found = []
    for line in lines:
        length = max(record.interval_s(line), 1e-3)
        shares = _fractions(_grouped([line]), length)
        found.append(
            [
                round(line["at"] - length - end, 2),
                round(line["at"] - end, 2),
                *(shares.get(name, 0.0) for name in GROUPS),
            ]
        )
    return found


def servers(feed: RunFeed) -> Values:
    events = list(feed.events)
    held = {f"server-{each['server']}": each for each in runs.servers(events, feed.state)}
    if not held or feed.state is not runs.RunState.ALIVE:  # an ended run shows what they held last
        held |= {
            name: {**held.get(name, {}), **slots}
            for name, slots in _last_slots(events).items()
            if name not in held or not held[name].get("primary")
        }
    seen = [name for name in feed.activity if name.startswith("server-")]
    names = sorted({*held, *seen}, key=record.by_number)
    end = _end(feed, names)
    staleness: Counter[str] = Counter()
    found, series = [], {}
    for name in names:
        lines = list(feed.activity.get(name, ()))
        recent = _since(lines, end - RECENT_S)
        seconds, newest = sum(map(record.interval_s, recent)), lines[-1] if lines else {}
        did = record.totals(recent)
        for line in lines:
            staleness.update(_counts(line.get("staleness")))
        process = held.get(name, {})
        queued = [line["queue_s"] for line in recent if _is_number(line.get("queue_s"))]
        found.append(
            {
                "process": name,
                "state": process.get("state", "-"),
                "pid": process.get("pid"),
                "host": process.get("host"),
                "restarts": process.get("restarts", 0),
                "primary": process.get("primary", newest.get("slots")),
                "replica": process.get("replica", newest.get("replicas")),
                "filling": process.get("filling", 0),
                "load": _busy(recent) / seconds if seconds else None,
                "queue_s": statistics.fmean(queued) if queued else None,
                "received_per_s": did.received_bytes / seconds if seconds else None,
                "sent_per_s": did.sent_bytes / seconds if seconds else None,
                "rows": {str(k): v for k, v in _counts(newest.get("rows")).items()},
                "rss_bytes": newest.get("rss_bytes"),
            }
        )
        series[name] = _series(lines, end)
    if not staleness:
        staleness.update(_counts(feed.summary.get("staleness")))
    return {
        "servers": found,
        "series": series,
        "staleness": dict(sorted(staleness.items(), key=lambda item: (len(item[0]), item[0]))),
        "row_cache_hit_rate": _row_cache_hit_rate(feed, end),
        "num_slots": sum(each["primary"] or 0 for each in found) or None,
        "replicas": feed.config.get("replicas"),
        "end": end,
    }


def _row_cache_hit_rate(feed: RunFeed, end: float) -> float | None:
    """Share of rows that the workers found in their own caches lately; of the whole run once it has ended."""
    if isinstance(told := feed.summary.get("row_cache"), dict):
        return float(told["hit_rate"])
    cache = Counter[str]()
    for name, lines in feed.activity.items():
        if name.startswith("worker-"):
            for line in _since(lines, end - RECENT_S):
                cache.update(_counts(line.get("cache")))
    looked_up = cache["hits"] + cache["misses"]
    return cache["hits"] / looked_up if looked_up else None


def _last_slots(events: list[Values]) -> dict[str, Values]:
    views = [event.get("servers") for event in events if event.get("event") == "server-view"]
    full = [view for view in views if isinstance(view, dict)]
    return {
        f"server-{number}": {kind: slots.get(kind, 0) for kind in ("primary", "replica", "filling")}
        for number, slots in (full[-1] if full else {}).items()
        if isinstance(slots, dict)
    }


def _series(lines: list[Values], end: float) -> Values:
    found: Values = {"at": [], "queue_ms": [], "bytes_per_s": [], "load": []}
    for line in lines:
        length, moved = max(record.interval_s(line), 1e-3), record.totals([line])
        found["at"].append(round(line["at"] - end, 1))
        queued = line.get("queue_s")
        found["queue_ms"].append(round(queued * 1000, 3) if _is_number(queued) else None)
        found["bytes_per_s"].append(round((moved.received_bytes + moved.sent_bytes) / length))
        found["load"].append(round(_busy([line]) / length, 4))
    return found


# ---- data, events, graph, compare ----------------------------------------------------------------------


def data(feed: RunFeed) -> Values:
    ledger = feed.ledger()
    spans = [span for epoch in ledger.get("epochs", []) for span in epoch["ranges"]]
    sharding = spans[-1]["sharding"] if spans else None
    remainder = ledger.get("remainder") or {}
    return {
        "check": list(runs.ledger_lines(ledger)),
        "epochs": [
            {
                key: epoch[key]
                for key in (
                    "epoch",
                    "trainer",
                    "samples",
                    "trained",
                    "is_over",
                    "is_exact",
                    "left_out",
                    "repeated",
                )
            }
            | {
                "skipped": epoch["skipped"][:200],
                "num_skipped": len(epoch["skipped"]),
                "missing": epoch["missing"][:50],
                "doubled": epoch["doubled"][:50],
                "ranges": epoch["ranges"][-200:],
            }
            for epoch in ledger.get("epochs", [])[-50:]
        ],
        "workers": ledger.get("workers", {}),
        "sharding": sharding,
        "launches": len(ledger.get("launches", [])),
        "holds": remainder.get("by_rank") or {},
        "left": remainder.get("together") or remainder.get("to_hand_out"),
        "skips": [
            event
            for event in feed.events
            if "skip" in str(event.get("event")) or "quarantine" in str(event.get("event"))
        ][-100:],
    }


def events(feed: RunFeed) -> Values:
    return {
        "events": list(feed.events)[-MAX_SHOWN_EVENTS:],
        "num_kept": len(feed.events),
        "faults": faults(feed),
    }


def faults(feed: RunFeed) -> list[Values]:
    """Deaths and the recovery from each: signal, step, time until a replacement started and caught up."""
    found: list[Values] = []
    open_by: dict[str, Values] = {}
    is_leaving = has_failed = False
    for event in feed.events:
        kind, name = str(event.get("event")), _process_of(event)
        if kind in ("job-ended", "coordinator-started"):
            is_leaving = has_failed = False
        elif kind in ("worker-started", "worker-replaced"):
            has_failed = False  # all were started again
        elif kind == "asked-to-leave":
            is_leaving = True
        elif kind == "worker-failed":
            has_failed = True
        if is_leaving or (has_failed and name and not name.startswith("worker-")):
            continue  # sent away: by the user, or because the script had failed
        if kind.endswith("-exited") and name and event.get("code") != 0:
            fault = _fault(feed, event, name, _signal(event.get("code")))
            found.append(fault)
            open_by[name] = fault
        elif kind.endswith("-replaced") and name in open_by:
            open_by[name]["replaced_after_s"] = _passed(event, open_by[name])
        elif kind.endswith("-live") and name in open_by:
            fault = open_by.pop(name)
            fault["live_after_s"] = _passed(event, fault)
        elif kind in ("view-formed", "server-view"):
            for fault in open_by.values():
                if fault["view"] is None and fault["replaced_after_s"] is not None:
                    fault["view"], fault["donor"] = event.get("view"), event.get("donor")
                    is_server = fault["process"].startswith("server-")
                    if is_server and kind == "server-view" and fault["live_after_s"] is None:
                        fault["live_after_s"] = _passed(event, fault)
        elif kind == "host-lost":
            found.append(_fault(feed, event, f"host-{event.get('host')}", event.get("reason")))
    # Servers are killed when the job is over: that is no death.
    over = _end_of_work(feed)
    return [
        fault
        for fault in found
        if over is None
        or fault["at"] is None
        or fault["at"] < over
        or fault["process"].split("-")[0] not in ("server", "coordinator", "aggregator")
    ]


def _end_of_work(feed: RunFeed) -> float | None:
    """When the last worker had left without an error, in an ended run."""
    if feed.state is runs.RunState.ALIVE:
        return None
    left = [
        event["time"]
        for event in feed.events
        if event.get("event") == "worker-exited" and event.get("code") == 0 and _is_number(event.get("time"))
    ]
    return max(left) if left else None


def _fault(feed: RunFeed, event: Values, process: str, signal: str | None) -> Values:
    at = event.get("time") if _is_number(event.get("time")) else None
    return {
        "process": process,
        "at": at,
        "code": event.get("code"),
        "signal": signal,
        "incarnation": event.get("incarnation", 0),
        "step": feed.steps.step_at(at) if at is not None else None,
        **dict.fromkeys(("replaced_after_s", "live_after_s", "view", "donor")),
    }


def _process_of(event: Values) -> str | None:
    role = str(event.get("event")).split("-")[0]
    if role == "worker" and isinstance(event.get("rank"), int):
        return f"worker-{event['rank']}"
    if role == "server" and isinstance(event.get("server"), int):
        return f"server-{event['server']}"
    return "coordinator" if role == "coordinator" else None


def _passed(event: Values, fault: Values) -> float | None:
    at = event.get("time")
    return round(at - fault["at"], 3) if _is_number(at) and _is_number(fault["at"]) else None


def _signal(code: Any) -> str | None:
    if not isinstance(code, int):
        return None
    return signal_name(-code) if code < 0 else f"exit code {code}"


def graph(feed: RunFeed) -> Values:
    exchange = feed.summary.get("exchange")
    noted = [event for event in feed.events if event.get("event") == "exchanged"]
    if not isinstance(exchange, dict):
        exchange = noted[-1] if noted else {}
    return {"graph": feed.graph, "exchange": exchange}


def compare(feeds: Iterable[RunFeed]) -> Values:
    """Several runs over each other; of their settings those that differ."""
    found, settings = [], []
    for feed in feeds:
        found.append(
            {
                "head": head(feed),
                "progress": progress(feed),
                "loss": feed.steps.curve("loss"),
                "rate": feed.steps.rate(),
                "final": _final(feed),
            }
        )
        settings.append(
            {
                key: value
                for key, value in feed.config.items()
                if isinstance(value, (str, int, float, bool, list)) or value is None
            }
        )
    keys = dict.fromkeys(key for each in settings for key in each if key not in ("started", "cwd", "hosts"))
    differing = {
        key: [each.get(key) for each in settings]
        for key in keys
        if len({repr(each.get(key)) for each in settings}) > 1
    }
    return {"runs": found, "differing": differing}


def _final(feed: RunFeed) -> Values:
    """Metrics of the end, or of the newest epoch."""
    final = feed.summary.get("metrics")
    if not isinstance(final, dict):
        final = feed.epochs[-1] if feed.epochs else {}
    return {k: v for k, v in final.items() if _is_number(v) and k not in ("epoch", "step", "time")}


PAGES: dict[str, Callable[[RunFeed], Values]] = {
    "overview": overview,
    "workers": workers,
    "servers": servers,
    "data": data,
    "events": events,
    "graph": graph,
}


# ---- sums over lines of activity -----------------------------------------------------------------------


def _lately(feed: RunFeed) -> dict[str, list[Values]]:
    """The newest lines of each worker; of an ended run how it trained, not how it idled afterwards."""
    found = {}
    for name, lines in feed.activity.items():
        if name.startswith("worker-"):
            worked: Sequence[Values] = lines
            if feed.state is not runs.RunState.ALIVE:
                worked = record.while_training(list(lines))
            found[name] = _since(worked, worked[-1]["at"] - RECENT_S) if worked else []
    return found


def _since(lines: Sequence[Values], at: float) -> list[Values]:
    """The newest lines, from a moment on: looked for from the end, because of thousands a few are wanted at every update."""
    return [*itertools.takewhile(lambda line: line["at"] > at, reversed(lines))][::-1]


def _spent(feed: RunFeed) -> dict[str, float]:
    """Seconds of all workers lately by kind, and those in none."""
    found = dict.fromkeys((*_GROUP_OF, OUTSIDE), 0.0)
    for lines in _lately(feed).values():
        kinds = _kinds(lines)
        found[OUTSIDE] += max(0.0, sum(map(record.interval_s, lines)) - sum(kinds.values()))
        for kind, seconds in kinds.items():
            found[kind] += seconds
    return found


def _kinds(lines: list[Values]) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in lines:
        for kind, seconds in _counts(line.get("seconds")).items():
            if kind in _GROUP_OF:
                found[kind] = found.get(kind, 0.0) + seconds
    return found


def _by_group(kinds: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind, seconds in kinds.items():
        group = _GROUP_OF.get(kind, kind)
        found[group] = found.get(group, 0.0) + seconds
    return found


def _grouped(lines: list[Values]) -> dict[str, float]:
    return _by_group(_kinds(lines))


def _fractions(shares: dict[str, float], seconds: float) -> dict[str, float]:
    whole = max(seconds, sum(shares.values()))
    return {name: round(spent / whole, 4) for name, spent in shares.items()} if whole else {}


def _busy(lines: list[Values]) -> float:
    """Seconds in which a server did something."""
    return sum(seconds for group, seconds in _grouped(lines).items() if group != "waiting")


def _counts(found: Any) -> dict[str, Any]:
    return {str(k): v for k, v in found.items() if _is_number(v)} if isinstance(found, dict) else {}


def _end(feed: RunFeed, names: Iterable[str]) -> float:
    """The right edge of the lanes: now, or when the newest line was written."""
    newest = max((feed.activity[name][-1]["at"] for name in names if feed.activity.get(name)), default=0.0)
    return (
        time.time() if feed.state is runs.RunState.ALIVE and newest and time.time() - newest < 60 else newest
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
