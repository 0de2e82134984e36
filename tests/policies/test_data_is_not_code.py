"""Nothing a job reads as data can execute code: no pickle on the wire or on disk, no eval."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from parsed import Module

PICKLING_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
# torch's collectives of objects send pickles; torch.save writes one.
PICKLING_CALLS = {"torch.load", "torch.save", "torch.jit.load", "torch.package"}
PICKLING_COLLECTIVES = {f"{verb}_object" for verb in ("all_gather", "gather")} | {
    f"{verb}_object_list" for verb in ("broadcast", "scatter", "send", "recv")
}
EXECUTING_CALLS = {"eval", "exec", "__import__"}


def test_no_source_file_reads_data_that_could_run(modules: list[Module]) -> None:
    wrong = [f"{module.where}:{line} {what}" for module in modules for what, line in _executing(module.tree)]
    assert not wrong, (
        "nothing a job reads as data, from network or disk, can execute code. Use safetensors for tensors, JSON for "
        "manifests and msgspec for messages instead of:\n" + "\n".join(wrong)
    )


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import multiprocessing.reduction, dill",
        "state = torch.load('x')",
        "state = torch.load('x', weights_only=False)",
        "state = torch.load('x', weights_only=flag)",
        "torch.save(state, 'x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "eval('1')",
        "exec(code)",
        "dist.all_gather_object(out, thing)",
        "dist.broadcast_object_list([thing])",
    ],
)
def test_each_way_of_running_data_is_seen(line: str) -> None:
    assert list(_executing(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "model.eval()",
        "compile(model)",
        "safetensors.torch.load_file('x')",
        "json.load(file)",
        "torch.load('x', weights_only=True)",
    ],
)
def test_harmless_lines_are_left_alone(line: str) -> None:
    assert not list(_executing(ast.parse(line)))


def _executing(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found = [name.name for name in names if name.name.split(".")[0] in PICKLING_MODULES]
                yield from ((f"import {name}", node.lineno) for name in found)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLING_MODULES:
                yield f"from {module} import", node.lineno
            case ast.Call(func=func, keywords=keywords):
                called = ast.unparse(func)
                by_name = called in PICKLING_CALLS or called in EXECUTING_CALLS
                # torch's own reader of weights alone, for .pth files that people bring: it builds tensors and calls nothing.
                if called == "torch.load" and any(
                    ast.unparse(key) == "weights_only=True" for key in keywords
                ):
                    by_name = False
                if by_name or called.rpartition(".")[2] in PICKLING_COLLECTIVES:
                    yield f"{called}(...)", node.lineno
                if any(key.arg == "allow_pickle" and ast.unparse(key.value) != "False" for key in keywords):
                    yield f"{called}(allow_pickle=...)", node.lineno
