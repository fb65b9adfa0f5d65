"""Groups that take the buckets in turn are those of the same replicas; `on_ranks/round_robin.py`
has the claims on ranks."""

import pytest

import fddp


def test_no_groups_are_an_error_and_groups_of_other_devices_too(group):
    with pytest.raises(ValueError, match="at least one group, got none"):
        fddp.round_robin([])
    with pytest.raises(ValueError, match=r"group 0 is 2 replicas .*, group 2 is 4 replicas"):
        fddp.round_robin([group(2), group(2), group(4)])
