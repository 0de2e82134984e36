"""Driver of map_reduce on an engine, in a session of its own: the bytes of local processes, a task killed, refusals.

aggregate_driver.py ray:ADDRESS | spark
"""

import os
import signal
import sys
import threading
from pathlib import Path

import shoal


def words(sample):
    return ((word, 1) for word in sample["text"].split())


def add(word, counts):
    return sum(counts)


def killed_once(sample):
    if sample["number"] == 700 and not (flag := Path(FOLDER, "killed")).exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return words(sample)


def misspelt(sample):
    return sample["txet"]


def files(aggregate):
    return [path.read_bytes() for path in sorted(aggregate.directory.glob("part-*"))]


def refused(call):
    try:
        call()
    except shoal.ShoalError as error:
        print("refused:", error)
    else:
        raise SystemExit("it was not refused")


FOLDER = os.getcwd()

if __name__ == "__main__":
    on = sys.argv[1]
    name, _, address = on.partition(":")
    if name == "ray":
        import ray

        ray.init(address=address, log_to_driver=False)
    else:
        from pyspark import SparkContext

        os.environ["PYSPARK_PYTHON"] = sys.executable
        spark = SparkContext("local[2,4]")
    lines = [f'{{"number": {i}, "text": "w{i % 7} w{i % 31} the"}}\n' for i in range(1500)]
    Path("lines.jsonl").write_text("".join(lines))
    data = shoal.Dataset.from_jsonl("lines.jsonl")  # tasks find it from any directory
    here = data.map_reduce(words, add, partitions=3, workers=2, directory="here")
    there = data.map_reduce(words, add, partitions=3, on=on, directory="there")
    assert not here.was_reused
    assert not there.was_reused
    assert files(here) == files(there)
    assert there["the"] == 1500
    assert data.map_reduce(words, add, partitions=3, on=on, directory="there").was_reused

    survived = data.map_reduce(killed_once, add, partitions=3, on=on, directory="there")
    assert Path("killed").exists()
    assert files(survived) == files(here)
    print("equal to the byte")

    refused(lambda: data.map_reduce(misspelt, add, on=on, directory="there"))
    lock = threading.Lock()
    refused(
        lambda: data.map_reduce(lambda sample: [(str(lock), 1)], add, on=on, key="lock", directory="there")
    )
    assert not [path for path in Path("there").glob("*/*") if path.is_dir() and path.name != "claims"]
    refused(lambda: data.map_reduce(words, add, on="mpi"))
    if name == "ray":
        refused(lambda: data.map_reduce(words, add, on=on))
        assert ray.is_initialized()
    else:
        assert dict(data.map_reduce(words, add, on=on)) == dict(here)
        assert spark.parallelize([1, 2]).sum() == 3
    print("nothing left behind, and the session is there")
