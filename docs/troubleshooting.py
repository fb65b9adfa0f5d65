"""Writes docs/troubleshooting.md: the messages that users of fddp meet, by symptom.

    uv run python docs/troubleshooting.py

A message is a part of a text in the sources of fddp, with … for each value that is formatted into
it. A message that the sources do not contain is an error (`unknown`), so that a changed message
changes this page.
"""

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"

INTRODUCTION = (
    "Search this page for a part of your error message. In a message … stands for a value, such as "
    "a rank or a shape. Errors contain the current value and usually the remedy; this page adds "
    "the cause. If only some ranks fail in a call that all ranks make, all ranks raise an error "
    "that quotes the message of each failed rank.",
    "`python -m fddp doctor`, started exactly as your script, shows the launcher, the backends and "
    "the missing packages.",
)


class Fault(NamedTuple):
    """A message with its cause and its cure, in Markdown."""

    message: str
    cause: str
    cure: str


SYMPTOMS = (
    Fault(
        "Every process prints everything, and `group.size` is 1.",
        "The processes are not connected: each trains alone.",
        "Compare the variables of [the launchers](launching.md#launchers) with the output of "
        "`doctor`.",
    ),
    Fault(
        "Under MPI, a group of `fddp.mesh_group` has size 1.",
        "Under MPI a process sees its own devices alone, so its meshes do not reach other ranks.",
        "Use the group of `fddp.init()`, or start the ranks over Gloo: "
        "`python -m fddp run --by processes`.",
    ),
    Fault(
        "Installing `mpi4jax` ends with `cuda_runtime.h: No such file or directory`.",
        "The host has `nvcc`, and the compiler does not find the headers of CUDA.",
        "`export CUDA_PATH=/usr/local/cuda`, the folder of the toolkit; see "
        "[installing](installing.md#mpi).",
    ),
    Fault(
        "An error raised inside the loss (`equinox.error_if`, a callback) hangs on several devices "
        "of one process.",
        "One device stops, and the others wait for it in an all-reduce of the same program, as in "
        "plain JAX. Between processes the error ends all ranks.",
        "While you look for the error: one device, `JAX_NUM_CPU_DEVICES=1`.",
    ),
    Fault(
        "The loss or the gradient depends on the number of replicas.",
        "The loss is not a mean over its rows, or it uses statistics of the rows of one replica.",
        "Call [`fddp.check`](sharp-bits.md#the-loss) on the loss.",
    ),
    Fault(
        "Two processes are slower than one process.",
        "The link is slow, the bucket cap does not fit it, or the processes compete for cores.",
        "Call `fddp.measure(step, state, batches)`, which shows where the time goes; see "
        "[bucket cap](performance.md).",
    ),
    Fault(
        "The first step takes minutes.",
        "JAX compiles.",
        "Set `JAX_COMPILATION_CACHE_DIR`: the next start reads the compiled programs.",
    ),
    Fault(
        "A job hangs, and the watchers print nothing.",
        "The first step has no time limit, and the watchers do not see inside a step.",
        "See [the time limits](faults.md#one-number). After the end "
        "`python -m fddp flight FOLDER` compares the ranks.",
    ),
)

