"""Tables of a step: every column by its definition in exact arithmetic, rounded once; every parameter to its row."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from chunkc.runtime.update.rules import ROW_NUMEL, AdamHyper, Hyper, LionHyper, SgdHyper, row_of
from chunkc.runtime.update.update_inputs import INACTIVE, StepInputs, tables_of

HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True)


def exact_row(hyper: AdamHyper, step: int) -> list[float]:
    """The definitions over rational numbers; the square root is the only thing rounded on the way."""
    lr, beta1, beta2 = Fraction(hyper.lr), Fraction(hyper.beta1), Fraction(hyper.beta2)
    correction = Fraction(float(1 - beta2**step) ** 0.5)
    decay = 1 - lr * Fraction(hyper.weight_decay) if hyper.decoupled else Fraction(1)
    row = [lr / (1 - beta1**step) * correction, Fraction(hyper.eps) * correction, decay]
    row += [0 if hyper.decoupled else hyper.weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, step == 1]
    return [float(value) for value in row]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("step", [1, 2, 10, 1000, 20_000])
def test_rows_are_rounded_once_from_float64(step: int, decoupled: bool) -> None:
    hyper = replace(HYPER, decoupled=decoupled)
    rows, _ = tables_of(StepInputs({0: hyper}, {0: step}, 1))
    wanted = torch.tensor([exact_row(hyper, step)], dtype=torch.float64)
    assert rows.dtype is torch.float32
    assert rows.shape == (1, ROW_NUMEL)
    # One rounding to float32 is at most half a unit in the last place; float64's own errors are far below.
    assert bool(((rows.double() - wanted).abs() <= wanted.abs() * 2**-24 * (1 + 1e-6)).all())


def test_float32_arithmetic_would_lose_the_corrections_digits() -> None:
    one, beta2 = torch.tensor(1.0), torch.tensor(HYPER.beta2)
    rows, _ = tables_of(StepInputs({0: HYPER}, {0: 2}, 1))
    in_float32 = (one - beta2 * beta2).sqrt()
    assert abs(float(rows[0, 1]) - HYPER.eps * float(in_float32)) > 2**-20 * float(rows[0, 1])


@pytest.mark.parametrize(
    ("hyper", "step", "wanted"),
    [
        (SgdHyper(0.5, 0.75, 0.25, 0.125, nesterov=False), 1, [0.5, 0.125, 0.75, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0]),
        (SgdHyper(0.5, 0.75, 0.25, 0.125, nesterov=False), 2, [0.5, 0.125, 0.75, 0.75, 1.0, 0.0, 0.0, 0.0, 0.0]),
        (SgdHyper(0.5, 0.75, 0.0, 0.0, nesterov=True), 9, [0.5, 0.0, 0.75, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]),
        (SgdHyper(0.5, 0.0, 0.25, 0.0, nesterov=False), 2, [0.5, 0.0, 0.0, 0.75, 0.0, 0.0, 0.0, 0.0, 0.0]),
        (LionHyper(0.5, 0.75, 0.875, 0.25), 3, [0.5, 0.875, 0.75, 0.25, 0.875, 0.125, 0.0, 0.0, 0.0]),
    ],
)
def test_rows_of_other_rules(hyper: Hyper, step: int, wanted: list[float]) -> None:
    assert tables_of(StepInputs({0: hyper}, {0: step}, 1))[0].tolist() == [wanted]


def test_every_parameter_finds_its_row() -> None:
    slow, late = replace(HYPER, lr=1e-5), replace(HYPER, weight_decay=0.0)
    hypers = {0: HYPER, 2: slow, 3: replace(HYPER), 5: late, 6: HYPER}
    steps = {0: 4, 2: 4, 3: 4, 5: 1, 6: 3}
    rows, row_of_param = tables_of(StepInputs(hypers, steps, num_params=8))
    assert row_of_param.dtype is torch.int32
    assert row_of_param.shape == (8,)
    assert [i for i, row in enumerate(row_of_param.tolist()) if row == INACTIVE] == [1, 4, 7]
    for param, hyper in hypers.items():
        wanted = torch.tensor(row_of(hyper, steps[param]), dtype=torch.float64).float()
        assert torch.equal(rows[row_of_param[param]], wanted)
    assert rows.shape[0] == 4  # parameters 0 and 3 share theirs
    assert row_of_param[0] == row_of_param[3]


def test_a_step_without_active_parameters_has_a_row_to_read() -> None:
    rows, row_of_param = tables_of(StepInputs({}, {}, 2))
    assert rows.shape == (1, ROW_NUMEL)
    assert row_of_param.tolist() == [INACTIVE, INACTIVE]


def test_step_counts_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="start at 1, not 0"):
        tables_of(StepInputs({0: HYPER}, {0: 0}, 1))
