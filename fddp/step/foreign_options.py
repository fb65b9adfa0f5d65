"""Answers to unknown options: misspelt names and options of other libraries."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

LEAVE = "leave it out, "
PRECISION = "give the loss as fddp.mixed_precision(loss_fn, jnp.bfloat16)"
CLIPPING = "put optax.clip_by_global_norm into the optimizer, which sees mean gradients"
LATE = "give schedule='eager': a step returns before its last all-reduces end"
SHARD = "give shard='optimizer' (ZeRO-1) or shard='state' (FSDP)"

# Replacements for the options of DistributedDataParallel, and then of other libraries.
ANSWERS = {
    "static_graph": LEAVE + "the program is known before it runs",
    "gradient_as_bucket_view": LEAVE + "buckets are XLA's own memory",
    "lazy_bucket_allocation": LEAVE + "XLA holds a bucket's memory only while it is used",
    "dim": LEAVE + "the rows of a batch lie along its first dim",
    "process_group": "give group=, from fddp.init() or group.subgroup(ranks)",
    **dict.fromkeys(
        ("groups", "num_groups"), "give bucket_cap_mb=[…], with the cap of each bucket in order"
    ),
    "bucket_cap_mb_list": "give bucket_cap_mb=[…], with the cap of each bucket in order",
    "batched_grad_copy": LEAVE + "XLA copies all gradients of a bucket at once",
    "forward_sync_buffers": "give broadcast_buffers=, and step.init gives all ranks rank 0's",
    "skip_all_reduce_unused_params": LEAVE + "a parameter without a path to the loss is never sent",
    "check_reduction": LEAVE + "PyTorch ignores it too",
    "require_manual_backward_finalization": LATE,
    "init_sync": LEAVE + "step.init compares the ranks and gives all of them rank 0's values",
    "delay_all_reduce_named_params": "not in fddp",
    "param_to_hook_all_reduce": "not in fddp",
    **dict.fromkeys(
        ("device_ids", "output_device", "devices"), LEAVE + "the devices are the group's"
    ),
    **dict.fromkeys(("device_mesh", "mesh"), "give group=fddp.mesh_group(mesh, axis)"),
    **dict.fromkeys(("mixed_precision", "precision", "mp_policy"), PRECISION),
    **dict.fromkeys(("comm_hook", "ddp_comm_hook"), "give hook=, one of fddp.hooks"),
    "gradient_accumulation_steps": "give accumulation_steps=",
    "accumulate_grad_batches": "give accumulation_steps=",
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val"), CLIPPING),
    **dict.fromkeys(("fsdp", "fsdp_plugin", "sharding_strategy"), SHARD),
    **dict.fromkeys(("ignored_params", "ignored_states", "ignored_modules"), "give ignore="),
    "reshard_after_forward": "give shard='state', which gathers the parameters once a step",
    "param_init_fn": "give step.init the arrays, jax.jit(make)()",
    "sync_batchnorm": "use BatchNorm(axis_name=group.axis_name) in the module",
    "even_batches": "iterate over fddp.join(batches)",
    **dict.fromkeys(("cpu_offload", "offload_policy"), "not in fddp"),
}


def refuse_unknown(call: str, arguments: Iterable[str], names: Sequence[str]) -> None:
    """Raises TypeError, with a suggestion, for arguments that are not options."""
    unknown = [name for name in arguments if name not in names]
    if not unknown:
        return
    answers = [answer for name in unknown if (answer := _answer(name, names))]
    if len(answers) < len(unknown):
        answers.append(f"it has {', '.join(names)}")
    text = f"fddp.{call} has no option {', '.join(map(repr, unknown))}; {'; '.join(answers)}."
    raise TypeError(text.replace("?.", "?"))


def _answer(name: str, names: Sequence[str]) -> str:
    """Suggests a replacement for an option of another library, or a similar name, else ""."""
    if name in ANSWERS:
        return f"{name}: {ANSWERS[name]}"
    close = get_close_matches(name, [*names, *ANSWERS], n=1)
    if not close:
        return ""
    suggestion = close[0]
    if suggestion in ANSWERS:
        suggestion += f" ({ANSWERS[suggestion]})"
    return f"{name}: did you mean {suggestion}?"
