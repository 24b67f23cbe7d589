"""The files that runs will read, opened before anything is submitted: a job would refuse them one by one, hours later."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from launch.checkpoints.checkpoint import open_checkpoint
from launch.contract.errors import OrchestratorError
from launch.contract.plan import Plan
from launch.contract.spec import Model, RunSpec
from launch.data.fields import check_length
from launch.data.indexed_dataset import open_pair
from launch.data.text_files import text_files
from launch.data.tokenizer import load_tokenizer
from orchestrator.errors import InputError, Problem


def check_inputs(plan: Plan) -> None:
    """Open what the cells that will run name: headers and tokenizers are read, tensors and tokens are not.

    Raises:
        InputError: a file is missing, damaged or does not fit the model; all of them at once.
    """
    specs = [cell.run_spec for cell in plan.cells if cell.state == "run"]
    opened = [
        *(partial(_open_data, spec) for spec in _distinct(specs, _data_and_its_use)),
        *(partial(_open_weights, spec.model) for spec in _distinct(specs, lambda spec: spec.model)),
    ]
    refusals = dict.fromkeys(message for open_files in opened if (message := _refusal(open_files)))
    if refusals:
        raise InputError([Problem("", message) for message in refusals])


def _open_data(spec: RunSpec) -> None:
    data = spec.data
    if data.kind == "text":
        text_files(data)
    if data.kind == "indexed" and data.path is not None:
        pair = open_pair(data.path)
        check_length(pair.name, len(pair.tokens), spec.training.sequence_length + 1)
    if data.tokenizer is not None:
        load_tokenizer(data.tokenizer, spec.model.vocab_size)


def _open_weights(model: Model) -> None:
    if model.weights != "random":
        open_checkpoint(model)


def _refusal(open_files: Callable[[], None]) -> str:
    try:
        open_files()
    except OrchestratorError as error:
        return str(error)
    return ""


def _data_and_its_use(spec: RunSpec) -> object:
    return spec.data, spec.model.vocab_size, spec.training.sequence_length


def _distinct(specs: Iterable[RunSpec], what: Callable[[RunSpec], object]) -> Iterable[RunSpec]:
    """One spec of each: sweeps of thousands of cells share few."""
    return {what(spec): spec for spec in specs}.values()
