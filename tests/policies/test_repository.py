"""Files a fresh clone relies on: pinned dependencies, a README that draws the real tree, no path of anybody's machine."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

TRACKED = ("src", "tests", "examples", "benchmarks", "docs", ".ci")
TEXT = {".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".yml", ".yaml", ".sh", ".cfg", ""}
# What torch's own wheel pins for a GPU; never part of the CPU environment the constraints describe.
BROUGHT_BY_TORCH = ("nvidia-", "triton", "cuda-")


MAX_WALK_FILES = {
    "One step under ddp": 15,
    "One batch from Parquet": 15,
    "One step under ps": 22,
    "A worker is killed": 15,
}


def test_walks_of_the_architecture_page_name_few_files_and_all_exist(root: Path) -> None:
    page = (root / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", page))
    missing = [
        name for name in named if not (root / "src/shoal" / name).exists() and not (root / name).exists()
    ]
    assert not missing, f"docs/architecture.md names files that are not there: {sorted(missing)}"
    for title, most in MAX_WALK_FILES.items():
        walk = page.split(f"## {title}\n")[1].split("\n## ")[0]
        steps = " ".join(re.findall(r"(?ms)^\d\. .*?(?=^\d\. |\n\n|\Z)", walk))
        files = set(re.findall(r"`([a-z_/]+\.py)`", steps))
        assert files, f"the walk '{title}' has no numbered steps"
        assert len(files) <= most, (
            f"'{title}' takes {len(files)} files, at most {most} are wanted: {sorted(files)}"
        )


def test_every_dependency_is_pinned_within_its_range(root: Path) -> None:
    pins = _pins(root)
    for wanted in _requirements(root):
        name = canonicalize_name(wanted.name)
        assert name in pins, (
            f"{wanted} of pyproject.toml is not pinned in constraints.txt: add `{name}==<tested version>`."
        )
        assert pins[name] in wanted.specifier, (
            f"constraints.txt pins {name}=={pins[name]}, but pyproject.toml wants {wanted}."
        )


def test_what_dependencies_bring_along_is_pinned_too(root: Path) -> None:
    pins = _pins(root)
    missing, seen, waiting = set(), set(), _requirements(root)
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name in seen or name.startswith(BROUGHT_BY_TORCH):
            continue
        seen.add(name)
        if name not in pins:
            missing.add(name)
        try:
            brought = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # a build requirement: pip keeps those in an environment of their own
        waiting += [
            one
            for one in map(Requirement, brought)
            if one.marker is None or one.marker.evaluate({"extra": ""})
        ]
    assert len(seen) > 20, f"only {len(seen)} packages were looked at: is the environment installed?"
    assert not missing, (
        f"constraints.txt does not pin {sorted(missing)}: a fresh clone could get versions nobody tested."
    )


def test_torch_stays_at_the_version_that_was_tested(root: Path) -> None:
    assert _pins(root).get("torch") == Version("2.13.0"), "constraints.txt must hold `torch==2.13.0`."


def test_the_readme_draws_the_real_folders(root: Path) -> None:
    blocks = re.findall(
        r"^```[^\n]*\n(.*?)^```", (root / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    tree = next((block for block in blocks if block.startswith("src/shoal/")), None)
    assert tree is not None, (
        "README.md needs a fenced block that begins with `src/shoal/`: a line per folder."
    )
    drawn = {
        found[1] for line in tree.splitlines()[1:] if (found := re.match(r"[\s│├└─]*([\w./-]+)/(\s|$)", line))
    }
    real = {path.name for path in (root / "src/shoal").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    beside = {name for name in drawn if (root / name).is_dir()}
    assert drawn - beside == real, (
        f"the tree in README.md is out of date: it draws {sorted(drawn - beside - real)} which are not there and lacks "
        f"{sorted(real - drawn)}. A line per folder of src/shoal: `  name/   what it is for`."
    )


def test_the_architecture_page_names_files_that_exist(root: Path) -> None:
    text = (root / "docs/architecture.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]*(?:\.py)?)`", text))
    assert len(named) > 40, "the walks of docs/architecture.md name their files in backticks: `train/loop.py`"
    missing = sorted(
        path for path in named if not any((base / path).exists() for base in (root / "src/shoal", root))
    )
    assert not missing, f"docs/architecture.md names files that are not there: {missing}"


def test_no_path_of_a_machine_is_written_down(root: Path) -> None:
    personal = re.compile(
        "|".join([r"/(?:home|Users)/(?!me\b|you\b)\w", re.escape(f"{root}/"), re.escape(f"{Path.home()}/")])
    )
    files = [path for path in root.iterdir() if path.is_file()]
    files += [path for folder in TRACKED for path in (root / folder).rglob("*") if path.is_file()]
    texts = [path for path in files if path.suffix in TEXT and "__pycache__" not in path.parts]
    found = [
        f"{path.relative_to(root)}:{number} {line.strip()[:100]}"
        for path in sorted(texts)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if personal.search(line)
    ]
    assert not found, (
        "a path of one machine means nothing on another; write it relative to the repository:\n"
        + "\n".join(found)
    )


def _requirements(root: Path) -> list[Requirement]:
    project = tomllib.loads((root / "pyproject.toml").read_text())
    groups = [
        project["build-system"]["requires"],
        project["project"]["dependencies"],
        *project["project"]["optional-dependencies"].values(),
    ]
    return [Requirement(line) for group in groups for line in group]


def _pins(root: Path) -> dict[str, Version]:
    lines = [line.split("#")[0].strip() for line in (root / "constraints.txt").read_text().splitlines()]
    pins = {}
    for line in filter(None, lines):
        name, equals, version = line.partition("==")
        assert equals, f"constraints.txt pins exactly, with `==`: {line!r}"
        pins[canonicalize_name(name)] = Version(version)
    return pins


def test_no_two_test_files_have_one_name(root: Path) -> None:
    """Without packages pytest imports a test file by its name alone, and refuses the second."""
    names = [path.name for path in (root / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
