"""A model with state of its own in buffers: the same on all ranks, and after a death."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from launched import Launched
from safetensors.torch import load_file

from shoal.config.faults import Faults

SCRIPT = """
import hashlib, torch, shoal
from torch import nn

class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 2)
        self.register_buffer("centre", torch.zeros(6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.centre = self.centre * 0.9 + 0.1 * x.detach().mean(0)
            self.seen.add_(1)
        return self.outer(self.inner(x - self.centre).tanh())

torch.manual_seed(0)
x = torch.randn(120, 6)
trainer = shoal.Trainer(Centred(), loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
trainer.fit(shoal.Dataset.from_arrays((x, (x.sum(1) > 0).long())).shuffle(seed=1).batch(10), epochs=3)
raw = b"".join(tensor.numpy().tobytes() for tensor in trainer.model.state_dict().values())
mine = int(hashlib.sha256(raw).hexdigest()[:8], 16)
print(mine, float(shoal.reduce(float(mine))) == mine * shoal.num_workers(), int(trainer.model.seen))
"""


def test_buffers_agree_over_the_ranks_and_a_death_changes_no_bit(
    launch_script: Callable[..., Launched],
) -> None:
    calm = launch_script(SCRIPT, workers=3)
    assert calm.exit_code == 0, calm.stderr
    assert calm.stdout.split()[1:] == ["True", "36"]
    for victim in (0, 2):
        killed = launch_script(SCRIPT, workers=3, faults=Faults().kill(f"worker-{victim}", at_step=20))
        assert (killed.exit_code, killed.stdout) == (0, calm.stdout), killed.stderr


def test_a_buffer_that_no_average_gets_right_is_named_at_the_first_step(
    launch_script: Callable[..., Launched],
) -> None:
    text = SCRIPT.replace(".mean(0)", ".sum(0)").replace(".batch(10)", ".batch(20)")
    done = launch_script(text, workers=3)
    assert done.exit_code == 0, done.stderr
    assert "note: forward changes 'centre' otherwise by parts of a batch than by all of it" in done.stderr
    told = launch_script(SCRIPT.replace(".batch(10)", ".batch(20)"), workers=3)
    assert "note: forward changes" not in told.stderr


SPECTRAL = """
import sys, torch, shoal
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

torch.manual_seed(0)
x = torch.randn(22, 6, dtype=torch.float64)
model = nn.Sequential(
    spectral_norm(nn.Linear(6, 12)), nn.Tanh(), spectral_norm(nn.Linear(12, 12)), nn.Tanh(), nn.Linear(12, 2)
).double()
trainer = shoal.Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
trainer.fit(shoal.Dataset.from_arrays((x, (x.sum(1) > 0).long())).batch(8), epochs=2)
trainer.save(sys.argv[1])
"""


def test_stages_with_spectral_norms_train_as_one_process(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    trained = []
    for workers, strategy in ((1, "single"), (2, "pp")):
        folder = tmp_path / strategy
        done = launch_script(SPECTRAL, workers=workers, strategy=strategy, args=(str(folder),))
        assert done.exit_code == 0, done.error
        trained.append(load_file(next(folder.glob("*.safetensors"))))
    one, two = trained
    assert one.keys() == two.keys()
    for name, expected in one.items():
        torch.testing.assert_close(two[name], expected, rtol=1e-9, atol=1e-11, msg=name)
