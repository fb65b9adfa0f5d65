"""The hooks' memory behind a step, which the next step's messages are given.

A message reads what the message of the same place has left: of this step, where a bucket is scattered once for each
micro-batch, else of the step before. Where messages are still under way when a step returns, what they leave is
promised, as the state is. The next step's messages leave behind them, so that none of these waits for a promise.
"""

from concurrent.futures import Future

import jax

from fddp.hooks import Memory
from fddp.schedules.launcher import Launched
from fddp.schedules.queues import Promise, awaited


def remembered(done: Launched, memory: Memory) -> Memory:
    """The memory when all messages are back.

    Args:
      done: a list whose messages are over.
      memory: what it was given, or promises of it.

    Returns:
      What its messages have left; what it was given, if one of the hooks' sums is not finite.
    """
    if all(one.finite for one in list(done.sent.values())):  # gathers may still be added to it
        return tuple(done.memory[place] for place in range(len(memory)))
    return jax.tree.map(awaited, memory)


def promised_memory(done: Launched, job: Future[None], memory: Memory) -> Memory:
    """The memory when all messages are back, as promises.

    Args:
      done: a list whose messages are under way.
      job: sends them.
      memory: what the list was given, or promises of it.

    Returns:
      Promises; they hold the error, if the messages fail.
    """
    promises = jax.tree.map(lambda x: Promise(x.form if isinstance(x, Promise) else _form(x)), memory)

    def keep(job: Future[None]) -> None:
        error = job.exception()
        if error is None:
            jax.tree.map(lambda promise, x: promise.set_result(awaited(x)), promises, remembered(done, memory))
        for promise in jax.tree.leaves(promises) if error else ():
            promise.set_exception(error)

    job.add_done_callback(keep)
    return promises


def _form(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
