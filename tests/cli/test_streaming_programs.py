"""Programs of Hadoop Streaming as its users try them, in a pipe of a shell, and under `shoal map-reduce`: the same bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MAPPER = """#!/usr/bin/env python3
import sys
for line in sys.stdin:
    for word in line.split():
        print(f"{word}\\t{len(word)}")
"""

REDUCER = """#!/usr/bin/env python3
import sys
from itertools import groupby
pairs = (line.rstrip("\\n").split("\\t") for line in sys.stdin)
for word, group in groupby(pairs, key=lambda pair: pair[0]):
    lengths = [int(length) for _, length in group]
    print(f"{word}\\t{len(lengths)}\\t{sum(lengths)}")
"""

TEXTS = {
    "one.txt": "the sea, the Sea\n\n  to be or not\tto be\nübermut über the-sea\n",
    "two.txt": "Be not afraid of the sea",  # no end of line
}


@pytest.mark.parametrize("num_reducers", [1, 3])
def test_programs_give_what_they_give_in_a_pipe_of_the_shell(tmp_path: Path, num_reducers: int) -> None:
    for name, text in (("m.py", MAPPER), ("r.py", REDUCER)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "in").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "in" / name).write_text(text)
    pipe = "cat in/* | ./m.py | LC_ALL=C sort | ./r.py"
    piped = subprocess.run(["sh", "-c", pipe], cwd=tmp_path, capture_output=True, check=True).stdout
    assert b"the\t3\t9\n" in piped
    job = ["map-reduce", "--mapper", "./m.py", "--reducer", "./r.py", "--reducers", str(num_reducers)]
    subprocess.run([sys.executable, "-m", "shoal", *job, "in/", "out"], cwd=tmp_path, check=True)
    parts = [path.read_bytes() for path in sorted((tmp_path / "out").glob("part-*"))]
    assert len(parts) == num_reducers
    assert b"".join(sorted(b"".join(parts).splitlines(keepends=True))) == piped
    assert num_reducers > 1 or parts == [piped]
