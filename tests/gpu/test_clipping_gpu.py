"""Case 5 on a GPU: clipping by the global norm equals torch's, wherever updates run."""

from __future__ import annotations

import pytest
from clipping import NAME, PLACES, check_clipping, telling_norm
from rig import GetRig

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("place", PLACES)
def test_clipping_equals_torch(place: str, rig_of: GetRig) -> None:
    check_clipping(rig_of(NAME), place, telling_norm())