HANGS = (
    Fault(
        "nothing has moved for … s",
        "A rank waits in a step, and no rank makes progress. The message names the late rank and "
        "its line in the script.",
        "Look at that line. Call `fddp.alive()` in long loops between steps, or give "
        "`fddp.init(stall_s=)` a larger value.",
    ),
    Fault(
        "rank … died …",
        "The process ended without a Python error: out of memory, a crash in native code, "
        "`kill -9`.",
        "Read the kernel's log (`dmesg`) of that host, and restart from the last checkpoint.",
    ),
    Fault(
        "give each rank equally many batches, or use fddp.join",
        "A rank has finished its loop, and other ranks wait for it in the next step.",
        "Distribute the rows with `fddp.samples`, or iterate over `fddp.join(batches)`.",
    ),
    Fault(
        "The ranks are in different calls",
        "A rank makes a call that the others do not make: it alone saves, evaluates, or with "
        "`shard='state'` calls `no_sync` more often.",
        "Make the same calls in the same order on each rank.",
    ),
    Fault(
        "has finished and waits for it",
        "A rank failed, is stopped or is lost after other ranks had finished.",
        "Read the first part of the line: it names that rank and its condition.",
    ),
    Fault(
        "has not been heard of, … (its host, or the network)",
        "The host of that rank is down, or the network to it.",
        "Check both. In a container see [PID 1](faults.md#in-a-container).",
    ),
    Fault(
        "does not run Python … (a debugger, or a call that blocks the interpreter)",
        "A call into native code does not release Python's interpreter lock.",
        "Check the named call.",
    ),
    Fault(
        "… ends because of …",
        "Another rank failed; the line quotes its error.",
        "Read the traceback of that rank.",
    ),
    Fault(
        "… failed as the others did",
        "All ranks raised an error; only rank 0 prints the traceback.",
        "Read the output of rank 0.",
    ),
    Fault(
        "an earlier error inside a step left this rank at another message",
        "The script caught an error of a step, and called a step again.",
        "Let the error end the script, and restart it.",
    ),
    Fault(
        "ranks differ in their …",
        "Ranks have different parameters, batches, options or programs. The differences follow.",
        "Run the same script with the same options and the same seed on all ranks.",
    ),
    Fault(
        "compiled collectives (does the loss branch in Python, for example by rank?)",
        "The compiled steps of the ranks have different collectives.",
        "Remove branches on `group.rank` from the loss.",
    ),
    Fault(
        "A bit has flipped, or only one rank has changed its state",
        "`check_replicas_every` has detected different states. The message names rank and leaf.",
        "Continue from an earlier checkpoint. Change a state on all ranks alike.",
    ),
    Fault(
        "step … was skipped",
        "With `skip_nonfinite=True` a gradient was NaN or infinite; the state is unchanged.",
        "Look at the named gradient, or lower the learning rate.",
    ),
)

