"""Models to train: plain Flax, as a user would write them. None of them knows of the library.

Every module offers the same five names: the linen module, `PRESETS`, `init`, `loss_fn` and `batch`.
"""

from models import bert as bert
from models import gpt as gpt
from models import mlp as mlp
from models import resnet as resnet
