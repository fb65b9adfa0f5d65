"""Buckets: the plan that assigns every gradient to a message, and the packing of messages.

A plan is integers and names, computed once. `packing` follows it, and so do the layouts of shards,
of tensor-parallel parts and of the scalars behind a bucket. This room imports no
other.
"""

from fddp.buckets.assignment import make_plan as make_plan
from fddp.buckets.bits import from_words as from_words
from fddp.buckets.bits import sub_byte as sub_byte
from fddp.buckets.bits import to_words as to_words
from fddp.buckets.device_parts import by_device as by_device
from fddp.buckets.device_parts import pack_device_parts as pack_device_parts
from fddp.buckets.device_parts import unpack_device_parts as unpack_device_parts
from fddp.buckets.loop_rounds import cut_in_layers as cut_in_layers
from fddp.buckets.loop_rounds import fill_rounds as fill_rounds
from fddp.buckets.loop_rounds import plan_with_rounds as plan_with_rounds
from fddp.buckets.messages import Messages as Messages
from fddp.buckets.messages import add_tail as add_tail
from fddp.buckets.messages import scalar_dtype as scalar_dtype
from fddp.buckets.messages import take_tail as take_tail
from fddp.buckets.packing import check_plan as check_plan
from fddp.buckets.packing import pack as pack
from fddp.buckets.packing import unpack as unpack
from fddp.buckets.packing import unpack_received as unpack_received
from fddp.buckets.plan import Bucket as Bucket
from fddp.buckets.plan import BucketPlan as BucketPlan
from fddp.buckets.plan import Leaf as Leaf
from fddp.buckets.plan import Message as Message
from fddp.buckets.plan import at_least as at_least
from fddp.buckets.plan import widened as widened
from fddp.buckets.scalar_carrier import place_scalars as place_scalars
from fddp.buckets.sent_leaves import Caps as Caps
from fddp.buckets.sent_leaves import MiB as MiB
from fddp.buckets.sent_leaves import Rows as Rows
from fddp.buckets.sent_leaves import SentLeaf as SentLeaf
from fddp.buckets.sent_leaves import check_caps as check_caps
from fddp.buckets.shard_layout import ShardLayout as ShardLayout
from fddp.buckets.shard_layout import leaf_layout as leaf_layout
from fddp.buckets.shard_packing import pack_parts as pack_parts
from fddp.buckets.shard_packing import plan_of_parts as plan_of_parts
from fddp.buckets.shard_packing import unpack_parts as unpack_parts
from fddp.buckets.shards import Shard as Shard
from fddp.buckets.shards import insert_shards as insert_shards
from fddp.buckets.shards import is_shard as is_shard
from fddp.buckets.shards import leaves_with_shards as leaves_with_shards
from fddp.buckets.shards import map_shards as map_shards
from fddp.buckets.shards import shards_of as shards_of
from fddp.buckets.shards import split_shards as split_shards
from fddp.buckets.shards import whole_forms as whole_forms
from fddp.buckets.shards import with_shards as with_shards
from fddp.buckets.table_rows import plan_with_table_rows as plan_with_table_rows
