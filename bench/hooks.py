"""Communication hooks: how many bytes do they save, and how much accuracy do they cost? A ResNet on
handwritten digits, several seeds.

python bench/hooks.py [--quick]
"""

import sys
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))
import fddp
from bench.record import question, save
from fddp import hooks
from models import data, resnet

REPLICAS = 2
BATCH = 64
HOOKS: dict[str, fddp.Hook | None] = {
    "plain": None,
    "bf16": hooks.bf16(),
    "fp16": hooks.fp16(),
    "quantize": hooks.quantize(),
    "powersgd(2)": hooks.powersgd(2, start_step=20),
    "bf16(powersgd(4))": hooks.bf16(hooks.powersgd(4, start_step=20)),
    "topk(0.05)": hooks.topk(0.05),
}


def main() -> None:
    quick = question(__doc__, "10 steps of two hooks, one seed").parse_args().quick
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    fddp.init("local")
    steps, seeds = (10, 1) if quick else (300, 3)
    results = dict[str, Any]()
    for name in ("plain", "quantize") if quick else HOOKS:
        runs = [train(HOOKS[name], steps, seed) for seed in range(seeds)]
        accuracy = np.array([run[0] for run in runs]).round(3)
        results[name] = {"accuracy_percent": accuracy.tolist(), "bytes_a_step": runs[0][1]}
        share = runs[0][1] / results["plain"]["bytes_a_step"]
        print(f"{name:20} {accuracy} % accuracy, {share:.3f} of the bytes", flush=True)
    if not quick:
        settings = {"steps": steps, "replicas": REPLICAS, "batch": BATCH}
        print(save("hooks", settings | {"hooks": results}))


def train(hook: fddp.Hook | None, steps: int, seed: int) -> tuple[float, int]:
    """Accuracy on the held-out digits in percent, and the bytes that each replica sends in the last
    step."""
    model = resnet.PRESETS["18-digits"]
    images, labels, test_images, test_labels = data.split_digits()
    mean = images.mean()
    std = images.std()
    images, test_images = (
        ((x[..., None] - mean) / std).astype(np.float32) for x in (images, test_images)
    )
    rows = lambda chosen: {"image": images[chosen], "label": labels[chosen].astype(np.int32)}  # noqa: E731

    def accuracy(params: Any, batch: Any, model_state: Any) -> Any:
        logits = resnet.predict(model, params, model_state, batch["image"])
        return jnp.mean(jnp.argmax(logits, -1) == batch["label"])

    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))
    step = fddp.train_step(resnet.loss_fn(model), optimizer, has_aux=True, hook=hook)
    params, buffers = resnet.init(model, jax.random.key(seed), rows([0]))
    state = step.init(params, model_state=buffers)
    nbytes = 0
    for chosen in islice(fddp.samples(len(images), BATCH, seed=seed, drop_last=True), steps):
        state, info = step(state, rows(chosen))
        nbytes = info.sent
    tests = {"image": test_images, "label": test_labels.astype(np.int32)}
    return 100 * fddp.evaluate(accuracy, state, [tests]), int(np.sum(nbytes))


if __name__ == "__main__":
    main()
