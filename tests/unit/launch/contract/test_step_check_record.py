"""How large a difference rounding explains."""

import pytest

from launch.contract.records.step_check import TensorDifference, noise_multiple


@pytest.mark.parametrize(
    ("noise", "largest", "multiple"),
    [
        (1e-7, 1e-6, 100.0),
        (5e-6, 1e-5, 100.0),
        (5e-5, 5e-5, 10.0),
        (1e-3, 1e-2, 6.0),
        (1e-2, 0.16, 6.0),
        (1e-2, 0.17, 30.0),
        (1e300, 1e300, 30.0),
    ],
)
def test_the_multiple_of_the_noise_that_is_rounding(noise: float, largest: float, multiple: float) -> None:
    assert noise_multiple(noise, largest) == pytest.approx(multiple)


def test_what_may_not_change_is_a_fault_if_it_does() -> None:
    assert TensorDifference("weight", 1e-9, noise=1e-7, multiple=0.0).is_fault
    assert not TensorDifference("weight", 0.0, noise=1e-7, multiple=0.0).is_fault
