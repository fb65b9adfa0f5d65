"""The options of `train_step` and `value_and_grad`, named as DDP names them, checked where they are given."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from textwrap import indent
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, get_args

from fddp.buckets import Caps, Groups, check_caps, group_keys
from fddp.hooks import Hook
from fddp.optim import check_needs
from fddp.schedules import Schedule
from fddp.step.combinations import OWN_SCHEDULE, WHOLE_LEAVES, refuse
from fddp.step.foreign_options import refuse_unknown
from fddp.wording import check_whole

Function = TypeVar("Function", bound=Callable[..., Any])

# Types of options, once for what a call is given and once for the record that is made of it.
Order: TypeAlias = Literal["ready", "reverse"]
ScheduleName: TypeAlias = Literal["auto", "fused", "held", "unordered", "staged", "eager", "after"]
Buffers: TypeAlias = bool | Literal["mean"]
Shared: TypeAlias = Literal["optimizer", "state"]
Ignore: TypeAlias = Callable[[str], bool]

ORDERS = get_args(Order)
SCHEDULES = get_args(ScheduleName)
SHARED = get_args(Shared)
SWITCHES = (
    *("find_unused_parameters", "skip_all_reduce_unused_params", "skip_nonfinite"),
    *("reshard_after_forward", "donate"),
)

# How the docstring of a function that takes options ends its line about them.
OPTIONS = "**options: fields of `fddp.Options`, named as DDP names them."


class OptionArguments(TypedDict, total=False):
    """The fields of `Options` as keyword arguments, which editors and type checkers know by this.

    Python cannot derive one from the other; a test holds them equal.
    """

    bucket_cap_mb: Caps
    first_bucket_mb: float
    last_bucket_mb: float
    groups: Groups | None
    order: Order
    accumulation_steps: int
    find_unused_parameters: bool
    broadcast_buffers: Buffers
    skip_all_reduce_unused_params: bool
    hook: Hook | None
    ignore: Ignore | None
    skip_nonfinite: bool
    check_replicas_every: int
    schedule: ScheduleName | Schedule
    shard: Shared | None
    reshard_after_forward: bool
    virtual_replicas: int | None
    donate: bool


@dataclass(frozen=True, repr=False)
class Options:
    """Options of bucketing, accumulating and sending: the keyword arguments of `train_step` and `value_and_grad`.

    Attributes:
      bucket_cap_mb (25): a bucket is closed as soon as it holds so many MiB; 0: one leaf per bucket. A sequence has the
        cap of each bucket in turn, the last one for all that follow; the two below then say nothing.
      first_bucket_mb (1): cap of the first bucket, MiB: traffic starts early.
      last_bucket_mb (1): cap of the last bucket, MiB: little is left when the backward pass ends.
      groups (None): a function from the path ('Dense_0/kernel') of a parameter to the key of its group, any that is
        hashable, or to None: what has one key travels in one bucket, for each dtype, whatever the caps say.
      order ('ready'): 'ready': as the gradients' program delivers them; 'reverse': the reverse of the leaves, DDP's
        guess.
      accumulation_steps (1): micro-batches a step; one synchronization for all of them. With `shard` the gradients of
        each are scattered, so that only parts of them add up.
      find_unused_parameters (False): whether to find the parameters that no replica used in a step, and leave them and
        their optimizer state alone.
      broadcast_buffers (True): whose model state every replica has at the next forward: True: replica 0's; 'mean': the
        mean of all (of floats; of integers replica 0's); False: each its own. Under `fddp.join` those of replicas that
        still have data.
      skip_all_reduce_unused_params (False): whether buckets that no replica used are not sent; needs
        `find_unused_parameters`. Which these are is agreed on in one tiny all-reduce before the first bucket leaves.
      hook (None): what is done with each bucket in place of the plain sum: one of `fddp.hooks`, or the user's own.
      ignore (None): a function that is true for the path ('Dense_0/kernel') of a parameter that is to be left alone:
        neither sent nor trained.
      skip_nonfinite (False): whether a step whose mean gradients are not all finite changes nothing but the number of
        the step (and the scale of `fddp.dynamic_scale`), on all ranks; the rank that made them so says whose gradient.
      check_replicas_every (0): before the first step and after so many ranks compare a digest of each parameter and of
        the optimizer's state; a difference, a flipped bit say, is an error on all, which names rank and leaf. 0: never.
      schedule ('auto'): 'fused': one program; 'held': the same, but all updates wait until the last bucket leaves;
        'unordered': the same, but XLA chooses the order of the buckets, which all ranks must compile alike
        (`fddp.tune` estimates which of the three hides the most on a GPU); 'staged': cut where buckets become ready;
        'eager': the same, and a step returns before its last sums are back (with shard='state': before its parameters
        are gathered): they come under the next one's forward pass; 'after': traffic last; 'auto' picks, never 'eager':
        `fddp.tune` measures whether that is faster. Or a function that makes a schedule of a step's pieces
        (`fddp.schedules.Schedule`).
      shard (None): 'optimizer': each replica holds a part of the optimizer's state and updates that part of the
        parameters (ZeRO, stage 1), with the bytes of an all-reduce; 'state': it holds a part of the parameters too,
        which are gathered in the order in which the forward pass uses them (stage 3, but that they stay until the
        backward pass ends); None: each holds and updates all. For an optimizer that works element by element, but for
        norms; `fddp.whole(state)` puts a state together.
      reshard_after_forward (False): with shard='state', whether parameters are dropped behind the forward pass, and
        gathered again for the backward pass, each time a bucket before they are read: so no more than two buckets,
        or layers under `lax.scan`, are whole at once, for half as many bytes again (FSDP's name).
      virtual_replicas (None): how many slices of the rows are computed by themselves and added in a fixed order, so
        that training gives the same bits on any number of replicas that divides it; None: as many as there are
        replicas, added in whatever order is the fastest.
      donate (True): whether a step of `train_step` may reuse the memory of the state it is given, which is then gone,
        even if the step fails: what else holds its arrays then finds that they have been deleted. Copy before what is
        to stay (a Flax module is got by `from_nnx(…).module(state)`), or give False.

    Raises:
      ValueError: a value out of its range; the message says which and what to give.
      TypeError: `ignore` or `groups` is no function.
    """

    bucket_cap_mb: Caps = 25
    first_bucket_mb: float = 1
    last_bucket_mb: float = 1
    groups: Groups | None = field(default=None, repr=False)
    order: Order = "ready"
    accumulation_steps: int = 1
    find_unused_parameters: bool = False
    broadcast_buffers: Buffers = True
    skip_all_reduce_unused_params: bool = False
    hook: Hook | None = None
    ignore: Ignore | None = field(default=None, repr=False)
    skip_nonfinite: bool = False
    check_replicas_every: int = 0
    schedule: ScheduleName | Schedule = "auto"
    shard: Shared | None = None
    reshard_after_forward: bool = False
    virtual_replicas: int | None = None
    donate: bool = True

    def __post_init__(self) -> None:
        check_caps(self.bucket_cap_mb, self.first_bucket_mb, self.last_bucket_mb)
        check_whole("accumulation_steps", self.accumulation_steps, 1)
        every = self.check_replicas_every
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ValueError(f"check_replicas_every must be a whole number of steps, or 0 for never, got {every!r}.")
        for name, choices in (("order", ORDERS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in choices and not (name == "schedule" and callable(self.schedule)):
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}.")
        if self.hook is not None and not isinstance(self.hook, Hook):
            raise TypeError(f"hook must be a fddp.Hook, one of fddp.hooks say, got {type(self.hook).__name__}.")
        if self.ignore is not None and not callable(self.ignore):
            raise TypeError(f"ignore must be a function of a leaf's path, got {type(self.ignore).__name__}.")
        group_keys((), self.groups)
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if not isinstance(self.broadcast_buffers, bool) and self.broadcast_buffers != "mean":
            raise ValueError(f"broadcast_buffers must be True, False or 'mean', got {self.broadcast_buffers!r}.")
        if self.shard not in (None, *SHARED):
            raise ValueError(f"shard must be 'optimizer', 'state' or None, got {self.shard!r}.")
        count = self.virtual_replicas
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ValueError(f"virtual_replicas must be a whole number of 1 or more, or None, got {count!r}.")
        refuse(self.asked)
        if self.reshard_after_forward and self.shard != "state":
            raise ValueError(
                f"reshard_after_forward=True drops parameters that rest in shards, and got shard={self.shard!r}: give "
                "shard='state', or leave it out."
            )
        if self.skip_all_reduce_unused_params and not self.find_unused_parameters:
            raise ValueError("skip_all_reduce_unused_params=True needs find_unused_parameters=True as well.")

    @property
    def asked(self) -> dict[str, str]:
        """The features that were asked for, by their names in `combinations`, and how each was given."""
        shown = {option.name: f"{option.name}={getattr(self, option.name)!r}" for option in fields(self)}
        features = {name: shown[name] for name in shown if getattr(self, name)}
        features |= {shown[name]: shown[name] for name in ("schedule", "shard", "broadcast_buffers")}
        if self.hook is not None and not self.hook.by_element:
            features[WHOLE_LEAVES] = features["hook"]
        return features | ({OWN_SCHEDULE: f"schedule={name_of(self.schedule)}"} if callable(self.schedule) else {})

    def __repr__(self) -> str:
        """Equal on ranks that were given the same options: functions by their names."""
        shown = {option.name: getattr(self, option.name) for option in fields(self) if option.repr}
        names = [f"{name}={name_of(value) if callable(value) else repr(value)}" for name, value in shown.items()]
        return f"Options({', '.join(names)})"

    @property
    def bucketing(self) -> dict[str, Any]:
        """The arguments of `make_plan`."""
        return {name: getattr(self, name) for name in ("bucket_cap_mb", "first_bucket_mb", "last_bucket_mb", "groups")}


def name_of(function: Callable[..., Any]) -> str:
    """A name that is equal on all ranks; a `functools.partial` has that of its function."""
    function = inspect.unwrap(getattr(function, "func", function))
    return getattr(function, "__name__", type(function).__name__)


def explained(function: Function) -> Function:
    """Adds to the docstring of a function what `Options` says of each option, so that its `help` is complete."""
    options = inspect.getdoc(Options)
    text = inspect.getdoc(function)
    if options and text:  # python -OO takes them away
        attributes = options.partition("Attributes:\n")[2].partition("\n\n")[0]
        told = f"{OPTIONS.removesuffix('.')}, with their defaults:\n{indent(attributes, '  ')}"
        function.__doc__ = text.replace(OPTIONS, told)
    return function


def read_options(call: str, given: Mapping[str, Any]) -> Options:
    """Makes options of a call's keyword arguments.

    Args:
      call: name of the function that was called.
      given: its keyword arguments.

    Returns:
      The options.

    Raises:
      TypeError: there is no such option.
      ValueError: a value out of its range.
    """
    refuse_unknown(call, given, [option.name for option in fields(Options)])
    return Options(**given)


def check_optimizer(call: str, value: Any) -> None:
    """Says of something that it is no optimizer of optax's, or one that wants more than a step knows."""
    if not hasattr(value, "init") or not hasattr(value, "update"):
        # Flax's optimizers and train states hold one.
        inside = "; pass its .tx" if hasattr(value, "tx") else ""
        raise TypeError(f"fddp.{call}: optimizer must be one of optax's, got {type(value).__name__}{inside}.")
    check_needs(value)


def with_some_new(options: Options, new: Mapping[str, Any]) -> Options:
    """Replaces some options of a step whose state stays as it is.

    Args:
      options: those of the step.
      new: some others, by name.

    Returns:
      The options.

    Raises:
      ValueError: one of them says how a state is held.
      TypeError: there is no such option.
    """
    refuse_unknown("TrainStep.with_options", new, [option.name for option in fields(Options)])
    fixed = {"shard", "virtual_replicas", *(["ignore"] if options.shard else [])}
    if fixed := fixed.intersection(new):
        raise ValueError(
            "with_options keeps how a state is held, got "
            f"{', '.join(sorted(fixed))}: use train_step, "
            "and begin with step.init(fddp.whole(state.params))."
        )
    return replace(options, **new)
