"""Test reading the files of programs and loggers as curves: logs, event files of TensorBoard, and the state of a
Trainer."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from analysis.curves.curve import CurveError
from analysis.curves.log_settings import settings_in_line
from analysis.curves.run_file import read_run
from launch.contract.metric_names import texts_in_line

LOSSES, NORMS = [2.5, 2.25, 1.125], [1.5, 0.75, 0.5]
STEPS = list(zip(range(1, 4), LOSSES, NORMS, strict=True))
LOGS = {
    "megatron.log": " iteration {:8d}/ 3 | lm loss: {:.6E} | grad norm: {:.3f} | number of nan iterations: 0 |\n",
    "titan.out": "[titan] \x1b[31mstep: {:2d}  \x1b[32mloss: {:8.5f}  \x1b[33mgrad_norm: {:.4f}  mfu: 1.00%\n",
    "slurm-7.txt": 'loading\n{{"step": {}, "loss": {}, "grad_norm": {}}}\nvalidation loss: 9.0\n',
}


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def _field(number: int, content: bytes | int) -> bytes:
    if isinstance(content, int):
        return _varint(number << 3) + _varint(content)
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _event(step: int, tag: str, value: float, *, tensor: bool) -> bytes:
    """Return a framed record: a plain value, or the tensor that newer writers use."""
    plain = _varint(2 << 3 | 5) + struct.pack("<f", value)
    number = _field(8, _field(1, 1) + _field(5, struct.pack("<f", value))) if tensor else plain
    event = (
        _varint(1 << 3 | 1)
        + struct.pack("<d", 1.0)
        + _field(2, step)
        + _field(5, _field(1, _field(1, tag.encode()) + number))
    )
    return struct.pack("<Q", len(event)) + bytes(4) + event + bytes(4)


def write_events(path: Path, *, tensor: bool = False) -> Path:
    tags = [("train/loss", 1), ("grad-norm", 2), ("lm loss vs samples", 1)]
    rows = (_event(row[0], tag, row[place], tensor=tensor) for row in STEPS for tag, place in tags)
    path.write_bytes(b"".join(rows))
    return path


def shown(path: Path) -> list[tuple[int, float, float]]:
    steps = read_run(path).steps
    return list(zip(steps.step.tolist(), steps.loss.tolist(), steps.grad_norm.tolist(), strict=True))


@pytest.mark.parametrize("name", LOGS)
def test_logs_are_read_as_the_observer_reads_lines(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("".join(LOGS[name].format(*row) for row in STEPS))
    assert shown(tmp_path / name) == STEPS


def test_a_log_without_numbers_of_steps_counts_them(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(
        "".join(f"{{'loss': {loss}, 'grad_norm': {norm}}}\n" for _, loss, norm in STEPS)
    )
    assert [step for step, _, _ in shown(tmp_path / "train.log")] == [0, 1, 2]


BAR = "\r 3%|#  | {}/40 [00:01<00:09,  9.8it/s, loss={}]"


def test_a_progress_bar_that_is_drawn_again_shows_no_other_step(tmp_path: Path) -> None:
    drawn = [(1, 2.5), (2, 2.5), (2, 2.25), (3, 1.125), (3, 1.125), (1, 1.0)]
    (tmp_path / "train.log").write_text("".join(BAR.format(*at) for at in drawn))
    assert [row[:2] for row in shown(tmp_path / "train.log")] == [(0, 2.5), (1, 2.25), (2, 1.125), (3, 1.0)]


def test_a_progress_bar_that_leaves_out_steps_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(BAR.format(1, 2.5) + BAR.format(3, 2.25))
    with pytest.raises(CurveError, match="progress bar goes from 1 to 3; log the loss of every step"):
        read_run(tmp_path / "train.log")
    (tmp_path / "numbered.log").write_text("step 1 loss 2.5" + BAR.format(1, 2.5) + BAR.format(3, 2.25))
    assert [row[:2] for row in shown(tmp_path / "numbered.log")] == [(1, 2.5)]


def test_a_log_without_a_loss_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("epoch 1 train_loss_step=2.5\n")
    with pytest.raises(CurveError, match="no line shows a loss by a usual name"):
        read_run(tmp_path / "train.log")


def test_a_log_with_numbers_of_steps_has_other_losses_too(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(
        "loss: 9.0\nstep 5 loss 2.5\nstep 6 loss 2.25\naverage of the epoch: loss 2.3\n"
    )
    assert [row[:2] for row in shown(tmp_path / "train.log")] == [(5, 2.5), (6, 2.25)]


def test_a_log_that_shows_each_step_twice_is_refused(tmp_path: Path) -> None:
    """Else 60 steps would be EQUIVALENT as 120."""
    (tmp_path / "train.log").write_text("".join(f"loss {loss}\n" * 2 for loss in LOSSES) + "loss 1.0\n")
    with pytest.raises(CurveError, match="line 2: the same numbers as line 1, and so on; keep one line of each step"):
        read_run(tmp_path / "train.log")


@pytest.mark.parametrize("last", ["step 2 loss 1.1", "step 2 loss 1.", '{"step": 2, "loss": 1.1'])
def test_a_log_that_ends_within_a_number_is_refused(tmp_path: Path, last: str) -> None:
    """The whole number may be 1.125."""
    path = tmp_path / "train.log"
    path.write_text("step 1 loss 2.25\n" + last)
    with pytest.raises(CurveError, match=r"train.log, line 2: the file ends in '.*1\..*; end this line, or delete it"):
        read_run(path)
    path.write_text("step 1 loss 2.25\nstep 2 loss 1.125 |")
    assert [row[:2] for row in shown(path)] == [(1, 2.25), (2, 1.125)]


def test_carriage_returns_do_not_count_as_lines(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_bytes(
        b"step 1 loss 2.5\r\n 1%| | 1/9 \r 2%| | 2/9 \rstep 2 loss 2.25\r\nstep 3 loss 2,5\r\n"
    )
    with pytest.raises(CurveError, match=r"x\.log, line 3: 'loss 2,5' has a comma"):
        read_run(tmp_path / "x.log")


def test_a_byte_that_is_not_utf_8_costs_no_log_and_no_digit(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"caf\xe9 3\xb5s\nstep 1 loss 2.5\n|\xe2\x96\nstep 2 loss 2.25\nstep 2 loss 1.\xff25\n")
    assert [row[:2] for row in shown(path)] == [(1, 2.5), (2, 2.25)]


@pytest.mark.parametrize("name", ["x.log", "x.csv"])
def test_a_file_of_utf_16_says_so(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("step,loss\n1,2.5\n", encoding="utf-16")
    with pytest.raises(CurveError, match=f"{name}: UTF-16 and not UTF-8 text; convert it to UTF-8"):
        read_run(tmp_path / name)


@pytest.mark.parametrize("tensor", [False, True])
def test_scalars_of_an_event_file_are_read_to_the_last_whole_record(tmp_path: Path, tensor: bool) -> None:
    path = write_events(tmp_path / "events.out.tfevents.1.host", tensor=tensor)
    assert shown(path) == shown(tmp_path) == STEPS
    path.write_bytes(path.read_bytes() + struct.pack("<Q", 99) + bytes(20))
    assert shown(path) == STEPS, "a torn record is what a killed program leaves"


def test_a_step_that_a_restarted_run_repeats_is_refused(tmp_path: Path) -> None:
    path = write_events(tmp_path / "x.tfevents.1")
    path.write_bytes(path.read_bytes() + _event(2, "train/loss", 1.0, tensor=False))
    with pytest.raises(CurveError, match="train/loss appears twice at step 2"):
        read_run(path)


@pytest.mark.parametrize(
    "said", ["loss 2,0123", "loss: 1.234,5 ", "iteration 1,024 | loss: 2.5", "grad norm = 1,5 loss 2"]
)
def test_a_number_with_a_comma_is_refused_and_not_cut(tmp_path: Path, said: str) -> None:
    (tmp_path / "x.log").write_text(f"samples: 1,024\nstep 1 loss 2.5 samples 1,024\n{said}\n")
    with pytest.raises(CurveError, match=r"x.log, line 3: '.*,.*' has a comma; write"):
        read_run(tmp_path / "x.log")
    assert not {"loss", "step"} & texts_in_line("step 2,1 loss 2,0123").keys()


def test_a_step_of_thousands_of_digits_is_not_printed(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"step": "' + "9" * 4000 + '", "loss": 2}\n')
    with pytest.raises(CurveError, match=r"not a whole number") as caught:
        read_run(tmp_path / "x.jsonl")
    assert "(4,002 characters)" in str(caught.value) and len(str(caught.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("  seed ............................................ 1234", {"seed": "1234"}),
        ("{'seed': 7, 'train_batch_size': 64, \"max_seq_length\": 4096}", {"seed": "7", "batch_size": "64", "sequence_length": "4096"}),
        ("  Total train batch size (w. parallel, distributed & accumulation) = 64", {"batch_size": "64"}),
        ("train.py --lr 6.0e-4 --lr-decay-style cosine --lr_warmup 3 --data_seed 9", {"learning_rate": "6.0e-4"}),
        ("iteration 1/ 3 | learning rate: 3.000000E-04 | global batch size:  32 |", {"learning_rate": "3.000000E-04", "batch_size": "32"}),
        ("  micro_batch_size ................ 4", {"micro_batch_size": "4"}),
        ("Gradient Accumulation steps = 2, world size: 8, data parallel size 4", {"gradient_accumulation_steps": "2", "world_size": "8"}),
        ("'per_device_train_batch_size': 8, 'per_device_eval_batch_size': 9", {"micro_batch_size": "8"}),
        ("seed: 1,5 seq_len: 10% lr: none batch size: 8x", {}),
    ],
)  # fmt: skip
def test_settings_are_read_by_their_usual_names(line: str, said: dict[str, str]) -> None:
    assert settings_in_line(line) == said


def test_a_number_with_a_suffix_is_no_other_number(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text("".join(f"step {step} loss: 6.1{step}k\n" for step in range(3)))
    with pytest.raises(CurveError):
        read_run(tmp_path / "x.log")


@pytest.mark.parametrize("damaged", [b"\x1f\x8b" + bytes(30), struct.pack("<Q", 8) + bytes(4) + b"\xff" * 8 + bytes(4)])
def test_what_is_no_event_file_says_so(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "x.tfevents").write_bytes(damaged)
    with pytest.raises(CurveError, match=r"x\.tfevents: "):
        read_run(tmp_path / "x.tfevents")


def test_the_state_of_a_trainer_is_read_without_its_summary(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": loss, "grad_norm": norm} for step, loss, norm in STEPS]
    rows += [{"step": 3, "eval_loss": 9.0}, {"step": 3, "train_loss": 2.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    assert shown(tmp_path) == STEPS


def test_the_csv_of_lightning_is_read_without_its_evaluations(tmp_path: Path) -> None:
    header = "epoch,grad_norm,step,train_loss,val_loss\n"
    (tmp_path / "metrics.csv").write_text(
        header + "0,1.5,1,2.5,\n0,,1,,9.0\n0,0.75,2,2.25,\n0,,3,,9.0\n0,0.5,3,1.125,\n"
    )
    assert shown(tmp_path) == STEPS
    (tmp_path / "metrics.csv").write_text(header + "0,1.5,1,2.5,\n0,0.75,2,,\n")
    with pytest.raises(CurveError, match="line 3: train_loss is '', not a number"):
        read_run(tmp_path)


def test_a_folder_with_two_known_files_is_refused(tmp_path: Path) -> None:
    write_events(tmp_path / "a.tfevents.1")
    write_events(tmp_path / "b.tfevents.1")
    with pytest.raises(CurveError, match="name a file"):
        read_run(tmp_path)
