"""Test runs that read a checkpoint, a tokenizer and indexed data, and the messages about files that do not fit."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from launch.contract.spec import Model
from tests.integration.host import MODEL, SECRETS, Host, recipe
from tests.records import read_metrics
from tests.unit.launch.checkpoints.test_checkpoint import shapes_of, write_file
from tests.unit.launch.data.test_indexed_dataset import write_pair

TRAINING = {"steps": 8, "sequence_length": 8}


@pytest.fixture
def files(host: Host) -> Path:
    """Write a checkpoint of zeros, a tokenizer of words, a text and an indexed pair."""
    folder = host.folder
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "text.txt").write_text("to be or not to be " * 50)
    (folder / "checkpoint").mkdir()
    write_file(folder / "checkpoint" / "model.safetensors", shapes_of(Model(**MODEL)))  # type: ignore[arg-type]
    write_pair(folder, [list(range(200))] * 3, "uint16")
    return folder


def test_runs_train_from_a_checkpoint_on_tokenised_and_indexed_data(host: Host, files: Path) -> None:
    points = [
        {"data.kind": "text", "data.path": "text.txt", "data.tokenizer": "tokenizer.json", "data.eod_token": 0},
        {"data.kind": "indexed", "data.path": "corpus", "data.eod_token": 199, "data.packed_sequences": True},
    ]
    model = MODEL | {"weights": "checkpoint"}
    path = host.write(recipe("inputs", model=model, training=TRAINING, sweep={"points": points}))
    done = host.run("sweep", path)
    assert done.returncode == 0, done.stdout + done.stderr
    sweep = host.sweep("inputs")
    digests = []
    for run_id in host.run_ids("inputs"):
        (attempt,) = sweep.run(run_id).attempts()
        # With weights of zero all tokens are equally likely, and no gradient moves the weights.
        assert [step.loss for step in read_metrics(attempt)] == pytest.approx([math.log(256)] * 8)
        digests.append(json.loads(attempt.read(attempt.environment)))
    assert len({environment["data_digest"] for environment in digests}) == 2
    assert len({environment["digests"]["weights"] for environment in digests}) == 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["environment.BAR=API_KEY", "environment.FOO=${oc.env:WANDB_${environment.BAR}}"], 1),
        (["environment.FOO=${oc.env:PLAIN}"], 1),
        (["data.path=https://me:hunter2@host/text"], 1),
        (["--only", f"data.path={SECRETS['HF_TOKEN']}"], 1),
        ([f"--no-such-option={SECRETS['HF_TOKEN']}"], 1),
        ([f"model.weights=/{SECRETS['HF_TOKEN']}"], 1),
    ],
)
def test_no_secret_reaches_a_plan_or_a_message(host: Host, arguments: list[str], code: int) -> None:
    host.environment["PLAIN"] = f"x{SECRETS['WANDB_API_KEY']}x"
    done = host.run("sweep", host.write(recipe("hidden")), *arguments)
    assert done.returncode == code and "error: " in done.stderr
    assert not [value for value in (*SECRETS.values(), "hunter2") if value in done.stdout + done.stderr]
    assert not host.store.exists()


def test_a_fifo_does_not_keep_plan_waiting(host: Host) -> None:
    os.mkfifo(host.folder / "pipe")
    path = host.write(recipe("waits", data={"kind": "text", "tokenizer": "pipe"}, model=MODEL | {"weights": "pipe"}))
    done = host.run("plan", path)
    assert done.returncode == 1
    assert "model.weights='pipe': pipe cannot be read (not a regular file)" in done.stderr
    assert "data.tokenizer='pipe' cannot be read: not a regular file" in done.stderr


def test_files_that_do_not_fit_are_all_named_before_anything_runs(host: Host, files: Path) -> None:
    (files / "checkpoint" / "config.json").write_text(json.dumps({"rope_theta": 5e5}))
    for suffix in (".bin", ".idx"):
        write_pair(files, [[1, 2, 3]])
        (files / f"corpus{suffix}").rename(files / f"short{suffix}")
    write_pair(files, [list(range(200))])
    (files / "corpus.idx").write_bytes((files / "corpus.idx").read_bytes()[:-1])
    points = [
        {"data.tokenizer": "tokenizer.json", "data.path": "nowhere.txt"},
        {"data.tokenizer": "text.txt", "data.path": "text.txt"},
        {"data.kind": "indexed", "data.path": "corpus"},
        {"data.kind": "indexed", "data.path": "short"},
    ]
    model = MODEL | {"weights": "checkpoint"}
    path = host.write(recipe("wrong", model=model, training=TRAINING, sweep={"points": points}))
    for verb in ("plan", "sweep"):
        done = host.run(verb, path)
        assert done.returncode == 1
        assert done.stdout == ""
        for said in (
            "data.path='nowhere.txt' is neither a file nor a folder",
            "data.tokenizer='text.txt' is not a tokenizer.json",
            "data.path='corpus'",
            "data.path='short' holds 3 tokens, fewer than the 9 of one sequence",
            "model.rotary_base=10000.0, but config.json says rope_theta=500000.0",
        ):
            assert said in done.stderr
    assert not host.store.exists()
