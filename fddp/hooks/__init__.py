"""Hooks that sum a message over replicas: plainly, in few bits, sparsely, or with low rank.

Hooks compose: `bf16(powersgd(4))` sends PowerSGD's factors in 16 bits. A hook's memory has the
units of its step, Σ w·g, and is added to the next step's gradients whatever their weights. Memory
that was added to the sum of a parameter is lost if no replica used the parameter. This room imports
buckets and comm.

Source: `ddp_comm_hooks` in PyTorch.
"""

from fddp.hooks.adasum import adasum as adasum
from fddp.hooks.collective import all_reduce as all_reduce
from fddp.hooks.few_bits import quantize as quantize
from fddp.hooks.half_precision import bf16 as bf16
from fddp.hooks.half_precision import fp16 as fp16
from fddp.hooks.half_precision import noop as noop
from fddp.hooks.hook import GradBucket as GradBucket
from fddp.hooks.hook import Hook as Hook
from fddp.hooks.hook import allreduce as allreduce
from fddp.hooks.low_rank import powersgd as powersgd
from fddp.hooks.reductions import Memory as Memory
from fddp.hooks.reductions import Reduction as Reduction
from fddp.hooks.reductions import all_finite as all_finite
from fddp.hooks.reductions import by_leaf as by_leaf
from fddp.hooks.reductions import by_message as by_message
from fddp.hooks.reductions import gathered as gathered
from fddp.hooks.reductions import per_device as per_device
from fddp.hooks.reductions import plain as plain
from fddp.hooks.reductions import reductions as reductions
from fddp.hooks.reductions import scattered as scattered
from fddp.hooks.reductions import summed as summed
from fddp.hooks.topk import topk as topk
