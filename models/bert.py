"""A bidirectional encoder that predicts masked tokens.

Legend: B batch, T tokens, D width, N heads, h width of a head, V vocabulary.

Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (NAACL 2019). Two
departures: there is one segment, hence no segment embedding; and keys have no bias, because a
softmax over the keys does not see it.
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
from jaxtyping import Array, Float, Int

MASK_TOKEN = 103  # [MASK] in the vocabulary of the paper
MASKED_SHARE = 0.15

normal_init = nn.initializers.truncated_normal(0.02)

### Layers


class Attention(nn.Module):
    """Self-attention over all positions."""

    heads: int
    dropout: float
    dtype: DTypeLike
    param_dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        B, T, D = x.shape
        split = (B, T, self.heads, D // self.heads)
        dense = partial(
            nn.Dense, D, dtype=self.dtype, param_dtype=self.param_dtype, kernel_init=normal_init
        )
        drop = nn.Dropout(self.dropout, deterministic=not self.has_rng("dropout"))

        q = dense(name="query")(x).reshape(split)
        k = dense(name="key", use_bias=False)(x).reshape(split)
        v = dense(name="value")(x).reshape(split)

        wide = jnp.promote_types(q.dtype, jnp.float32)
        scores = (
            jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=wide) * split[-1] ** -0.5
        )
        weights = drop(nn.softmax(scores).astype(v.dtype))
        y = jnp.einsum("bnts,bsnh->btnh", weights, v).reshape(B, T, D)
        return dense(name="out")(y)


class FeedForward(nn.Module):
    """Two dense layers with a GELU between."""

    hidden: int
    dtype: DTypeLike
    param_dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        dense = partial(
            nn.Dense, dtype=self.dtype, param_dtype=self.param_dtype, kernel_init=normal_init
        )
        y = nn.gelu(dense(self.hidden, name="up")(x), approximate=False)
        return dense(x.shape[-1], name="down")(y)


### The model


class Bert(nn.Module):
    """Logits of the true token at every position.

    Attributes:
      vocabulary: the number of tokens V.
      layers: the number of layers, each of attention and a feed-forward layer.
      width: the width D of the residual stream.
      heads: the number of heads N.
      hidden: the width of the feed-forward layers.
      positions: the number of positions the model can tell apart, the longest T.
      context: the number of tokens T a synthetic batch has.
      dropout: the share of a layer's output that is dropped where an rng named "dropout" is given.
      dtype: the dtype of the computation.
      param_dtype: the dtype of the parameters.
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    hidden: int
    positions: int
    context: int
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        norm = partial(nn.LayerNorm, epsilon=1e-12, **dtypes)
        drop = nn.Dropout(self.dropout, deterministic=not self.has_rng("dropout"))
        table = partial(nn.Embed, features=self.width, embedding_init=normal_init, **dtypes)
        embed = table(self.vocabulary, name="embed")
        position = table(self.positions, name="position")

        x = drop(norm(name="embed_norm")(embed(tokens) + position(jnp.arange(tokens.shape[1]))))
        # Layers are a Python loop, which one program can send layer by layer; `models/scanned.py`
        # scans a GPT's.
        for i in range(self.layers):
            attention = Attention(self.heads, self.dropout, name=f"attention_{i}", **dtypes)
            feed_forward = FeedForward(self.hidden, name=f"feed_forward_{i}", **dtypes)
            x = norm(name=f"attention_norm_{i}")(x + drop(attention(x)))
            x = norm(name=f"feed_forward_norm_{i}")(x + drop(feed_forward(x)))

        x = nn.gelu(
            nn.Dense(self.width, kernel_init=normal_init, name="head", **dtypes)(x),
            approximate=False,
        )
        bias = self.param("bias", nn.initializers.zeros, (self.vocabulary,), self.param_dtype)
        logits = embed.attend(norm(name="head_norm")(x))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32)) + bias


PRESETS: dict[str, Bert] = {
    "tiny": Bert(256, layers=2, width=64, heads=4, hidden=128, positions=32, context=32),
    "base": Bert(30_522, layers=12, width=768, heads=12, hidden=3072, positions=512, context=128),
}


### Training


def init(model: Bert, key: jax.Array, batch: dict[str, Any]) -> tuple[Any, None]:
    """Returns fresh parameters, and `None`: the model has no buffers."""
    shape = jax.ShapeDtypeStruct(batch["tokens"].shape, batch["tokens"].dtype)
    return model.lazy_init(key, shape)["params"], None


def loss_fn(model: Bert) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    """Returns the cross entropy of masked tokens, averaged over rows, and the accuracy.

    Each row is averaged over its own masked tokens first, so that the loss of a batch is the mean
    of the losses of its equal shards whatever the masks.
    """

    def loss(params: Any, batch: dict[str, Any], *, rng: jax.Array | None = None):
        rngs = None if rng is None else {"dropout": rng}
        targets = batch["targets"]
        mask = batch["mask"]
        logits = jnp.asarray(model.apply({"params": params}, batch["tokens"], rngs=rngs))
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        correct = logits.argmax(-1) == targets

        def mean(x: Array) -> Array:
            return jnp.mean(jnp.sum(x * mask, -1) / mask.sum(-1, dtype=entropy.dtype))

        return mean(entropy), {"accuracy": mean(correct)}

    return loss


def batch(
    model: Bert | str, rows: int, seed: int = 0, length: int | None = None
) -> dict[str, np.ndarray]:
    """Returns a synthetic batch in which every row hides the same number of tokens.

    Of the hidden tokens 80 % read [MASK], 10 % a random token and 10 % themselves, as in the paper.

    Args:
      model: a model or the name of a preset.
      rows: the number of sequences.
      seed: another seed, another batch.
      length: the number of tokens T; the model's context if not given.

    Returns:
      "tokens": the model's input (rows, T); "targets": the true tokens (rows, T); "mask": where
      to predict them, boolean (rows, T).
    """
    model = PRESETS[model] if isinstance(model, str) else model
    rng = np.random.default_rng(seed)
    shape = (rows, length or model.context)
    targets, noise = rng.integers(model.vocabulary, size=(2, *shape), dtype=np.int32)
    # A row of the argsort is a permutation: the numbers below n stand in exactly n places.
    mask = rng.random(shape).argsort(-1) < max(1, round(MASKED_SHARE * shape[1]))
    dice = rng.random(shape)
    corrupt = np.where(dice < 0.8, MASK_TOKEN, np.where(dice < 0.9, noise, targets)).astype(
        np.int32
    )
    return {"tokens": np.where(mask, corrupt, targets), "targets": targets, "mask": mask}
