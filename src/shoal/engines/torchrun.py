"""torchrun: no slots are asked for. `--on torchrun` is for processes that it started; see `cluster/launch/world.py`."""
