"""The programs that a step passes to XLA do not change unseen.

`python tests/golden/digests.py` records them again.
"""

import json

import jax
import pytest
from golden.digests import CASES, FOLDER, digest, recorded_digests

pytestmark = pytest.mark.steps
QUICK = (
    *("unrolled whole after", "scanned whole overlap", "scanned state overlap"),
    *("a matrix at its owner", "accumulated shards", "buffers", "quantize", "local steps"),
)


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("case", CASES)
def test_plan_and_program_are_those_that_were_written_down(case: str):
    if not (digests := recorded_digests()):
        pytest.skip(f"digests are written down for other versions than JAX {jax.__version__}")
    assert digest(case) == digests[case]


def test_every_file_of_digests_has_all_configurations():
    files = sorted(FOLDER.glob("jax-*.json"))
    assert files and all(set(json.loads(file.read_text())) == set(CASES) for file in files)
