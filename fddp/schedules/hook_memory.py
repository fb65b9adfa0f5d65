"""The hooks' memory after a step, which the next step's messages read.

A message continues the memory of the last message with its index: of this step if a bucket is
scattered once per micro-batch, else of the last step. If messages are still under way when a step
returns, their memory is promised, as the state is. The next step's messages leave after them, so
that none waits for such a promise.
"""

from concurrent.futures import Future

import jax

from fddp.hooks import Memory
from fddp.jax_internals import Promise, awaited
from fddp.schedules.launcher import Launched


def remembered(launched: Launched, memory: Memory) -> Memory:
    """The memory after all messages; unchanged if a hook's sum is not finite."""
    arrived = list(launched.arrived.values())  # another thread may add to the dict
    if all(message.finite for message in arrived):
        return tuple(launched.memory[index] for index in range(len(memory)))
    return jax.tree.map(awaited, memory)


def promised_memory(launched: Launched, job: Future[None], memory: Memory) -> Memory:
    """Promises of the memory that `job` leaves once it has sent all messages, or of its error."""
    promises = jax.tree.map(lambda x: Promise(jax.ShapeDtypeStruct(x.shape, x.dtype)), memory)

    def fulfil(job: Future[None]) -> None:
        error = job.exception()
        if error is None:
            new = jax.tree.map(awaited, remembered(launched, memory))
            jax.tree.map(lambda promise, x: promise.set_result(x), promises, new)
        else:
            for promise in jax.tree.leaves(promises):
                promise.set_exception(error)

    job.add_done_callback(fulfil)
    return promises
