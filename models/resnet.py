"""Residual networks for images, with BatchNorm (buffers) or GroupNorm (none).

Legend: B batch, H height, W width in pixels, C channels.

Sources: He et al., "Deep Residual Learning for Image Recognition" (CVPR 2016), the bottleneck's
stride on its 3x3 convolution; Goyal et al., "Accurate, Large Minibatch SGD" (2017) for the
classifier's initialisation; Ioffe and Szegedy, "Batch Normalization" (ICML 2015); Wu and He, "Group
Normalization" (ECCV 2018).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

### Layers

# Called inside a module's `__call__`, such a factory returns a layer of that module.
Layer = Callable[..., nn.Module]


def batch_norm(
    *, train: bool, axis_name: str | None, dtype: DTypeLike, param_dtype: DTypeLike
) -> nn.BatchNorm:
    """Normalises over the batch (over all replicas of `axis_name`, if given) and keeps running
    averages."""
    return nn.BatchNorm(
        use_running_average=not train,
        momentum=0.9,
        axis_name=axis_name,
        dtype=dtype,
        param_dtype=param_dtype,
        # Flax would create float32 averages and update them in float64: a buffer must not change
        # its dtype.
        force_float32_reductions=jnp.dtype(param_dtype).itemsize <= 4,
    )


def group_norm(
    *,
    train: bool,
    axis_name: str | None,
    dtype: DTypeLike,
    param_dtype: DTypeLike,
    groups: int = 32,
) -> nn.GroupNorm:
    """Normalises every example by itself: no buffers, and the same result on any number of
    replicas."""
    del train, axis_name
    return nn.GroupNorm(groups, epsilon=1e-5, dtype=dtype, param_dtype=param_dtype)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    features: int
    stride: int
    conv: Layer
    norm: Layer

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B H2 W2 C2"]:
        y = nn.relu(self.norm()(self.conv(self.features, (3, 3), self.stride, padding=1)(x)))
        y = self.norm()(self.conv(self.features, (3, 3), padding=1)(y))
        if x.shape != y.shape:
            x = self.norm()(self.conv(self.features, (1, 1), self.stride)(x))
        return nn.relu(x + y)


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 convolutions, the last four times as wide, and a
    shortcut."""

    features: int
    stride: int
    conv: Layer
    norm: Layer

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B H2 W2 C2"]:
        y = nn.relu(self.norm()(self.conv(self.features, (1, 1))(x)))
        y = nn.relu(self.norm()(self.conv(self.features, (3, 3), self.stride, padding=1)(y)))
        y = self.norm()(self.conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = self.norm()(self.conv(4 * self.features, (1, 1), self.stride)(x))
        return nn.relu(x + y)


### The network


class ResNet(nn.Module):
    """A stem, stages of residual blocks, and a linear classifier of the mean over all pixels.

    Attributes: stages: the blocks in each stage; every stage but the first halves the image and
      doubles the width. block: the kind of block. width: the features of a block in the first
      stage. classes: the number of classes. stem: "imagenet" is for 64 pixels and more (7x7, stride
      2, max-pooling), "small" keeps the size (3x3). norm: makes a normalisation layer; called as
      `batch_norm` and `group_norm` above. axis_name: the axis over which BatchNorm joins its
      statistics. channels: the channels of an image. dtype: the dtype of the computation.
      param_dtype: the dtype of the parameters. conv_general_dilated: computes a convolution;
      `fddp.conv_general_dilated` is faster on CPUs.
    """

    stages: tuple[int, ...]
    block: type[BasicBlock] | type[Bottleneck] = BasicBlock
    width: int = 64
    classes: int = 1000
    stem: Literal["imagenet", "small"] = "imagenet"
    norm: Layer = batch_norm
    axis_name: str | None = None
    channels: int = 3
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    conv_general_dilated: Callable[..., Array] = jax.lax.conv_general_dilated

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"], *, train: bool) -> Float[Array, "B classes"]:
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        he_init = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
        # Padding is given in pixels, as in the paper: "SAME" would pad the right and the bottom
        # more.
        conv = partial(
            nn.Conv,
            use_bias=False,
            padding=0,
            kernel_init=he_init,
            conv_general_dilated=self.conv_general_dilated,
            **dtypes,
        )
        norm = partial(self.norm, train=train, axis_name=self.axis_name, **dtypes)

        if self.stem == "imagenet":
            x = nn.relu(norm()(conv(self.width, (7, 7), 2, padding=3)(x)))
            x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))  # pyright: ignore[reportArgumentType]
        else:
            x = nn.relu(norm()(conv(self.width, (3, 3), padding=1)(x)))
        # Blocks are a Python loop, which one program can send block by block; `models/scanned.py`
        # scans a GPT's.
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = self.block(self.width * 2**stage, stride, conv, norm)(x)
        logits = nn.Dense(self.classes, kernel_init=nn.initializers.normal(0.01), **dtypes)(
            x.mean((1, 2))
        )
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