START = (
    Fault(
        "so this process trains alone",
        "The launcher's variables do not contain the number of processes or an address.",
        "Set the variables that the line names.",
    ),
    Fault(
        "but this is one process: start it with srun",
        "The Slurm script starts Python without `srun`.",
        "Write `srun python train.py` into the script.",
    ),
    Fault(
        "ranks … of … have not come",
        "These ranks have not reached `fddp.init`: they import, wait for a host or have failed.",
        "Read their output. If they need longer, give `fddp.init(timeout_s=)` a larger value.",
    ),
    Fault(
        "connection refused, no process listens there yet",
        "Rank 0 has not reached `fddp.init`, or the address is not that of rank 0.",
        "Check `FDDP_COORDINATOR` and the output of rank 0.",
    ),
    Fault(
        "the name … does not resolve",
        "This host does not know the host name in the address of rank 0.",
        "Give the IP address of rank 0 in `FDDP_COORDINATOR`.",
    ),
    Fault(
        "the process at this address is not rank 0 of this job, or its FDDP_SECRET differs",
        "Another job uses the port, or the ranks have different secrets.",
        "Choose another port on all ranks; give all ranks the same `FDDP_SECRET`.",
    ),
    Fault(
        "on CPUs has a known fault, …",
        "Some programs compute wrong numbers, crash or are very slow with the installed jaxlib.",
        "Install the jaxlib that `python -m fddp doctor` names, or set the option in `XLA_FLAGS`, "
        "which also silences the line.",
    ),
    Fault(
        "if they are left over from another launch, unset them, or call fddp.init('local')",
        "The process has a rank by its environment, perhaps of a launcher that has ended.",
        "Unset the variables that the message lists, or start the other ranks.",
    ),
    Fault(
        "has started this process, which has inherited its variables",
        "A rank has started a script that uses fddp too.",
        "Call `fddp.init('local')` in it, or start ranks by `fddp.launch`.",
    ),
    Fault(
        "does not lead to an address of this host",
        "Gloo of your own `jax.distributed` listens at the address of the host's name.",
        "Add the name to `/etc/hosts`, or let `fddp.init` connect the processes.",
    ),
    Fault(
        "MPICH may crash with a bus error below",
        "MPICH's memory is in `/dev/shm`, which containers limit to 64 MiB.",
        "`docker run --shm-size=1g`, or `python -m fddp run --by processes`.",
    ),
    Fault(
        "rank 0 cannot listen there (…)",
        "The port is in use, or the address belongs to another host.",
        "Set another address on all ranks: `FDDP_COORDINATOR=host:port`.",
    ),
    Fault(
        "rank 0 says that there are … processes, rank … that there are …",
        "The ranks read different numbers of processes.",
        "Set `FDDP_SIZE` to the same number on all ranks.",
    ),
    Fault(
        "two processes claim to be rank …",
        "Two processes have the same rank, or an older job still runs.",
        "Give each process a different `FDDP_RANK`; end the older job.",
    ),
    Fault(
        "JAX had started before fddp.init was called",
        "The script created an array, a random key or called `jax.devices()` before `fddp.init`, "
        "or a module that it imports does: gymnax, for example.",
        "Call `fddp.init()` first, before such imports; create NumPy arrays before it, not JAX "
        "arrays.",
    ),
    Fault(
        "fddp.init was called before with (backend, rank, size, coordinator, elastic) = …",
        "JAX connects to other processes only once in the life of a process.",
        "Use the first group. In a notebook restart the kernel, or use `fddp.launch`.",
    ),
    Fault(
        "no address of rank 0 comes from …: set FDDP_COORDINATOR=host:port",
        "The launcher states rank and size, but no address.",
        "Set `FDDP_COORDINATOR` to the address of rank 0, on all ranks.",
    ),
    Fault(
        "given but not …; set FDDP_RANK and FDDP_SIZE.",
        "Only some of the variables of a start by hand are set.",
        "Set both variables on each rank.",
    ),
    Fault(
        "this is rank … of … according to …, and rank … of … according to MPI",
        "`mpiexec` belongs to another MPI than mpi4py, so each process is alone in its MPI world.",
        "Use the `mpiexec` that `python -m fddp doctor` names.",
    ),
    Fault(
        "says … ranks, MPI …: backend 'gloo'.",
        "As above; fddp uses Gloo instead, and training continues.",
        "Nothing, or use the `mpiexec` of mpi4py's MPI.",
    ),
    Fault(
        "backend 'mpi' drives one device per process, and this process has …",
        "The process has several devices, for example from `JAX_NUM_CPU_DEVICES`.",
        "Start one process per device, or use `fddp.init('gloo')`.",
    ),
    Fault(
        "backend 'gloo' connects CPUs, and JAX uses …",
        "JAX has GPUs here, and Gloo would be given their arrays.",
        "Set `JAX_PLATFORMS=cpu` to train on CPUs, or leave the backend to `fddp.init()`.",
    ),
    Fault(
        "backend 'nccl' needs GPUs, and JAX finds none here",
        "JAX is installed without CUDA, or `JAX_PLATFORMS` excludes the GPUs.",
        "Install `jax[cuda13]`, or leave the backend to `fddp.init()`.",
    ),
    Fault(
        "fddp.shutdown: backend 'mpi' ends with the process",
        "MPI starts only once per process.",
        "End the script, or use `fddp.init('gloo')`.",
    ),
)

