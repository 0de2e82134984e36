"""Notes on Python's own errors from calls of shoal: the name that another library has for it, and ours."""

from __future__ import annotations

import inspect
import re
import sys
from difflib import get_close_matches
from types import ModuleType

from shoal.config import job as jobs

_UNKNOWN_ARGUMENT = re.compile(r"^(\w+)\.(\w+)\(\) got an unexpected keyword argument '(\w+)'")
_UNKNOWN_IMPORT = re.compile(r"^cannot import name '(\w+)' from '(shoal[.\w]*)' ")
_WRONG_SETUP = re.compile(r"^setup\(\) (takes 3 positional arguments but|got an unexpected keyword argument)")

_ARGUMENTS = {
    "learning_rate": "lr",
    "criterion": "loss",
    "loss_fn": "loss",
    "callback": "callbacks",
    "max_epochs": "epochs",
    "nb_epoch": "epochs",
    "num_train_epochs": "epochs",
    "train_dataset": "data",
    "train_dataloader": "data",
    "train_dataloaders": "data",
    "eval_dataset": "validation_data",
    "val_dataloaders": "validation_data",
    "compute_metrics": "metrics",
    "gradient_clip_val": "clip_norm",
    "max_grad_norm": "clip_norm",
    "accumulate_grad_batches": "accumulate",
    "gradient_accumulation_steps": "accumulate",
    "lr_scheduler": "scheduler",
    "hparams": "params",
    "resume_from_checkpoint": "resume",
    "ckpt_path": "resume",
    "verbose": "progress",
    "train_op": "optimizer",
    "monitor": "best",
    "save_top_k": "keep_last",
    "save_total_limit": "keep_last",
    "dirpath": "directory",
    "filepath": "directory",
    "every_n_epochs": "every_epochs",
    "every_n_train_steps": "every_steps",
}
"""Arguments of other libraries, and ours."""

_AT_LAUNCH = "that is chosen at launch: shoal run {} train.py"
_ADVICE = {
    **dict.fromkeys(
        ("devices", "gpus", "num_processes", "num_gpus", "num_workers", "world_size"),
        _AT_LAUNCH.format("-n 4"),
    ),
    "accelerator": _AT_LAUNCH.format("--device cuda"),
    "num_nodes": _AT_LAUNCH.format("--hosts 2"),
    "args": "settings are arguments of Trainer (lr, precision, clip_norm) and of fit (epochs, max_steps)",
    "validation_split": "train, test = dataset.split(0.9, 0.1), and validation_data=test.batch(256)",
}
"""Arguments of other libraries that are no argument here."""

_NAMES = {
    "shoal": {
        **dict.fromkeys(
            ("init", "init_process_group", "shutdown", "destroy_process_group"),
            "leave it out: `shoal run` sets the workers up before the script begins, and ends them after it",
        ),
        **dict.fromkeys(("size", "world_size", "get_world_size"), "did you mean shoal.num_workers()?"),
        **dict.fromkeys(("get_rank", "local_rank"), "did you mean shoal.rank()?"),
        **dict.fromkeys(
            (
                "Accelerator",
                "DistributedDataParallel",
                "DistributedOptimizer",
                "broadcast_optimizer_state",
                "broadcast_parameters",
                "distributed_model",
                "distributed_optimizer",
                "fleet",
                "prepare",
            ),
            "a loop of your own takes one call: model, optimizer, data = shoal.setup(model, optimizer, data)",
        ),
        "elastic": "leave it out: a dead worker is replaced, and `shoal scale` changes the number of workers",
        "distribute": "a strategy is chosen at launch: shoal run --strategy ddp train.py",
        **dict.fromkeys(("kv", "kvstore"), "did you mean shoal.ps.connect()?"),
        "allreduce": "did you mean shoal.reduce(x), a sum over the workers, or shoal.collectives.all_reduce?",
        "LightningModule": "a plain nn.Module does: shoal.Trainer(model, loss=..., optimizer=...)",
        "TrainingArguments": _ADVICE["args"],
    },
    "shoal.keras": {"Sequential": "models are built with keras; shoal.keras has distribute(model)"},
    "shoal.estimator": dict.fromkeys(
        ("DNNClassifier", "DNNRegressor", "LinearClassifier", "LinearRegressor", "BoostedTreesClassifier"),
        "shoal.estimator has no ready-made models: give Estimator a model_fn that returns an EstimatorSpec",
    ),
    "Trainer": {
        "train": "did you mean trainer.fit(data, epochs=...)?",
        **dict.fromkeys(("test", "validate"), "did you mean trainer.evaluate(data)?"),
        "compile": "loss=, optimizer= and metrics= are arguments of shoal.Trainer(model, ...)",
        **dict.fromkeys(("save_model", "save_weights"), "did you mean trainer.save(path)?"),
        **dict.fromkeys(("load_from_checkpoint", "load_weights"), "did you mean trainer.load(path)?"),
        "state_dict": "did you mean trainer.model.state_dict(), or trainer.save(path) under any strategy?",
        "load_state_dict": "did you mean trainer.load(state_dict)?",
    },
    "Dataset": {
        **dict.fromkeys(
            ("from_tensor_slices", "from_tensors", "from_numpy"),
            "did you mean shoal.Dataset.from_arrays((x, y))?",
        ),
        **dict.fromkeys(
            ("from_pandas", "from_dataframe"), "a DataFrame is taken as it is: trainer.fit(frame, y)"
        ),
    },
    "Batches": dict.fromkeys(
        ("shuffle", "split", "take", "filter", "repeat", "skip"),
        "it comes before batch: data.shuffle(seed=0).batch(32)",
    ),
    "Kv": {
        **dict.fromkeys(("init", "create"), 'a table is declared first: kv.table("weights", dim=8)'),
        "set_optimizer": 'the servers update a table by its rule: kv.table("weights", dim=8, rule="adagrad", lr=0.1)',
        "row_sparse_pull": 'did you mean kv.pull("weights", ids)?',
    },
}
"""By module or class of shoal: what a name of other libraries is here."""

