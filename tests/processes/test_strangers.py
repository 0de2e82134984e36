"""Processes that are no rank of a job connect to the ports of its groups: of another user, and of the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launched

from shoal.errors import StrangerInGroup

Launch = Callable[..., Launched]

OTHER_USER = 65534

SCRIPT = """
import os, pathlib, re, socket, sys
import psutil, torch, shoal
from torch import nn
from shoal.recovery import rendezvous as store

out, attacked, num_attacks, uid = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
held = []  # ends of pipes: a stranger lives until its worker's is closed

def listeners():
    found = psutil.Process().net_connections("inet")
    return [tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN]

def as_stranger(act):
    done, tell = os.pipe()
    stay, leave = os.pipe()
    pid = os.fork()
    if pid == 0:
        for fd in range(3, 1024):
            if fd not in (tell, stay):
                try:
                    os.close(fd)
                except OSError:
                    pass
        if uid:
            os.setgroups([])
            os.setresuid(uid, uid, uid)
        kept = act()
        os.write(tell, b"%d" % len(kept))
        os.close(tell)
        os.read(stay, 1)
        os._exit(0)
    os.close(tell)
    os.close(stay)
    held.append(leave)
    told = os.read(done, 100)
    os.close(done)
    return int(told)

def take_places(addresses):
    kept = []
    for address in addresses:
        for sequence in range(3):
            sock = socket.socket()
            sock.connect(address)
            sock.sendall(sequence.to_bytes(8, sys.byteorder))
            kept.append(sock)
    return kept

def knock(addresses):
    kept = []
    for address in addresses:
        sock = socket.socket()
        sock.settimeout(0.3)
        try:
            sock.connect(address)
            kept.append(sock)
        except OSError:
            pass
    return kept

seen = set()
attacks = 0
really_set = store.ShoalStore.set

def set_late(self, key, value):
    # Before the others learn of the address: whoever looks into /proc/net/tcp at the right moment is as fast.
    global attacks
    if re.fullmatch(attacked, key) and attacks < num_attacks:
        new = [address for address in listeners() if address not in seen]
        attacks += 1
        as_stranger(lambda: take_places(new))
    seen.update(listeners())
    really_set(self, key, value)

store.ShoalStore.set = set_late

torch.manual_seed(0)
x = torch.randn(96, 4)
data = shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True)))
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
trainer = shoal.Trainer(
    model, loss=nn.MSELoss(), optimizer=lambda params: torch.optim.Adam(params, lr=0.01), seed=0,
)
trainer.fit(data.shuffle(seed=0).batch(24), epochs=1)
if attacked == "formed":
    doors = [address for address in listeners() if address in seen]
    assert doors, "gloo does listen"
    print("let in:", as_stranger(lambda: knock(doors)), file=sys.stderr)
loss = trainer.evaluate(data.batch(24))
if shoal.rank() == 0:
    pathlib.Path(out).write_text(repr(loss))
for end in held:
    os.close(end)
"""

NEVER = "never"
WORLD = r"view-\d+/0//cpu//0/[0-3]"
MESH = r"view-\d+/0//\d+//cpu//0/[0-3]"


def strangers(done: Launched) -> list[str]:
    return [each["stranger"] for each in done.events if each["event"] == "stranger-refused"]


IN_DDP = ("ddp", 3, WORLD, 1)
IN_MESH = ("dp=2,fsdp=2", 4, MESH, 4)  # each rank is in four groups of a mesh
ONLY_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.mark.parametrize(
    ("strategy", "workers", "group", "num_attacks", "uid"),
    [
        (*IN_DDP, 0),
        pytest.param(*IN_DDP, OTHER_USER, marks=ONLY_ROOT),
        (*IN_MESH, 0),
        pytest.param(*IN_MESH, OTHER_USER, marks=[ONLY_ROOT, pytest.mark.matrix]),
    ],
    ids=["ddp-same user", "ddp-another user", "mesh-same user", "mesh-another user"],
)
def test_a_stranger_that_takes_the_place_of_a_rank_is_found_and_nothing_it_sends_counts(
    launch_script: Launch, tmp_path: Path, strategy: str, workers: int, group: str, num_attacks: int, uid: int
) -> None:
    job = {"workers": workers, "strategy": strategy, "oversubscribe": True}
    quiet = launch_script(SCRIPT, **job, args=("quiet", NEVER, "0", "0"))
    assert (quiet.exit_code, quiet.error, strangers(quiet)) == (0, None, [])
    for _ in range(5):  # on a busy machine the rank may be there before the stranger
        done = launch_script(SCRIPT, **job, args=("attacked", group, str(num_attacks), str(uid)))
        assert (done.exit_code, done.error) == (0, None)
        # Also where none was found: one that came in unseen would change it.
        assert (tmp_path / "attacked").read_text() == (tmp_path / "quiet").read_text()
        if strangers(done):
            break
    assert strangers(done), (done.events, done.stderr)
    assert all(f"is from a process of user {uid or os.getuid()}" in each for each in strangers(done))


def test_a_stranger_that_never_gives_up_ends_the_job_with_its_name(launch_script: Launch) -> None:
    done = launch_script(SCRIPT, workers=3, args=("attacked", WORLD, "1000", "0"), step_timeout_s=300.0)
    assert done.exit_code == 3
    assert isinstance(done.error, StrangerInGroup), done.error
    assert f"is from a process of user {os.getuid()}" in str(done.error)
    assert "\n" not in str(done.error)
    starts = [each["time"] for each in done.events if each["event"] == "view-formed"]
    assert starts[-1] - starts[0] < 60, "no attempt waits for a time-out"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_nobody_is_let_in_once_a_group_is_formed(launch_script: Launch, strategy: str) -> None:
    done = launch_script(SCRIPT, workers=3, strategy=strategy, args=("knocked", "formed", "0", "0"))
    assert (done.exit_code, done.error) == (0, None)
    assert [done.log(rank).count("let in: 0") for rank in range(3)] == [1, 1, 1]