PACKAGES = (
    Fault(
        "backend 'mpi' needs …, not installed here",
        "The backend needs mpi4py, mpi4jax and an MPI.",
        "Install the named packages, or use `fddp.init('gloo')`.",
    ),
    Fault(
        "mpi4jax does not work with mpi4py's MPI and this jaxlib",
        "mpi4jax was compiled for another MPI, or with a newer jaxlib.",
        "Run the command that `python -m fddp doctor` prints.",
    ),
    Fault(
        "mpiexec is not installed",
        "`python -m fddp run --by mpiexec` finds no `mpiexec`.",
        "Install MPICH or Open MPI, or use `--by processes`.",
    ),
    Fault(
        "compiling for GPUs needs the package …, not installed here",
        "An audit for a target needs XLA's compiler for GPUs.",
        "Run the command in the message; the compiler needs no GPU.",
    ),
    Fault(
        "does not belong to jax …",
        "The compiler for GPUs and JAX have different versions.",
        "Run the command in the message.",
    ),
    Fault(
        "XLA cannot compile for … here",
        "JAX has already started for another platform, or the plugin failed.",
        "Start Python with `JAX_PLATFORMS=cpu`, or import fddp before JAX computes anything.",
    ),
)

LAUNCH = (
    Fault(
        "and its arguments cannot be sent to another process (…)",
        "`fddp.launch` pickles the function. A function of a notebook, a lambda and an inner "
        "function cannot be pickled.",
        "Move the function into a module, or `pip install cloudpickle`.",
    ),
    Fault(
        "the result of … cannot be pickled; return arrays, for example, or fddp.whole(state)",
        "The function returned a closure, a lock or another object that stays in its process.",
        "Return arrays and numbers.",
    ),
    Fault(
        "ranks … of … have not ended in time",
        "`fddp.launch(timeout_s=)` has ended ranks that ran longer.",
        "Read their output; give a longer time if the ranks were making progress.",
    ),
)

BATCHES = (
    Fault(
        "a batch of … rows cannot be divided into … equal parts",
        "The rows of a process must be a multiple of its replicas × `accumulation_steps`.",
        "Change the batch size, or drop the last partial batch, as `fddp.samples` does.",
    ),
    Fault(
        "the arrays of a batch must have equally many rows",
        "The first dims of the arrays differ: a constant or a graph stands next to the rows.",
        "Close the loss over constants; give graphs as [`fddp.Stacked`](graphs.md#any-tree).",
    ),
    Fault(
        "a batch has 0 rows",
        "The rows of this rank have ended.",
        "Use `fddp.join`, or pad with rows of weight 0 in `fddp.Weighted`.",
    ),
    Fault(
        "the batch is empty: got …",
        "The batch has no arrays.",
        "Give a tree of arrays, such as a dict or a tuple.",
    ),
    Fault(
        "the batch holds Python lists of numbers",
        "JAX reads a list as a tree of single numbers.",
        "Convert it with `np.asarray`.",
    ),
    Fault(
        "the batch holds leaves that are not numeric",
        "The batch has strings or objects, such as file names.",
        "Remove them from the batch before the step.",
    ),
    Fault(
        "pass the same first rows: does each read different rows?",
        "Several ranks train on the same rows, so that they compute the same gradient.",
        "Let each rank read different rows: [rows of a process]"
        "(training.md#which-rows-a-process-reads).",
    ),
    Fault(
        "are different programs. That is right for a branch by rank",
        "The losses of ranks have other operations: a branch in Python, or arrays in the order "
        "of a set of strings, which differs between processes.",
        "Sort the names, or use a dict. The remark is harmless if the branch is intended.",
    ),
    Fault(
        "it counts the rows of all processes, and each reads the same number",
        "`fddp.samples` takes the batch size of all processes together.",
        "Give a multiple of the number of processes.",
    ),
    Fault(
        "this batch has other arrays than the first batch",
        "A later batch has other keys or dtypes, so that the loss uses other parameters.",
        "Give all batches the same form; or create a step for each form.",
    ),
    Fault(
        "join: no batch at all on rank …",
        "This rank has no rows in the epoch.",
        "Give every rank at least one batch.",
    ),
    Fault(
        "fddp.evaluate: no rank has a batch",
        "The iterable is empty, for example an iterator that was already used.",
        "Create the iterable again for each evaluation.",
    ),
    Fault(
        "a batch may be cut only along its first dim",
        "A global array of the batch is sharded along another dim.",
        "Shard the batch along its rows only.",
    ),
)

