"""Sizes in refusals of modelled systems are in units in which they can be read."""

import pytest

from chunkc.baselines.outcome import size


@pytest.mark.parametrize(
    ("nbytes", "text"), [(20 * 2**20, "20.0 MiB"), (2**30, "1.0 GiB"), (2**30 - 2**20, "1023.0 MiB"), (0, "0.0 MiB")]
)
def test_a_size_has_the_unit_of_its_value(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
