"""Buckets: the plan that assigns every gradient to a message, and the packing of messages.

A plan is integers and names, computed once. `packing` follows it, and so do the layouts of shards,
of tensor-parallel parts and of the scalars behind a bucket. This room imports no
other.
"""

from fddp.buckets.assignment import make_plan
from fddp.buckets.bits import from_words, to_words
from fddp.buckets.device_parts import by_device, pack_device_parts, unpack_device_parts
from fddp.buckets.loop_rounds import fill_rounds
from fddp.buckets.messages import Messages, add_tail, place_scalars, scalar_dtype, take_tail
from fddp.buckets.packing import check_plan, pack, unpack, unpack_received
from fddp.buckets.plan import Bucket, BucketPlan, Leaf, Message, at_least, widened
from fddp.buckets.sent_leaves import Caps, MiB, Rows, SentLeaf, check_caps
from fddp.buckets.shard_packing import pack_parts, plan_of_parts, unpack_parts
from fddp.buckets.shards import Shard as Shard
from fddp.buckets.shards import ShardLayout, leaf_layout
from fddp.buckets.shards import insert_shards as insert_shards
from fddp.buckets.shards import is_shard as is_shard
from fddp.buckets.shards import leaves_with_shards as leaves_with_shards
from fddp.buckets.shards import map_shards as map_shards
from fddp.buckets.shards import shards_of as shards_of
from fddp.buckets.shards import split_shards as split_shards
from fddp.buckets.shards import whole_forms as whole_forms
from fddp.buckets.shards import with_shards as with_shards
from fddp.buckets.table_rows import plan_with_table_rows
