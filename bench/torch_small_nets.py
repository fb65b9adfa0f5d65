"""One rank of PyTorch DDP for bench/small_nets.py, in an environment of its own: the same net.

Imports nothing of this project.
"""

import json
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

WIDTH = 32
STEPS = 20


class Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        return ((rows - 1) ** 2).mean()


def main(leaves: int, turns: int) -> None:
    rank = int(os.environ["FDDP_RANK"])
    host, port = os.environ["FDDP_COORDINATOR"].split(":")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=rank,
        world_size=int(os.environ["FDDP_SIZE"]),
    )
    rows = torch.randn(32, WIDTH)
    modules = {
        "PyTorch DDP": nn.parallel.DistributedDataParallel(Net(leaves // 2)),
        "alone, PyTorch": Net(leaves // 2),
    }
    optimizers = {name: torch.optim.SGD(net.parameters(), 0.01) for name, net in modules.items()}
    seconds: dict[str, list[float]] = {name: [] for name in modules}
    for turn in range(3 + turns):
        for name, module in modules.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                optimizers[name].zero_grad()
                module(rows).backward()
                optimizers[name].step()
            if turn >= 3:
                seconds[name].append((time.perf_counter() - start) / STEPS)
    if rank == 0:
        found = {}
        for name, times in seconds.items():
            low, middle, high = 1e3 * np.percentile(times, (25, 50, 75))
            found[name] = {"median_ms": middle, "quartile_1_ms": low, "quartile_3_ms": high}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