PRESETS: dict[str, ResNet] = {
    "18": ResNet((2, 2, 2, 2)),
    "18-gn": ResNet((2, 2, 2, 2), norm=group_norm),
    "50": ResNet((3, 4, 6, 3), Bottleneck),
    # The depth of ResNet-18 at a quarter of its width: enough for 8x8 digits, and quick on a CPU.
    "18-digits": ResNet((2, 2, 2, 2), width=16, classes=10, stem="small", channels=1),
    "tiny": ResNet((1, 1), width=8, classes=10, stem="small"),
    "tiny-gn": ResNet(
        (1, 1), width=8, classes=10, stem="small", norm=partial(group_norm, groups=4)
    ),
}


### Training and evaluation


def has_buffers(model: ResNet) -> bool:
    """True if the model's normalisation keeps batch statistics."""
    norm = model.norm(train=False, axis_name=None, dtype=model.dtype, param_dtype=model.param_dtype)
    return "batch_stats" in jax.eval_shape(
        norm.init, jax.random.key(0), jnp.zeros((1, model.width))
    )


def init(model: ResNet, key: jax.Array, batch: dict[str, Any]) -> tuple[Any, Any]:
    """Returns fresh parameters, and the running averages of BatchNorm or `None`."""
    shape = jax.ShapeDtypeStruct(batch["image"].shape, batch["image"].dtype)
    variables = model.lazy_init(key, shape, train=False)
    return variables["params"], variables.get("batch_stats")


def loss_fn(model: ResNet) -> Callable[..., tuple[jax.Array, Any]]:
    """Returns the mean cross entropy of the model, and its accuracy.

    Returns:
      `loss(params, batch, *, model_state) -> (loss, (model_state, aux))` where the model has
      buffers, and `loss(params, batch) -> (loss, aux)` where it has none.
    """

    def loss(params: Any, batch: dict[str, Any]):
        return _score(model.apply({"params": params}, batch["image"], train=True), batch["label"])

    def loss_with_buffers(params: Any, batch: dict[str, Any], *, model_state: Any):
        variables = {"params": params, "batch_stats": model_state}
        logits, new = model.apply(variables, batch["image"], train=True, mutable=["batch_stats"])
        value, aux = _score(logits, batch["label"])
        return value, (new["batch_stats"], aux)

    return loss_with_buffers if has_buffers(model) else loss


def predict(
    model: ResNet, params: Any, model_state: Any, images: Float[Array, "B H W C"] | np.ndarray
) -> Float[Array, "B classes"]:
    """Returns the logits of images, normalised by the running averages where there are any."""
    buffers = {} if model_state is None else {"batch_stats": model_state}
    return jnp.asarray(model.apply({"params": params, **buffers}, images, train=False))


def batch(
    model: ResNet | str, rows: int, seed: int = 0, size: int | None = None
) -> dict[str, np.ndarray]:
    """Returns normally distributed images (rows, size, size, C) and uniform labels (rows,).

    Args:
      model: a model or the name of a preset.
      rows: the number of images.
      seed: another seed, another batch.
      size: height and width in pixels; 64 for the ImageNet stem and 8 for the small one if not
        given.
    """
    model = PRESETS[model] if isinstance(model, str) else model
    size = size or {"imagenet": 64, "small": 8}[model.stem]
    rng = np.random.default_rng(seed)
    return {
        "image": rng.standard_normal((rows, size, size, model.channels), np.float32),
        "label": rng.integers(model.classes, size=rows, dtype=np.int32),
    }


def _score(
    logits: Any, labels: Int[Array, " B"] | np.ndarray
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, {"accuracy": jnp.mean(logits.argmax(-1) == labels, dtype=loss.dtype)}