LOSS = (
    Fault(
        "The loss is not a mean over its rows",
        "`fddp.check` reports a sum, a norm, or statistics of the rows of one replica.",
        "Return the mean, or `fddp.Weighted(mean, number)`.",
    ),
    Fault(
        "the loss must be a scalar, got …",
        "The loss returns a value per row.",
        "Return `jnp.mean(…)` of these values.",
    ),
    Fault(
        "the loss must return one number, got a tuple",
        "The loss returns metrics too.",
        "Give `has_aux=True`.",
    ),
    Fault(
        "the loss must return …, got …",
        "With `has_aux=True` or `model_state=` the result has another form.",
        "Return the form in the message: [the loss](training.md#the-state-and-the-loop).",
    ),
    Fault(
        "the loss must return a model_state of the structure it was given",
        "The loss adds or removes a buffer.",
        "Return the same tree with new values.",
    ),
    Fault(
        "must be a float to be averaged over replicas",
        "A metric in `aux` is an integer or a bool.",
        "Cast it to float32: metrics are averaged over all rows.",
    ),
    Fault(
        "must be a loss, a function of parameters and batch, got the module …",
        "`train_step` takes a loss, not a Flax module.",
        "Use `fddp.from_nnx(module, loss)` or `fddp.from_linen(module, loss)`.",
    ),
    Fault(
        "the module draws random numbers, as dropout does",
        "The module needs a random key in each step.",
        "`step.init(params, rng=jax.random.key(0))`",
    ),
    Fault(
        "the module has buffers",
        "The module has buffers, such as the averages of BatchNorm.",
        "`step.init(net.params, model_state=net.model_state)`",
    ),
    Fault(
        "the loss has a collective over the axis …",
        "The loss names an axis that the group does not have.",
        "Use `group.axis_name`.",
    ),
    Fault(
        "the loss has effects in an order (…), which JAX runs on one device only",
        "The loss has calls of mpi4jax, or prints or callbacks with `ordered=True`.",
        "Use `jax.lax.pmean` over `group.axis_name`, or MPI; leave out `ordered=True`.",
    ),
    Fault(
        "which this backend does not support: use backend 'gloo' or 'nccl'",
        "MPI lacks this collective.",
        "Use `fddp.init('gloo')`, or another collective.",
    ),
    Fault(
        "a loss closes over a Ref (jax.new_ref)",
        "A step cannot change an array outside of its state.",
        "Return the value as `model_state` or in `aux`.",
    ),
)

OPTIONS = (
    Fault(
        "… does not work with …",
        "The two features exclude each other.",
        "See [the table of combinations](combinations.md).",
    ),
    Fault(
        "has no option …",
        "The name belongs to another library, or is misspelled.",
        "Use the name in the message.",
    ),
    Fault(
        "the optimizer's update needs …, which a step does not have",
        "The optimizer evaluates the loss itself, as a line search does.",
        "Use an optimizer without it, such as `optax.lbfgs(0.1, linesearch=None)`.",
    ),
    Fault(
        "is a random key, which nothing can train",
        "The parameters contain a random key.",
        "Give it as `step.init(params, rng=key)`.",
    ),
    Fault(
        "these parameters are not those of the model of this step",
        "The script uses one step for two models, shapes or dtypes.",
        "Create a step for each model.",
    ),
    Fault(
        "dynamic_scale cannot remove its scale from a float16 gradient",
        "The parameters are float16.",
        "Store them in float32, and compute with `fddp.mixed_precision`.",
    ),
)

