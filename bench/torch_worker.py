"""One rank of PyTorch DDP for bench/overlap.py, hosts.py and small_nets.py, in an environment of
its own (torch 2.15, CPU): the same networks.

Called as bench/overlap_worker.py is, or with the leaves and turns of small nets; imports nothing of
this project.
"""

import json
import os
import socket
import sys
import time
from functools import partial
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

CAPS_MB = (4, 8, 25)
CAPS_WAITING = (1, 2)  # in layers
FORWARD_S = 0.04
BACKWARD_S = 0.08
SMALL_STEPS = 20  # in a turn


def join() -> int:
    """Joins the other rank; returns this one."""
    torch.set_num_threads(1)
    rank = int(os.environ["FDDP_RANK"])
    host, port = os.environ["FDDP_COORDINATOR"].split(":")
    address = f"tcp://{host}:{int(port) + 1}"
    size = int(os.environ["FDDP_SIZE"])
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    return rank


def main(control: str, name: str) -> None:
    rank = join()
    _, _, elements = name.partition(":")  # of a layer that waits
    caps_mb = [layers * int(elements) / 2**18 for layers in CAPS_WAITING] if elements else CAPS_MB
    ways = {f"PyTorch DDP, {cap:g} MiB": _step(name, rank, cap) for cap in caps_mb}
    ways["PyTorch, alone"] = _step(name, rank, None)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(control)
        stream = line.makefile("rw")
        _write(stream, {"job": "torch", "rank": rank, "ways": list(ways)})
        for order in stream:
            way, steps = json.loads(order)
            seconds = []
            for _ in range(steps):
                dist.barrier()
                start = time.perf_counter()
                ways[way]()
                seconds.append(time.perf_counter() - start)
            _write(stream, {"seconds": seconds})


def small_nets(leaves: int, turns: int) -> None:
    """Prints the milliseconds of a step of a net of small layers."""
    rank = int(os.environ["FDDP_RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    join()
    ways = {"PyTorch DDP": 25.0, "alone, PyTorch": None}
    steps = {way: _step(f"small:{leaves}", rank, cap) for way, cap in ways.items()}
    seconds: dict[str, list[float]] = {way: [] for way in steps}
    for turn in range(3 + turns):
        for way, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(SMALL_STEPS):
                step()
            if turn >= 3:
                seconds[way].append(1e3 * (time.perf_counter() - start) / SMALL_STEPS)
    if rank == 0:
        names = ("quartile_1_ms", "median_ms", "quartile_3_ms")
        found = {way: dict(zip(names, quantiles(x, n=4))) for way, x in seconds.items()}
        print(json.dumps(found), flush=True)


def _write(stream: Any, words: Any) -> None:
    stream.write(json.dumps(words) + "\n")
    stream.flush()


def _step(name: str, rank: int, cap_mb: float | None) -> Any:
    torch.manual_seed(0)
    models = {"mlp": _mlp, "mlp640": partial(_mlp, rows=640), "resnet18": _resnet18, "gpt": _gpt}
    name, _, elements = name.partition(":")
    models |= {"waiting": partial(_waiting, elements), "small": partial(_small, elements)}
    model, batch = models[name](rank)
    module = (
        model
        if cap_mb is None
        else nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap_mb)
    )
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def run() -> None:
        optimizer.zero_grad()
        module(*batch).backward()
        optimizer.step()

    return run


def _rows(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(rank)


class _WithLoss(nn.Module):
    def __init__(self, net: nn.Module, loss: Any) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.net(x), y)


def _mlp(rank: int, rows: int = 1024) -> Any:
    layers: list[nn.Module] = []
    for k in range(8):
        layers += [nn.Linear(1024, 1024, bias=False), *([nn.ReLU()] if k < 7 else [])]
    x = torch.randn(2, rows, 1024, generator=_rows(rank))
    return _WithLoss(nn.Sequential(*layers), F.mse_loss), (x[0], x[1])


class _Block(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(inside, width, 3, stride, 1, bias=False)
        self.b = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])
        self.short = nn.Sequential()
        if stride > 1 or inside != width:
            self.short = nn.Sequential(
                nn.Conv2d(inside, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[1](self.b(F.relu(self.norms[0](self.a(x)))))
        return F.relu(y + self.short(x))


def _resnet18(rank: int) -> Any:
    stem = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    widths += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
    x = torch.randn(2, 3, 64, 64, generator=_rows(rank))
    y = torch.randint(1000, (2,), generator=_rows(rank))
    return _WithLoss(nn.Sequential(*stem, *(_Block(*w) for w in widths), *head), F.cross_entropy), (
        x,
        y,
    )


class _Layer(nn.Module):
    def __init__(
        self, width: int = 384, heads: int = 6, kv_heads: int = 2, hidden: int = 1024
    ) -> None:
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.dim = width // heads
        kv = kv_heads * self.dim
        self.q, self.k, self.v = (nn.Linear(width, w, bias=False) for w in (width, kv, kv))
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        h = self.norms[0](x)
        q = _rotary(self.q(h).view(b, t, self.heads, self.dim))
        k = _rotary(self.k(h).view(b, t, self.kv_heads, self.dim))
        v = self.v(h).view(b, t, self.kv_heads, self.dim)
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, d))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _rotary(x: torch.Tensor) -> torch.Tensor:
    t = x.shape[1]
    half = x.shape[-1] // 2
    angle = torch.arange(t)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos = angle.cos()[:, None]
    sin = angle.sin()[:, None]
    a = x[..., :half]
    b = x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class _Gpt(nn.Module):
    def __init__(self, vocabulary: int = 256, width: int = 384, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(_Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embed.weight.T


def _gpt(rank: int) -> Any:
    tokens = torch.randint(256, (5, 97), generator=_rows(rank))
    loss = lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten())  # noqa: E731
    return _WithLoss(_Gpt(), loss), (tokens[:, :-1], tokens[:, 1:])


class _Wait(torch.autograd.Function):
    """Adds the mean of parameters, and waits: bench/problems.py's layer."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, forward_s: float, backward_s: float
    ) -> Any:
        ctx.shape = weights.shape
        ctx.seconds = backward_s
        time.sleep(forward_s)
        return rows + weights.mean()

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        time.sleep(ctx.seconds)
        return (
            cotangents[0],
            torch.full(ctx.shape, float(cotangents[0].sum()) / ctx.shape.numel()),
            None,
            None,
        )


class _Waiting(nn.Module):
    def __init__(self, elements: int, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(elements) for _ in range(layers))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for weights in self.layers:
            rows = _Wait.apply(rows, weights, FORWARD_S, BACKWARD_S)
        return rows


def _waiting(elements: str, rank: int) -> Any:
    return _WithLoss(_Waiting(int(elements)), F.mse_loss), (
        torch.randn(4, generator=_rows(rank)),
        torch.ones(4),
    )


def _small(leaves: str, rank: int) -> Any:
    layers = [x for _ in range(int(leaves) // 2) for x in (nn.Linear(32, 32), nn.Tanh())]
    rows = torch.randn(32, 32, generator=_rows(rank))
    return _WithLoss(nn.Sequential(*layers), F.mse_loss), (rows, torch.ones(32, 32))


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        small_nets(int(sys.argv[1]), int(sys.argv[2]))
    else:
        main(*sys.argv[1:])
