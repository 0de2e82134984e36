"""`shoal init`: a training script and a file of options to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.verb import fail
from shoal.errors import ConfigError

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal init                  train.py and run.toml, here\n"
    "  shoal init click            in a new folder\n"
    "  cd click && shoal run --config run.toml"
)

SCRIPT = '''"""Training with shoal. `python train.py` runs it in one process, `shoal run --config run.toml` in several."""

import argparse

import torch
from torch import nn

import shoal

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--epochs", type=int, default=3)
options = parser.parse_args()

torch.manual_seed(0)  # every worker builds the same model and the same data
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
x = torch.randn(10_000, 20)
y = (x.sum(1) > 0).long()
train, test = shoal.Dataset.from_arrays((x, y)).split(0.9, 0.1, seed=0)

trainer = shoal.Trainer(
    model,
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.AdamW(params, lr=options.lr),
    metrics=["accuracy"],
)
# 256 is the batch of one update, however many workers share it.
trainer.fit(train.shuffle(seed=0).batch(256), epochs=options.epochs, validation_data=test.batch(1024))
trainer.save("out/model")
'''

OPTIONS = """# Options of `shoal run`, as in `shoal run --help`, without the dashes. The command line beats them.

script = "train.py"
args = ["--lr", "0.001"]

workers = 2
# strategy = "ps"        # ddp, fsdp, tp, pp, dp=2,tp=2, ps, ps:async, ...
# servers = 1            # for ps
# name = "first"         # the run's directory: runs/first

# What each process asks of an engine (on = "ray", "slurm", ...):
# [resources]
# worker = { cpus = 2, memory = 4, gpus = 0 }
# server = { cpus = 1 }
"""


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Where to write them; made if it is not there.")
    ] = Path(),
) -> None:
    """Write a training script and a file of options to start from. Never replaces a file."""
    files = {folder / "train.py": SCRIPT, folder / "run.toml": OPTIONS}
    for file in files:
        if file.exists():
            fail(
                ConfigError(f"{file} exists. Nothing was written; name another folder: `shoal init FOLDER`.")
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            with file.open("x") as opened:
                opened.write(text)
    except OSError as error:
        fail(ConfigError(f"{error.filename or folder} cannot be written: {error.strerror or error}."))
    there = "" if folder == Path() else f"cd {folder} && "
    typer.echo(
        f"wrote {' and '.join(str(file) for file in files)}; start it with: {there}shoal run --config run.toml"
    )