STATE = (
    Fault(
        "this state is used up",
        "A step has reused the memory of this state for the next state.",
        "Continue with the returned state, or give `donate=False`.",
    ),
    Fault(
        "state must be a fddp.TrainState, got …",
        "The step got parameters, or the pair `(state, info)`.",
        "Begin with `step.init(params)`, and write `state, info = step(state, batch)`.",
    ),
    Fault(
        "must be a tree of arrays, and holds a fddp.…",
        "A state was given in place of parameters.",
        "Give `fddp.whole(state.params)`.",
    ),
    Fault(
        "the state belongs to another optimizer",
        "The state belongs to a step with another optimizer or another `ignore=`.",
        "Begin with `step.init(fddp.whole(state.params))`.",
    ),
    Fault(
        "the state is in shards, and this step has no shard=",
        "The state is of a step with `shard=`.",
        "Give the new step the same `shard=`, or `fddp.whole(state)`.",
    ),
    Fault(
        "the state is not in shards of … replicas",
        "The state is whole, and the step has `shard=`.",
        "Continue with the state of `step.init` or of the last step, or from a checkpoint.",
    ),
    Fault(
        "the state is in shards that … hold",
        "The state is of a group of other replicas.",
        "Save it there, and restore it here (`fddp.Checkpoints`).",
    ),
    Fault(
        "is not an array: replicas hold its parts",
        "A leaf in shards was used as an array.",
        "`fddp.whole(state)` returns arrays; all ranks call it.",
    ),
    Fault(
        "the state has gradients pending of … replicas",
        "The number of replicas has changed between `no_sync` and the step.",
        "Synchronize with a step before.",
    ),
    Fault(
        "the state's hook_state is not that of …",
        "The state is of a step with another hook, or of another number of replicas.",
        "Use the original hook, or `hook_state` of a new `step.init(params)`.",
    ),
    Fault(
        "this step cannot be called under jax.jit, grad or vmap",
        "Its first batch has not settled it, or it is differentiated or mapped.",
        "Run one step before, or call it from Python "
        "([sharp bits](sharp-bits.md#ranks-and-threads)).",
    ),
)

SHARDS = (
    Fault(
        "gives each replica a part of every leaf, and this optimizer's update cannot be divided so",
        "The update mixes several leaves, or its state has another form than the parameters.",
        "Use [another optimizer](optimizers.md), or leave `shard` out.",
    ),
    Fault(
        "has nothing to share: no more than one number is trained",
        "The parameters have a single element.",
        "Leave `shard` out.",
    ),
    Fault(
        "with shard each replica updates its part, and the optimizer has a collective",
        "The optimizer averages gradients itself.",
        "Remove the collective: the gradients are averaged already.",
    ),
)

MESHES = (
    Fault(
        "a replica is one device without a mesh",
        "The loss has `jax.shard_map` or a sharding constraint, and its replica is one device.",
        "Leave out that line, or use [`fddp.mesh_group`](several-devices.md).",
    ),
    Fault(
        "a loss or an optimizer closes over …",
        "The array is sharded over a mesh, and each replica needs all of it.",
        "Close over a replicated array (`PartitionSpec()`), or pass its rows in the batch.",
    ),
    Fault(
        "the mesh has axes …, none is …",
        "`fddp.mesh_group` does not find the axis of the replicas.",
        "Give its name: `fddp.mesh_group(mesh, 'data')`.",
    ),
    Fault(
        "and a process supplies the rows of whole replicas",
        "The devices of a replica belong to several processes.",
        "Place the other axes of the mesh inside processes.",
    ),
    Fault(
        "the mesh has devices of processes …, none of this one",
        "This process has no device in the mesh.",
        "Create the group only on processes of the mesh.",
    ),
)

