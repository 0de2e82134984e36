"""shoal against its peers, round by round in one run: `make bench-peers`, or `python -m benchmarks peers`.

Every round runs every side once, each in processes of its own, one after the
other, in turned order every second round. A figure is the median over the
rounds of shoal's rate divided by the peer's, with its spread; rates alone say
little on a machine that others use too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.click_model import DESCRIPTION, write_data
from benchmarks.harness import Report
from benchmarks.peers.environments import NOT_BY_PIP, Skipped, environment
from benchmarks.peers.sides import AIMS, PEERS, Peer, Timing, run_peer, run_shoal

Side = tuple[str, str]
"""(`shoal STRATEGY` or a peer's key, model): a strategy and a peer may have the same name."""

WIDE = {"model": "MLP of 2 M parameters, 512-1024-1024-512-10", "optimizer": "SGD, momentum 0.9"}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="measured in each run, after the warm-up")
    parser.add_argument("--warm", type=float, default=3.0, help="seconds of warm-up in each run")
    parser.add_argument("--strategy", action="append", help="of shoal; default: ps:async and ps")
    parser.add_argument("--peer", action="append", help=f"only these: {', '.join(p.key for p in PEERS)}")
    parser.add_argument("--busy", action="store_true", help="keep the figures of a busy machine too")
    parser.add_argument("--no-save", action="store_true", help="leave benchmarks/results as it is")
    options = parser.parse_args(arguments)
    known = {peer.key for peer in PEERS}
    if unknown := set(options.peer or ()) - known:
        parser.error(f"no peer {sorted(unknown)}; there are: {', '.join(sorted(known))}")
    peers = [peer for peer in PEERS if not options.peer or peer.key in options.peer]
    save = not options.no_save and (options.busy or _is_quiet())
    strategies = options.strategy or ["ps:async", "ps"]
    skipped = {} if options.peer else {name: Skipped(why) for name, why in NOT_BY_PIP.items()}

    interpreters: dict[str | None, Path | Skipped] = {None: Path(sys.executable)}
    for name in dict.fromkeys(peer.environment for peer in peers):
        if name is not None:
            interpreters[name] = environment(name)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        write_data(data)
        timing = Timing(options.warm, options.seconds)
        runs: dict[Side, Callable[[], dict[str, Any] | Skipped]] = {}
        for model in dict.fromkeys(peer.model for peer in peers):
            for strategy in strategies:
                runs[f"shoal {strategy}", model] = lambda s=strategy, m=model: run_shoal(s, m, data, timing)
            for peer in (peer for peer in peers if peer.model == model):
                python = interpreters[peer.environment]
                if isinstance(python, Skipped):
                    skipped[peer.name] = python
                else:
                    runs[peer.key, model] = lambda p=peer, i=python: run_peer(p, i, data, timing)
        found = _alternate(runs, options.rounds, skipped)
    _tell(found, peers, strategies, skipped, timing, save=save)


def _is_quiet() -> bool:
    """Whether others leave the machine alone, asked before anything is run.

    Two threads of OpenMP beside other work wait for each other for whole time
    slices: TorchRec with 2 threads was seen 20 times slower at a load of 7, shoal
    and TensorFlow about 2 times. Ratios of such a run flatter shoal.
    """
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load <= cores / 4:
        return True
    print(
        f"The load is {load:.1f} on {cores} cores before anything was started: ratios would favour shoal. They are "
        "printed but not kept; run it again on a quiet machine, or with --busy to keep them all the same.",
        file=sys.stderr,
    )
    return False


def _alternate(
    runs: dict[Side, Callable[[], dict[str, Any] | Skipped]], rounds: int, skipped: dict[str, Skipped]
) -> dict[Side, list[dict[str, Any]]]:
    """What every side told in every round; a side that fails once is left out, with its reason."""
    found: dict[Side, list[dict[str, Any]]] = {side: [] for side in runs}
    for number in range(rounds):
        order = list(found)
        for side in reversed(order) if number % 2 else order:
            told = runs[side]()
            if isinstance(told, Skipped):
                skipped[" / ".join(side)] = told
                del found[side]
                print(f"{side[0]}: left out, {told.reason}", file=sys.stderr, flush=True)
            else:
                found[side].append({**told, "load": round(os.getloadavg()[0], 1)})
                rate = f"{told['samples_per_s']:,.0f} samples/s"
                print(f"round {number + 1}, {side[1]}, {side[0]}: {rate}", file=sys.stderr, flush=True)
    return found


def _tell(
    found: dict[Side, list[dict[str, Any]]],
    peers: list[Peer],
    strategies: list[str],
    skipped: dict[str, Skipped],
    timing: Timing,
    *,
    save: bool,
) -> None:
    report = Report("peers")
    about = {"cores": len(os.sched_getaffinity(0)), "warm_s": timing.warm_s, "seconds": timing.seconds}
    rows = []
    for peer in peers:
        theirs = found.get((peer.key, peer.model), [])
        if not theirs:
            continue
        cells = [f"{peer.name} ({peer.model})", _rate(theirs)]
        for strategy in strategies:
            ours = found.get((f"shoal {strategy}", peer.model), [])
            if not ours:
                cells.append("-")
                continue
            values = compare([each["samples_per_s"] for each in ours], [e["samples_per_s"] for e in theirs])
            aim = AIMS.get((strategy, peer.key))
            report.add(
                f"{peer.model} model: shoal {strategy} / {peer.name}",
                values,
                **(DESCRIPTION if peer.model == "click" else WIDE),
                ours=ours[-1]["configuration"],
                theirs=theirs[-1]["configuration"],
                load=[min(e["load"] for e in ours + theirs), max(e["load"] for e in ours + theirs)],
                **about,
                aim=f"ratio >= {aim}" if aim else None,
            )
            low, high = values["ratio_spread"]
            wanted = f", aim {aim:g}" if aim else ""
            cells.append(f"{values['ratio']:.2f} ({low:.2f} to {high:.2f}{wanted})")
        rows.append(cells)
    for name, why in skipped.items():
        report.add(f"{name}: not measured", {"reason": why.reason})
    ours_rates = [
        f"{strategy} ({model}): {_rate(found[f'shoal {strategy}', model])}"
        for strategy in strategies
        for model in ("click", "wide")
        if found.get((f"shoal {strategy}", model))
    ]
    _table(["peer", "samples/s", *(f"shoal {strategy} / peer" for strategy in strategies)], rows)
    print(f"\nshoal, 2 workers, samples/s: {'; '.join(ours_rates) or 'nothing measured'}")
    for name, why in skipped.items():
        print(f"not measured: {name}: {why.reason}")
    print(f"measured {time.strftime('%Y-%m-%d')}; only the ratios count")
    if save:
        report.save()


def compare(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """The figure of some rounds: how many times the peer's rate ours is, and both medians."""
    ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
    quarter = len(ratios) // 4
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_spread": [round(ratios[quarter], 4), round(ratios[-1 - quarter], 4)],
        "ours_samples_per_s": round(statistics.median(ours)),
        "theirs_samples_per_s": round(statistics.median(theirs)),
        "rounds": len(ratios),
    }


def _rate(told: list[dict[str, Any]]) -> str:
    return f"{statistics.median(each['samples_per_s'] for each in told):,.0f}"


def _table(header: list[str], rows: list[list[str]]) -> None:
    print("\n| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for cells in rows:
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
