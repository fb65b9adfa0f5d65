"""XLA's options for the programs of replicas."""

import jax

# By default XLA merges all buckets into one all-reduce, scatter or gather: on CPU without a limit,
# on GPU up to 30 MiB. XLA:CPU drops barriers before it orders instructions; ranks with different
# programs would then call collectives in different orders, and offsets would be constants of their
# kernels. It compiles loops of less than 1 KiB as small calls, and aborts at a barrier inside of
# such a loop (`jax.checkpoint` in a scan).
CPU_OPTIONS = {
    "xla_disable_hlo_passes": "cpu-all-reduce-combiner,cse_barrier_expander,"
    "small-while-loop-hoisting"
}
# XLA of JAX 0.11.1 has its own kernels for all-reduces of a few MiB between GPUs of a host, and
# computes nothing during those of 16 bits: their traffic is not hidden. The option leaves them to
# NCCL; earlier versions do not know it.
OVERLAP_OPTIONS = dict[str, str]()
# With these options a loop awaits the messages of a round in the next round, and gathers the inputs
# of a round in the round before. JAX 0.11.1 renamed them.
PIPELINED = "xla_gpu_enable_pipelined_{}"
ON = "True"
if jax.__version_info__ >= (0, 11, 1):
    OVERLAP_OPTIONS["xla_gpu_experimental_use_collective_kernels"] = ""
    PIPELINED = "xla_gpu_pipeline_{}"
    ON = "COLLECTIVE_PIPELINING_MODE_ON"
PIPELINED_ROUNDS = dict.fromkeys(
    map(PIPELINED.format, ("all_reduce", "all_gather", "reduce_scatter")), ON
)
# On GPUs before Hopper XLA's scheduler overlaps nothing by default. By default ranks also share the
# timing of kernels when they compile. A rank that compiles alone (a shorter batch, another branch,
# a program that the others found in JAX's cache) would wait for them forever.
GPU_OPTIONS = {
    "xla_gpu_all_reduce_combine_threshold_bytes": "0",
    "xla_gpu_reduce_scatter_combine_threshold_bytes": "0",
    "xla_gpu_all_gather_combine_threshold_bytes": "0",
    "xla_gpu_enable_latency_hiding_scheduler": "True",
    "xla_gpu_shard_autotuning": "False",
    **PIPELINED_ROUNDS,
    **OVERLAP_OPTIONS,
}