_SETUP = (
    "shoal.setup takes a model, its optimizer and its data, and returns these three. A scheduler stays the script's own: build it on "
    "the optimizer and call scheduler.step() as before. For other data call shoal.setup(model, optimizer, other_data) again."
)

_WITH_MORE_NAMES = ("callbacks", "collectives", "estimator", "nn", "data")


def hint_for(error: BaseException) -> str | None:
    """What to write instead, where Python's error says too little to somebody who is new to shoal."""
    said = str(error)
    if isinstance(error, TypeError) and (argument := _UNKNOWN_ARGUMENT.search(said)):
        return _of_argument(*argument.groups())
    if isinstance(error, TypeError) and said.startswith("Dataset.from_arrays() takes 2 positional"):
        return "did you mean shoal.Dataset.from_arrays((x, y)), with a tuple?"
    if isinstance(error, TypeError) and _WRONG_SETUP.search(said) and _calls_our_setup(error):
        return _SETUP
    if isinstance(error, ImportError) and (name := _UNKNOWN_IMPORT.search(said)):
        return _of_name(sys.modules.get(name[2]), name[1])
    if isinstance(error, AttributeError) and error.name is not None:
        return _of_name(error.obj, error.name)
    if not jobs.has_several_workers() or sys.stdin is None or sys.stdin.isatty():
        return None
    if isinstance(error, EOFError) and "when reading a line" in said:
        return (
            "several workers have no standard input: give the value as an argument of the script, or use -n 1"
        )
    if type(error).__name__ == "BdbQuit":
        return "breakpoint() of several workers has no terminal: use --debug-rank 0, or -n 1"
    return None


def _calls_our_setup(error: BaseException) -> bool:
    """Whether the frame that called `setup`, a name that others use too, means shoal's."""
    stack = error.__traceback__
    while stack is not None and stack.tb_next is not None:
        stack = stack.tb_next
    if stack is None:
        return False
    names, shoal = {**stack.tb_frame.f_globals, **stack.tb_frame.f_locals}, sys.modules["shoal"]
    if "setup" in names:
        return names["setup"] is vars(shoal).get("setup")
    having = [each for each in names.values() if isinstance(each, ModuleType) and "setup" in vars(each)]
    return bool(having) and all(each is shoal for each in having)


def _of_argument(owner: str, method: str, given: str) -> str | None:
    loaded = [sys.modules.get(name) for name in ("shoal", "shoal.callbacks", "shoal.estimator")]
    kind = next((getattr(module, owner) for module in loaded if hasattr(module, owner)), None)
    if kind is None:
        return None
    called = getattr(kind, method)
    known, meant = _parameters(called), _ARGUMENTS.get(given, given)
    shown = _shown(owner, method)
    hint = f"{shown} takes {', '.join(known)}"
    if given in _ADVICE and given not in known:
        return f"{_ADVICE[given]}. {hint}"
    others = [
        name for name, each in vars(kind).items() if inspect.isfunction(each) and meant in _parameters(each)
    ]
    if meant not in known and others:
        return f"did you mean {meant}= of {_shown(owner, others[0])}? {hint}"
    close = get_close_matches(meant, known, n=1)
    return f"did you mean {close[0]}=? {hint}" if close else hint


def _parameters(function: object) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]  # type: ignore[arg-type]


def _shown(owner: str, method: str) -> str:
    return owner if method == "__init__" else f"{owner}.{method}"


def _of_name(owner: object, given: str) -> str | None:
    if isinstance(owner, ModuleType):
        known = _NAMES.get(owner.__name__, {})
    else:
        kind = owner if isinstance(owner, type) else type(owner)
        known = _NAMES.get(kind.__name__, {}) if kind.__module__.startswith("shoal.") else {}
    if given in known:
        return known[given]
    if not isinstance(owner, ModuleType) or owner.__name__.partition(".")[0] != "shoal":
        return None
    shoal = sys.modules["shoal"]
    if owner is shoal:
        for module in _WITH_MORE_NAMES:
            if given in dir(getattr(shoal, module)):
                return f"did you mean shoal.{module}.{given}?"
    close = get_close_matches(given, dir(owner), n=1)
    return f"did you mean {owner.__name__}.{close[0]}?" if close else None
