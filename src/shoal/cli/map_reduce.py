"""`shoal map-reduce`: programs that read and print lines, over files, as under Hadoop Streaming."""

from __future__ import annotations

import signal
import time
from typing import Annotated, NoReturn

import typer

from shoal.cli.verb import console

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal map-reduce --mapper ./words.py --reducer ./count.py books/ counts\n"
    "  shoal map-reduce --mapper ./words.py --reducer ./count.py --reducers 4 -n 8 's3://bucket/books/*.txt.gz' counts\n"
    "  shoal map-reduce --on spark --mapper 'python words.py' --reducer 'python count.py' books/ counts"
)


def map_reduce(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT... OUTPUT",
            help="Files, folders, patterns or URLs; last the folder of the result, which must not exist.",
        ),
    ],
    mapper: Annotated[
        str,
        typer.Option(
            "--mapper", metavar="COMMAND", help="Reads lines of the input, prints key<TAB>value lines."
        ),
    ],
    reducer: Annotated[
        str,
        typer.Option(
            "--reducer",
            metavar="COMMAND",
            help="Reads those lines in order of their keys, prints the result; without one the mapper's lines are the result.",
        ),
    ] = "",
    combiner: Annotated[
        str, typer.Option("--combiner", metavar="COMMAND", help="Reduces the lines of one map task first.")
    ] = "",
    reducers: Annotated[int, typer.Option("--reducers", min=1, help="Parts of the result.")] = 1,
    workers: Annotated[
        int, typer.Option("-n", "--workers", min=0, help="Tasks at a time; 0: one for each core.")
    ] = 0,
    max_attempts: Annotated[
        int, typer.Option("--max-attempts", min=1, help="Of a task, before it fails the whole.")
    ] = 4,
    on: Annotated[
        str, typer.Option("--on", metavar="ENGINE", help="Run the tasks on ray or spark instead of here.")
    ] = "",
) -> None:
    """Run a mapper and a reducer over the lines of files, by Hadoop Streaming's contract."""
    from shoal.cluster.launch.threads import available_cores
    from shoal.data.mapreduce.streaming import StreamingConfig, map_reduce_lines
    from shoal.errors import ConfigError

    if len(paths) < 2:
        raise ConfigError(
            "map-reduce needs an input and an output. Nothing was started; add the folder of the result."
        )
    *inputs, output = paths
    config = StreamingConfig(
        mapper=mapper, reducer=reducer, combiner=combiner, num_reducers=reducers, max_attempts=max_attempts
    )
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, _stop)  # as by Ctrl-C: nothing is left behind
    try:
        num_maps = map_reduce_lines(config, inputs, output, on=on, workers=workers or available_cores())
    except KeyboardInterrupt as error:
        signum = signal.Signals(error.args[0] if error.args else signal.SIGINT)
        typer.echo(f"stopped by {signum.name}; no output was written.", err=True)
        raise typer.Exit(128 + signum) from None
    parts = reducers if reducer else num_maps
    console().print(
        f"{output}: {parts} part{'s' if parts > 1 else ''} from {num_maps} map task{'s' if num_maps > 1 else ''}, "
        f"{time.monotonic() - begun:.1f} s"
    )


def _stop(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt(signum)
