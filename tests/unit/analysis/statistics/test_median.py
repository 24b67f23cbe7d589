"""Compare medians with NumPy's, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.statistics.median import medians


@pytest.mark.parametrize("shape", [(1,), (2,), (3, 1), (2, 5, 4), (3, 7), (1, 101)])
def test_medians_are_those_of_numpy(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(1).normal(size=shape) * 1e300
    np.testing.assert_array_equal(medians(values), np.median(values, axis=-1))
