"""fddp sets parameters of malloc unless the user has; `on_ranks/start.py` claims their effect."""

import pytest

from fddp.runtime.freed_memory import keep_freed_memory


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_malloc_stays_as_the_user_has_set_it(name):
    assert not keep_freed_memory({name: "1"})
