"""The options of `train_step` and `value_and_grad`, with DDP's names, and their checks."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from textwrap import indent
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, get_args

from fddp.buckets import Caps, check_caps
from fddp.hooks import Hook
from fddp.step.combinations import WHOLE_LEAVES, refuse
from fddp.step.foreign_options import refuse_unknown
from fddp.wording import check_choice, check_has, check_whole

Function = TypeVar("Function", bound=Callable[..., Any])

# Types that the keyword arguments and the record of options share.
Order: TypeAlias = Literal["ready", "reverse"]
ScheduleName: TypeAlias = Literal["auto", "overlap", "after", "eager"]
Buffers: TypeAlias = bool | Literal["mean"]
Shared: TypeAlias = Literal["optimizer", "state"]
Ignore: TypeAlias = Callable[[str], bool]

CHOICES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("find_unused_parameters", "skip_nonfinite", "donate"), (True, False)),
    "order": get_args(Order),
    "schedule": get_args(ScheduleName),
    "shard": (*get_args(Shared), None),
    "broadcast_buffers": (True, False, "mean"),
}

# The line on options in a docstring, which `explained` extends.
OPTIONS = "**options: fields of `fddp.Options`, named as DDP names them."


class OptionArguments(TypedDict, total=False):
    """The fields of `Options` as keyword arguments, for editors and type checkers.

    Python cannot derive one class from the other, so a test compares them.
    """

    bucket_cap_mb: Caps
    first_bucket_mb: float
    last_bucket_mb: float
    order: Order
    accumulation_steps: int
    find_unused_parameters: bool
    broadcast_buffers: Buffers
    hook: Hook | None
    ignore: Ignore | None
    skip_nonfinite: bool
    check_replicas_every: int
    schedule: ScheduleName
    shard: Shared | None
    virtual_replicas: int | None
    donate: bool


@dataclass(frozen=True)
class Options:
    """Keyword arguments of `train_step` and `value_and_grad`: buckets, accumulation, communication.

    Attributes:
      bucket_cap_mb (25): size in MiB at which a bucket is closed; 0: one leaf per bucket. A
        sequence lists the cap of each bucket, its last entry the cap of all later ones, and
        overrides the next two options.
      first_bucket_mb (1): cap of the first bucket in MiB; small, so that traffic starts early.
      last_bucket_mb (1): cap of the last bucket in MiB; small, so that little traffic remains after
        the backward pass.
      order ('ready'): 'ready': the order in which the gradients' program produces them; 'reverse':
        the leaves in reverse, DDP's guess.
      accumulation_steps (1): micro-batches per step, synchronized once. With `shard` the gradients
        of each micro-batch are scattered, so that only shards accumulate.
      find_unused_parameters (False): find the parameters that no replica used in a step, and leave
        them and their optimizer state unchanged.
      broadcast_buffers (True): source of the model state for the next forward pass. True: replica
        0; 'mean': the mean over replicas (integers: replica 0); False: each replica's own. Under
        `fddp.join` only replicas with data count.
      hook (None): the sum of each bucket, from `fddp.hooks` or your own `fddp.Hook`; None: the
        plain sum.
      ignore (None): a function that returns True for the path ('Dense_0/kernel') of a frozen
        parameter, which is neither sent nor trained.
      skip_nonfinite (False): skip a step, on all ranks, if its mean gradients are not all finite:
        only the step number changes (and the scale of `fddp.dynamic_scale`). The rank at fault
        prints the name of the gradient.
      check_replicas_every (0): compare the parameters and the optimizer state of all ranks before
        the first step and after every so many steps. A difference, such as a flipped bit, raises on
        all ranks and names rank and leaf. 0: never.
      schedule ('auto'): 'overlap': a bucket leaves as soon as it is ready, and its update runs
        before the wait for the next; 'after': all buckets leave after the backward pass, as a
        baseline; 'eager': as 'overlap', but a step on CPU processes returns before its last sums
        arrive, and they travel under the next forward pass; it returns a `StateInFlight`; 'auto':
        'overlap'.
      shard (None): 'optimizer': each replica holds a shard of the optimizer state and updates that
        shard of the parameters (ZeRO stage 1), with the bytes of an all-reduce; 'state': it also
        holds only a shard of the parameters, which are gathered in the order of the forward pass
        (stage 3, except that they stay gathered until the backward pass ends); None: each replica
        holds and updates everything. The optimizer must work element by element, except for norms.
        `fddp.whole(state)` joins the shards.
      virtual_replicas (None): number of slices of the rows, computed separately and added in a
        fixed order. Training then gives the same bits on any number of replicas that divides it.
        None: one slice per replica, added in the fastest order.
      donate (True): let a step of `train_step` reuse the memory of its input state. The input's
        arrays are then deleted, even if the step fails, also for other objects that share them:
        copy those first (`from_nnx(…).module(state)` makes a new Flax module), or give False.

    Raises:
      ValueError: a value out of its range; the message names the option and the valid values.
      TypeError: `hook` is not a `Hook`, or `ignore` is not a function.
    """

    bucket_cap_mb: Caps = 25
    first_bucket_mb: float = 1
    last_bucket_mb: float = 1
    order: Order = "ready"
    accumulation_steps: int = 1
    find_unused_parameters: bool = False
    broadcast_buffers: Buffers = True
    hook: Hook | None = None
    ignore: Ignore | None = field(default=None, repr=False)
    skip_nonfinite: bool = False
    check_replicas_every: int = 0
    schedule: ScheduleName = "auto"
    shard: Shared | None = None
    virtual_replicas: int | None = None
    donate: bool = True

    def __post_init__(self) -> None:
        check_caps(self.bucket_cap_mb, self.first_bucket_mb, self.last_bucket_mb)
        check_whole("accumulation_steps", self.accumulation_steps, 1)
        check_whole("check_replicas_every", self.check_replicas_every, 0)
        if self.virtual_replicas is not None:
            check_whole("virtual_replicas", self.virtual_replicas, 1)
        if self.hook is not None:
            check_has("by_element", "hook", self.hook, "a fddp.Hook, such as one of fddp.hooks")
        if self.ignore is not None:
            check_has("__call__", "ignore", self.ignore, "a function of a leaf's path")
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        refuse(self.features)

    @property
    def features(self) -> dict[str, str]:
        """The features of these options: name in `combinations` → text for an error message."""
        features = dict[str, str]()
        for option in fields(self):
            value = getattr(self, option.name)
            text = f"{option.name}={value!r}"
            if value:
                features[option.name] = text
            if option.name in ("schedule", "shard", "broadcast_buffers"):
                features[text] = text
        if self.hook is not None and not self.hook.by_element:
            features[WHOLE_LEAVES] = features["hook"]
        return features


def name_of(function: Callable[..., Any]) -> str:
    """Names a function, or the function of a `functools.partial`, equally on all ranks."""
    function = inspect.unwrap(getattr(function, "func", function))
    return getattr(function, "__name__", type(function).__name__)


def explained(function: Function) -> Function:
    """Adds the attributes of `Options` to a function's docstring, for a complete `help`."""
    options = inspect.getdoc(Options)
    text = inspect.getdoc(function)
    if options and text:  # None under python -OO
        attributes = options.partition("Attributes:\n")[2].partition("\n\n")[0]
        expanded = f"{OPTIONS.removesuffix('.')}, with their defaults:\n{indent(attributes, '  ')}"
        function.__doc__ = text.replace(OPTIONS, expanded)
    return function


def read_options(call: str, arguments: Mapping[str, Any]) -> Options:
    """Makes `Options` from the keyword arguments of a call; error messages name `call`."""
    refuse_unknown(call, arguments, [option.name for option in fields(Options)])
    return Options(**arguments)


def with_some_new(options: Options, new: Mapping[str, Any]) -> Options:
    """Replaces options of a step; raises ValueError for those that change a state's layout."""
    refuse_unknown("TrainStep.with_options", new, [option.name for option in fields(Options)])
    fixed = {"shard", "virtual_replicas"}
    if options.shard:
        fixed.add("ignore")
    if fixed := fixed.intersection(new):
        raise ValueError(
            "with_options cannot change the layout of a state, got "
            f"{', '.join(sorted(fixed))}: use train_step, "
            "and begin with step.init(fddp.whole(state.params))."
        )
    return replace(options, **new)
