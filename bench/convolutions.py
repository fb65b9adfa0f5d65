"""Which convolutions are faster as dots, forward and backward, on CPUs?

    python bench/convolutions.py [--quick]

XLA's convolution and the dots of fddp/modules/convolution.py take turns on one thread: forward
pass, gradient of the kernel, gradient of the images. `fddp.conv_general_dilated` chooses one of
them by the shapes alone; the last column is its choice, and the last line says what it costs in
comparison with the best choice for each convolution.
"""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# Before JAX starts: a thread, as a rank has that shares its host with others.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import numpy as np
from jax import lax

sys.path.insert(0, str(Path(__file__).parents[1]))
import fddp
from bench.record import interleave, question, save
from fddp.modules.convolution import by_dots

LAYOUT = ("NHWC", "HWIO", "NHWC")
MOST_ELEMENTS = 4e7  # of the copies under all taps
MOST_PRODUCTS = 2e9


class Shape(NamedTuple):
    """A convolution of square images and windows, with padding that keeps the size."""

    images: int
    side: int
    inputs: int
    outputs: int
    window: int
    stride: int = 1
    groups: int = 1

    def __str__(self) -> str:
        images = f"{self.images} x {self.side}² x {self.inputs}"
        extra = f" / {self.stride}" * (self.stride > 1)
        extra += f", {self.groups} groups" * (self.groups > 1)
        return f"{images} → {self.outputs}, {self.window}²{extra}"


def main() -> None:
    args = question(__doc__, "four shapes").parse_args()
    chosen = list(shapes())
    if args.quick:
        chosen = [Shape(1, 4, 8, 8, 3), Shape(1, 2, 8, 8, 3), Shape(8, 8, 4, 4, 3)]
        chosen.append(Shape(2, 4, 8, 8, 3, groups=8))
    rows = list[dict[str, Any]]()
    for shape in chosen:
        rows.append(row := measured(shape))
        print(f"{shape!s:36}{line(row)}", flush=True)
    of_chosen = lambda row: row[row["chosen"]]["all"]  # noqa: E731
    worst = max(rows, key=lambda row: of_chosen(row) / fastest(row))
    totals = (sum(row["xla"]["all"] for row in rows), sum(map(of_chosen, rows)))
    print("all: XLA {:.0f} ms, chosen {:.0f}, best {:.0f}".format(*totals, sum(map(fastest, rows))))
    print(f"the worst choice: {of_chosen(worst) / fastest(worst):.2f} ({worst['shape']})")
    if not args.quick:
        print(save("convolutions", {"rows": rows}))


def shapes() -> Iterator[Shape]:
    """Layers of residual networks, of separable and of grouped ones, for 1 to 64 images."""
    for window in (1, 3, 5):
        for channels in (16, 64, 256, 512):
            for side in (2, 4, 8, 16, 32):
                for images in (1, 4, 16, 64):
                    shape = Shape(images, side, channels, channels, window)
                    if small(shape):
                        yield shape
    for images, side in ((2, 64), (16, 64), (2, 224)):
        yield Shape(images, side, 3, 64, 7, 2)
    for channels in (64, 256):
        for images, side in ((2, 16), (16, 16), (16, 8), (2, 32)):
            yield Shape(images, side, channels, 2 * channels, 3, 2)
            yield Shape(images, side, channels, 2 * channels, 1, 2)
        for images, side in ((2, 16), (16, 8), (4, 32), (16, 32)):
            yield Shape(images, side, channels, channels, 3, groups=channels)
            yield Shape(images, side, channels, channels, 5, 2, groups=channels)
            yield Shape(images, side, channels, channels, 3, groups=8)


def small(shape: Shape) -> bool:
    """True if a shape takes neither much memory nor long."""
    elements = shape.images * shape.side**2 * shape.window**2 * shape.inputs
    return elements < MOST_ELEMENTS and elements * shape.outputs < MOST_PRODUCTS


def measured(shape: Shape) -> dict[str, Any]:
    """Milliseconds of each pass, by XLA's convolution and by dots, and the choice of fddp."""
    random = np.random.default_rng(0)
    side, window = shape.side, shape.window
    x = random.normal(size=(shape.images, side, side, shape.inputs)).astype(np.float32)
    kernel_shape = (window, window, shape.inputs // shape.groups, shape.outputs)
    kernel = random.normal(size=kernel_shape).astype(np.float32)
    convolve = {
        way: partial(function, **geometry(shape))
        for way, function in (("xla", lax.conv_general_dilated), ("dots", by_dots))
    }
    runs = dict[str, Callable[[], Any]]()
    for way, function in convolve.items():
        arguments = (x, kernel, function(x, kernel))
        for name, run in passes(function).items():
            runs[f"{way} {name}"] = partial(run, *arguments)
    products = shape.images * side**2 * window**2 * shape.inputs * shape.outputs
    seconds = interleave(runs, rounds=5 if products > 1e8 else 15)
    row: dict[str, Any] = {"shape": str(shape), "chosen": choice(shape, x, kernel)}
    for way in convolve:
        ms = {
            name: 1e3 * float(np.median(seconds[f"{way} {name}"]))
            for name in ("forward", "kernel", "images")
        }
        row[way] = {name: round(x, 3) for name, x in (ms | {"all": sum(ms.values())}).items()}
    return row


def geometry(shape: Shape) -> dict[str, Any]:
    """Keywords of `jax.lax.conv_general_dilated`."""
    return {
        "window_strides": (shape.stride,) * 2,
        "padding": [(shape.window // 2,) * 2] * 2,
        "dimension_numbers": LAYOUT,
        "feature_group_count": shape.groups,
    }


def passes(convolve: Callable[[Any, Any], Any]) -> dict[str, Callable[..., Any]]:
    """The forward pass and the gradients, as functions of images, kernel and the output's
    cotangent."""

    def kernel_gradient(x: Any, kernel: Any, cotangent: Any) -> Any:
        return jax.linear_transpose(lambda k: convolve(x, k), kernel)(cotangent)

    def images_gradient(x: Any, kernel: Any, cotangent: Any) -> Any:
        return jax.linear_transpose(lambda x: convolve(x, kernel), x)(cotangent)

    functions = {
        "forward": lambda x, kernel, _: convolve(x, kernel),
        "kernel": kernel_gradient,
        "images": images_gradient,
    }
    return {name: jax.jit(function) for name, function in functions.items()}


def choice(shape: Shape, x: np.ndarray, kernel: np.ndarray) -> str:
    """The way that `fddp.conv_general_dilated` takes."""
    chooses = partial(fddp.conv_general_dilated, **geometry(shape))
    jaxpr = jax.make_jaxpr(chooses)(x, kernel)
    return "xla" if "conv_general_dilated" in str(jaxpr) else "dots"


def fastest(row: dict[str, Any]) -> float:
    return min(row["xla"]["all"], row["dots"]["all"])


def line(row: dict[str, Any]) -> str:
    pairs = [f"{row['xla'][x]:9.2f} {row['dots'][x]:9.2f}" for x in row["xla"]]
    return " |".join(pairs) + f"   {row['chosen']}"


if __name__ == "__main__":
    main()
