"""A worker for test_rendezvous: carries out one command per line of stdin, answers with one line of JSON.

Started once and used for many groups, because importing torch is what takes time.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shoal.cluster.worker.coordinator_client import CoordinatorClient
from shoal.config import job as jobs
from shoal.config.job import Job
from shoal.config.liveness import LivenessConfig
from shoal.errors import ConfigError, ShoalError
from shoal.recovery import rendezvous


def use(job: Job) -> dict[str, object]:
    """What the group is for: a sum over everybody, over a subgroup, over a mesh."""
    everybody = torch.tensor([float(job.rank + 1)])
    dist.all_reduce(everybody)
    pair = dist.new_group([0, 1])
    two = torch.tensor([float(job.rank + 1)])
    if job.rank < 2:
        dist.all_reduce(two, group=pair)
    mesh = init_device_mesh("cpu", (1, job.num_workers), mesh_dim_names=("dp", "tp"))
    meshed = torch.tensor([1.0])
    dist.all_reduce(meshed, group=mesh.get_group("tp"))
    dist.barrier()
    return {"all": everybody.item(), "pair": two.item(), "mesh": meshed.item(), "backend": dist.get_backend()}


def call_together(job: Job) -> list[float]:
    """Join, make two calls and end the script, all in step with the others; the moment of each."""
    client = CoordinatorClient(str(job.coordinator), job.rank, num_workers=job.num_workers)
    moments = [time.monotonic()]
    for number in (1, 2):
        client.begin_call(number, "fit", "epochs=1")
        moments.append(time.monotonic())
    client.end_script(2)
    client.close()
    return moments


def main() -> None:
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        liveness = LivenessConfig(join_timeout_s=command["job"].pop("join_timeout_s"))
        job = Job(name="test", run_dir=Path("unused"), launched=True, liveness=liveness, **command["job"])
        result: object = None
        try:
            match command["do"]:
                case "form":
                    rendezvous.form_group(job, command["view"])
                case "form-once":
                    jobs.enter(job)
                    result = rendezvous.group() is rendezvous.group()
                    try:
                        rendezvous.form_group(job, view=2)
                    except ConfigError as error:
                        result = [result, str(error).partition(",")[0]]
                case "use":
                    result = use(job)
                case "call-together":
                    result = call_together(job)
                case "leave":
                    rendezvous.leave_group()
                case "threads":
                    result = [len(os.listdir("/proc/self/task")), threading.active_count()]
            answer = {"result": result}
        except ShoalError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
