"""Files of curves, and the command that judges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from analysis.loss import main
from analysis.records.steps import Floats

STEPS = 120
FALLING = 1.5 + 4 * np.exp(-np.arange(STEPS) / 40)
NORMS = 1 + np.exp(-np.arange(STEPS) / 30)


def csv(path: Path, loss: Floats = FALLING, norm: Floats | None = NORMS, first: int = 0) -> Path:
    """Write the name of the run in every line, because no two runs write the same file."""
    columns = [np.arange(first, first + len(loss)), loss, *([norm] if norm is not None else [])]
    names = ("step", "loss", "grad_norm")[: len(columns)]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    lines = [",".join((*names, "run")), *(",".join((*map(repr, row), path.stem)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def noisy(path: Path, seed: int, share: float = 0.1, bias: float = 0.0, steps: int = STEPS) -> Path:
    random = np.random.default_rng(seed)
    loss = FALLING[:steps] + (random.normal(0, share, steps) + bias) * 1e-3
    return csv(path, loss, NORMS[:steps] * (1 + random.normal(0, share, steps) * 1e-2))


def judged(capsys: pytest.CaptureFixture[str], eager: Sequence[Path], graphed: Sequence[Path], *more: str) -> str:
    """Return the output, after checking that its first word and the exit code agree."""
    arguments = ["--eager", *map(str, eager), "--graphed", *map(str, graphed), *more]
    code, said = main(arguments), capsys.readouterr().out
    word = said.split()[0]
    assert code == {"BITWISE": 0, "EQUIVALENT": 0, "INCOMPARABLE": 3, "DIVERGED": 3, "INCONCLUSIVE": 4}[word]
    assert "provenance unchecked, replay unproven" in said
    return said


def with_value(values: Floats, at: int, value: float) -> Floats:
    changed = values.copy()
    changed[at] = value
    return changed


Change = Callable[[str], str]


def printed(path: Path, loss: Floats, decimals: int, norm: Floats | None = None, norm_decimals: int = 9) -> Path:
    """Print with this number of decimals."""
    norms = [""] * len(loss) if norm is None else [f",{value:.{norm_decimals}f}" for value in norm]
    rows = [f"{i},{value:.{decimals}f}{norms[i]},{path.stem}" for i, value in enumerate(loss)]
    path.write_text("\n".join([f"step,loss{'' if norm is None else ',grad_norm'},run", *rows]) + "\n")
    return path


def noise(seed: int, share: float = 1e-4) -> Floats:
    return np.random.default_rng(seed).normal(0, share, STEPS)
