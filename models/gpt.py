"""A decoder-only language model of the Llama family.

Legend: B batch, T tokens, D width, N query heads, K key-value heads, G = N / K query heads to one
key-value head, h width of a head, V vocabulary.

Sources: Vaswani et al., "Attention Is All You Need" (2017); Touvron et al., "LLaMA" (2023); Su et
al., "RoFormer" (2021) for rotary positions; Ainslie et al., "GQA" (2023) for grouped heads;
Shazeer, "GLU Variants Improve Transformer" (2020); Fan et al., "LayerDrop" (2020) for layers left
out in training.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

### Layers


def rotary(
    x: Float[Array, "B T N h"], positions: Int[Array, " T"], base: float = 10_000.0
) -> Float[Array, "B T N h"]:
    """Turns every pair of coordinates (i, i + h/2) by an angle that grows with the position.

    The inner product of two turned vectors depends on their positions only through the difference.
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    pairs = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(pairs, dtype=dtype) / pairs)
    angle = positions.astype(dtype)[:, None, None] * frequency
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    a, b = jnp.split(x.astype(dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; G query heads share one key-value head."""

    heads: int
    kv_heads: int
    residual_init: nn.initializers.Initializer
    dtype: DTypeLike
    param_dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        B, T, D = x.shape
        N = self.heads
        K = self.kv_heads
        h = D // self.heads
        dense = partial(nn.Dense, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype)

        positions = jnp.arange(T)
        q = rotary(dense(N * h, name="query")(x).reshape(B, T, N, h), positions)
        k = rotary(dense(K * h, name="key")(x).reshape(B, T, K, h), positions)
        v = dense(K * h, name="value")(x).reshape(B, T, K, h)

        wide = jnp.promote_types(q.dtype, jnp.float32)
        q = q.reshape(B, T, K, N // K, h)
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=wide) * h**-0.5
        causal = jnp.tril(jnp.ones((T, T), bool))
        weights = nn.softmax(jnp.where(causal, scores, -jnp.inf)).astype(v.dtype)
        y = jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(B, T, D)
        return dense(D, name="out", kernel_init=self.residual_init)(y)


class SwiGLU(nn.Module):
    """A feed-forward layer whose hidden units are gated."""

    hidden: int
    residual_init: nn.initializers.Initializer
    dtype: DTypeLike
    param_dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        dense = partial(nn.Dense, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype)
        y = nn.silu(dense(self.hidden, name="gate")(x)) * dense(self.hidden, name="up")(x)
        return dense(x.shape[-1], name="down", kernel_init=self.residual_init)(y)


class Layer(nn.Module):
    """Attention, then a feed-forward layer, each added to the residual stream."""

    heads: int
    kv_heads: int
    hidden: int
    dropout: float
    residual_init: nn.initializers.Initializer
    dtype: DTypeLike
    param_dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        norm = partial(nn.RMSNorm, epsilon=1e-5, **dtypes)
        drop = nn.Dropout(self.dropout, deterministic=not self.has_rng("dropout"))
        attention = Attention(
            self.heads, self.kv_heads, self.residual_init, name="attention", **dtypes
        )
        feed_forward = SwiGLU(self.hidden, self.residual_init, name="feed_forward", **dtypes)
        x = x + drop(attention(norm(name="attention_norm")(x)))
        return x + drop(feed_forward(norm(name="feed_forward_norm")(x)))


### The model


class GPT(nn.Module):
    """Next-token logits for every prefix.

    Attributes: vocabulary: the number of tokens V. layers: the number of layers, each of attention
      and a feed-forward layer. width: the width D of the residual stream. heads: the number of
      query heads N. kv_heads: the number of key-value heads K, a divisor of N. hidden: the width of
      the feed-forward layers. context: the number of tokens T a synthetic batch has; the model
      itself reads any number. dropout: the share of a layer's output that is dropped where an rng
      named "dropout" is given. layer_drop: how likely a layer is left out, and not computed, where
      an rng named "layer_drop" is given. As in LayerDrop nothing is rescaled; without the rng all
      layers run. dtype: the dtype of the computation. param_dtype: the dtype of the parameters.
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    context: int
    dropout: float = 0.0
    layer_drop: float = 0.0
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        drop = nn.Dropout(self.dropout, deterministic=not self.has_rng("dropout"))
        embed, norm = ends(self)
        x = drop(embed(tokens))
        mask = self.kept_layers()
        # Layers are a Python loop, which one program can send layer by layer; `models/scanned.py`
        # has them in a scan.
        for i in range(self.layers):
            block = layer(self, f"layer_{i}")
            x = (
                block(x)
                if mask is None
                else nn.cond(mask[i], Layer.__call__, lambda _, x: x, block, x)
            )
        return head(embed, norm, x)

    def kept_layers(self) -> Bool[Array, " layers"] | None:
        """Draws which layers run, the same for all rows; None: all, as at the start, when
        parameters are made."""
        if not self.layer_drop or not self.has_rng("layer_drop") or self.is_initializing():
            return None
        return jax.random.bernoulli(
            self.make_rng("layer_drop"), 1 - self.layer_drop, (self.layers,)
        )


def ends(model: GPT) -> tuple[nn.Embed, nn.RMSNorm]:
    """The parts before and after the layers: the table of tokens, which serves both, and the last
    norm."""
    dtypes: dict[str, Any] = {"dtype": model.dtype, "param_dtype": model.param_dtype}
    start = nn.initializers.normal(0.02)
    embed = nn.Embed(model.vocabulary, model.width, embedding_init=start, name="embed", **dtypes)
    return embed, nn.RMSNorm(epsilon=1e-5, name="norm", **dtypes)


def layer(model: GPT, name: str) -> Layer:
    """One layer; all are alike."""
    # Branches that add to the residual stream start smaller the more there are (Radford et al.,
    # 2019).
    residual_init = nn.initializers.variance_scaling(0.5 / model.layers, "fan_in", "normal")
    shape = (model.heads, model.kv_heads, model.hidden, model.dropout, residual_init)
    return Layer(*shape, name=name, dtype=model.dtype, param_dtype=model.param_dtype)


def head(embed: nn.Embed, norm: nn.RMSNorm, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Logits of the next token, from the output of the last layer; in float32 at least."""
    logits = embed.attend(norm(x))
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


PRESETS: dict[str, GPT] = {
    "tiny": GPT(256, layers=2, width=64, heads=4, kv_heads=2, hidden=128, context=32),
    "bytes": GPT(256, layers=4, width=192, heads=6, kv_heads=2, hidden=512, context=128),
    # The shape of SmolLM-360M.
    "360m": GPT(49_152, layers=32, width=960, heads=15, kv_heads=5, hidden=2560, context=1024),
}


### Training


def init(model: GPT, key: jax.Array, batch: dict[str, Any]) -> tuple[Any, None]:
    """Returns fresh parameters, and `None`: the model has no buffers."""
    shape = jax.ShapeDtypeStruct(batch["tokens"].shape, batch["tokens"].dtype)
    return model.lazy_init(key, shape)["params"], None


def loss_fn(model: GPT) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    """Returns the mean cross entropy of the next token, and the accuracy."""

    def loss(params: Any, batch: dict[str, Any], *, rng: jax.Array | None = None):
        inputs = batch["tokens"][:, :-1]
        targets = batch["tokens"][:, 1:]
        rngs = None if rng is None else {"dropout": rng, "layer_drop": jax.random.fold_in(rng, 1)}
        return score(jnp.asarray(model.apply({"params": params}, inputs, rngs=rngs)), targets)

    return loss


def score(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The mean cross entropy, and the share of tokens whose logit is the largest."""
    value = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    return value, {"accuracy": jnp.mean(logits.argmax(-1) == targets, dtype=value.dtype)}


def batch(
    model: GPT | str, rows: int, seed: int = 0, length: int | None = None
) -> dict[str, np.ndarray]:
    """Returns uniform tokens (rows, T + 1): T inputs, and T targets one place later.

    Args:
      model: a model or the name of a preset.
      rows: the number of sequences.
      seed: another seed, another batch.
      length: the number of inputs T; the model's context if not given.
    """
    model = PRESETS[model] if isinstance(model, str) else model
    shape = (rows, (length or model.context) + 1)
    return {
        "tokens": np.random.default_rng(seed).integers(model.vocabulary, size=shape, dtype=np.int32)
    }