CHECKPOINTS = (
    Fault(
        "none of the checkpoints in … is whole",
        "Files of each checkpoint are missing or damaged; the list follows.",
        "Restore a copy of the folder; to start from scratch move the checkpoints away.",
    ),
    Fault(
        "is of another training: it has …, and lacks …",
        "The names, shapes or dtypes of the saved state differ from those of the step.",
        "Use the original model and optimizer, or another folder.",
    ),
    Fault(
        "as rank 0 does, or may not write there",
        "Each rank writes its part of a state in shards, and the folder is local to a host.",
        "Give a folder on a shared file system.",
    ),
    Fault(
        "the checkpoint of step … could not be written",
        "Writing failed in the background: the disk is full, or the folder is gone.",
        "Correct the named cause; older checkpoints are intact.",
    ),
    Fault(
        "nothing is saved at step …, because gradients are pending",
        "`save(state, now=True)` between `step.no_sync` and the step that synchronizes.",
        "Save after that step.",
    ),
    Fault(
        "path must be a folder of a file system",
        "The path is a URL of an object store, or empty.",
        "Give the mount point of the bucket.",
    ),
    Fault(
        "cannot be restored, so give a state from step.init",
        "The checkpoint is of another number of replicas, each with a hook's memory or buffers.",
        "`checkpoints.restore(step.init(params))`, not `step.shapes`.",
    ),
    Fault(
        "Checkpoints.save: place must be what JSON can hold",
        "`place=` has arrays or objects.",
        "Give numbers, strings, lists and dicts.",
    ),
)

OBSERVERS = (
    Fault(
        "an audit reads XLA's collectives, and cannot read messages between CPU processes",
        "Between CPU processes messages are calls of fddp, not collectives of XLA.",
        "Give a target.",
    ),
)

GROUPS = {
    "A job hangs, waits or ends": (
        "[When a rank dies, hangs or leaves](faults.md) explains these lines in detail.",
        HANGS,
    ),
    "Ranks do not meet": ("[Launching](launching.md) lists launchers and variables.", START),
    "A package is missing": ("", PACKAGES),
    "Notebooks and `fddp.launch`": (
        "[From Python](launching.md#from-python) shows a call in a notebook.",
        LAUNCH,
    ),
    "Batches and rows": ("", BATCHES),
    "The loss": ("", LOSS),
    "Options, parameters and optimizers": ("", OPTIONS),
    "The state": ("", STATE),
    "States in shards": ("[Sharding](sharding.md) explains the options.", SHARDS),
    "Meshes of JAX": ("", MESHES),
    "Checkpoints": ("[Checkpoints](checkpoints.md) describes the files.", CHECKPOINTS),
    "Audit, tune and measure": ("", OBSERVERS),
}


def main() -> None:
    PAGE.write_text(page())
    print(PAGE.relative_to(ROOT))


def page() -> str:
    """The page, in Markdown."""
    if missing := unknown():
        raise ValueError(f"messages that no source of fddp contains: {missing}")
    texts = ["# Troubleshooting", *(fill(text, 120) for text in INTRODUCTION)]
    texts += ["## Without an error", table("symptom", SYMPTOMS)]
    for title, (introduction, faults) in GROUPS.items():
        messages = [fault._replace(message=f"`{fault.message}`") for fault in faults]
        texts += [f"## {title}", introduction, table("message", messages)]
    return "\n\n".join(filter(None, texts)) + "\n"


def table(head: str, faults: Sequence[Fault]) -> str:
    rows = [f"| {' | '.join(fault)} |" for fault in faults]
    return "\n".join([f"| {head} | cause | cure |", "|---|---|---|", *rows])


def unknown() -> list[str]:
    """The messages of the page that the sources do not contain."""
    texts = sources()
    return [
        fault.message
        for _, faults in GROUPS.values()
        for fault in faults
        if fault.message not in texts
    ]


@cache
def sources() -> str:
    """The texts of all programs of fddp."""
    programs = [ast.parse(path.read_text()) for path in sorted((ROOT / "fddp").rglob("*.py"))]
    return "\n".join(text for program in programs for text in messages(program))


def messages(node: ast.AST) -> Iterator[str]:
    """The texts of a program, with … for each formatted value; docstrings are not among them."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.JoinedStr):
        yield "".join(x.value if isinstance(x, ast.Constant) else "…" for x in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from messages(child)


if __name__ == "__main__":
    main()
