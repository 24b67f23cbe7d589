"""Test what reaches a record: no secret and no private path, and everything else unchanged."""

from __future__ import annotations

import html
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.common.redact import Secrets, is_secret_name, redact

ROOT = Path(__file__).resolve().parents[4]
SPELLINGS: tuple[Callable[[str], str], ...] = (
    str, repr, json.dumps, lambda text: json.dumps(json.dumps(text)), lambda text: repr(repr(text)), html.escape, shlex.quote,
    quote, lambda text: json.dumps(text, ensure_ascii=False), lambda text: text.encode("unicode_escape").decode(),
)  # fmt: skip
SECRETS = {"HF_TOKEN": "hf_abcdef", "WANDB_API_KEY": "hf_abcdef0123", "DB_PASSWORD": "p.*[x]\\"}


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "CLIENT_SECRET", "GITLAB_PRIVATE_KEY", "db_password", "GITHUB_PAT", "SLURM_JWT",
     "GPG_PASSPHRASE", "REGISTRY_AUTH", "OPENAI_KEY", "SSH_KEY", "SMTP_PASS", "api-key", "PGPASS",
     "PGPASSWORD", "DB_PWD", "MYKEY", "ROOT_PW", "AWS_CRED", "CREDENTIALS", "apiKey", "X-Auth-Token", "dbPwd"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)
    assert Secrets({}).hide(f"--{name}=hf_abcdef") == f"--{name}=<{name}>"


@pytest.mark.parametrize("name", ["PATH", "NCCL_DEBUG", "MONKEY", "KEYBOARD", "OMP_NUM_THREADS", "PATTERN", "GIT_AUTHOR_NAME", "XAUTHORITY", "MAX_TOKENS",
                                  "TOKENIZERS_PARALLELISM", "eod_token", "--moe-token-dispatcher-type", "moe_token_drop_policy", "HF_TOKEN_PATH", "SSH_AUTH_SOCK", "KEY", "PWD", "OLDPWD",
                                  "SBATCH_WCKEY", "NCCL_IB_PKEY", "BYPASS", "SSH_ASKPASS", "PGPASSFILE"])  # fmt: skip
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_name(name)


@given(st.text(), st.sampled_from(sorted(SECRETS)), st.text())
def test_no_value_of_a_secret_is_left(before: str, name: str, after: str) -> None:
    assert SECRETS[name] not in redact(before + SECRETS[name] + after, SECRETS)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("sent hf_abcdef0123 on", "the value of $WANDB_API_KEY"),
        ("a p.*[x]\\ b", ""),  # This is too short: it may be an ordinary word.
        ("https://me:hunter2@host/path", "a password before @"),
        ("docker://me:hunter2@registry/image", "a password before @"),
        ("me:hunter2@registry#image:24.01", "a password before @"),
        ("curl -u me:hunter2@host", "a password before @"),
        ("https://me:hun/ter2@host/path", "a password before @"),
        ("me:hun/ter2@registry#image:24.01", "a password before @"),
        ("https://hunter2000:x-oauth-basic@host", "a password before @"),
        ("git clone https://hunter2000@host/x", "a token before @"),
        ('{"api_key": "hunter2"}', "a literal api_key"),
        ('"{\\"api_key\\": \\"hunter2\\"}"', "a literal api_key"),
        ("{'password': 'hun ter2'}", "a literal password"),
        ("curl -H 'Authorization: Bearer hunter2'", "a literal Authorization"),
        ("https://host/?token=hunter2&x=1", "a literal token"),
        ("--container-env=HF_TOKEN=hunter2", "a literal HF_TOKEN"),
        ("export X_API_KEY='hunter2' y", "a literal X_API_KEY"),
        ("login --password hunter2", "a literal password"),
        ("login --api-key=hunter2", "a literal api-key"),
        ("x --key hf_huntEr2huntEr2huntEr2", "a token hf_..."),
        ("sk-proj-hunter2hunter2hunter2", "a token sk-..."),
        ("a=ghp_hunter2hunter2hunter2", "a token ghp_..."),
        ('{"x": "a\\ngithub_pat_hunter2hunter2_hunter2"}', "a token github_pat_..."),
        ("AKIAHUNTERHUNTER2HUN", "a token AKIA..."),
        ("eyJhunter2hunter2.eyJhunter2hunter2.hunter2", "a token eyJ..."),
        ("x%3Dglpat-hunter2hunter2hunter2", "a token glpat-..."),
        ("xoxb-hunter2-hunter2", "a token xoxb-..."),
        ("hf_hub_download_with_progress /task-1234567890abcdefgh sk-learn-1.2", ""),
        ("https://me:${GIT_TOKEN}@host", ""),
        ("export HF_TOKEN=$(cat ~/.token)", ""),
        ("login --password-stdin registry", ""),
        ("nvcr.io/nvidia/pytorch:24.01@sha256:0123", ""),
        ("pytorch:24.01@sha256:0123", ""),
        ("ssh://git@host:22/x", ""),
        ("matlab:5,ansys@slurmdb:2", ""),
        ("--token --other", ""),
        ("https://host:8080/a@b", ""),
        ("https://git@host/x", ""),
        ("docker://registry:443/x@sha256:0123", ""),
        ("lib:/opt/gcc@12/lib", ""),
        ("/data/secret:/data/secret:ro", ""),
        ("HF_TOKEN: looks like a secret", ""),
        ("no field 'api_key': did you mean 'seed'?", ""),
        ('[ "$HF_TOKEN" = "" ] || [ $HF_TOKEN = x ]', ""),
    ],
)
def test_a_text_is_searched_for_secrets(text: str, found: str) -> None:
    secrets = Secrets(SECRETS)
    assert secrets.find(text) == found
    hidden = secrets.hide(text)
    assert hidden == text.replace("p.*[x]\\", "<DB_PASSWORD>") if not found else "hun" not in hidden
    assert secrets.hide(hidden) == hidden


@given(
    st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), min_size=8).filter(lambda x: x == x.strip())
)
def test_a_secret_is_found_in_each_spelling(value: str) -> None:
    secrets = Secrets({"DB_PW": value})
    for spell in SPELLINGS:
        assert secrets.find(f"x {spell(value)} y") == "the value of $DB_PW"


def test_what_the_value_of_any_variable_gives_away_is_a_secret() -> None:
    environment = {"NCCL_X": '{"api_key": "hunter2000"}', "GIT_REMOTE": "https://hunter3000:x-oauth-basic@host"}
    assert redact("hunter2000 hunter3000", environment) == "<NCCL_X> <GIT_REMOTE>"
    assert redact(environment["NCCL_X"], {}) == '{"api_key": "<api_key>"}'


@pytest.mark.parametrize("text", ["http://", "a:", "a=", "token=", "token='", "\\", "x ", "@", "--a-", "://a:b"])
def test_no_text_takes_long(text: str) -> None:
    secrets, begin = Secrets(SECRETS), time.process_time()
    secrets.hide(text * 20_000)
    assert time.process_time() - begin < 5


def test_a_password_in_a_url_is_a_secret_whatever_the_variable_is_called() -> None:
    secrets = Secrets({"MONGO_URL": "mongodb://me:hunter2222@host/db"})
    assert secrets.find("hunter2222") == "the value of $MONGO_URL"
    assert "hunter" not in secrets.hide("refused: hunter2222, http://other:hunter3@host")


def test_a_secret_that_begins_with_another_is_replaced_whole() -> None:
    assert redact("key hf_abcdef0123, token hf_abcdef", SECRETS) == "key <WANDB_API_KEY>, token <HF_TOKEN>"


def test_short_values_are_words_and_no_secrets() -> None:
    assert redact("the true loss", {"TOKENIZERS_PARALLELISM": "true", "SECRET": ""}) == "the true loss"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f'File "{ROOT}/launch/loop.py", line 3', 'File "./launch/loop.py", line 3'),
        (f"{sys.prefix}/lib/x.py", "<python>/lib/x.py"),
        (f"{tempfile.gettempdir()}/torchinductor/a.cpp", "<tmp>/torchinductor/a.cpp"),
        (f"in {Path.home()}: no space", "in ~: no space"),
        (f"file://{Path.home()}/a", "file://~/a"),
        (f"{Path.home()}2/a /data{Path.home()}/b", f"{Path.home()}2/a /data{Path.home()}/b"),
        ("/etc/hosts and 1/2", "/etc/hosts and 1/2"),
    ],
)
def test_paths_are_told_without_their_private_part(text: str, expected: str) -> None:
    assert redact(text, {}) == expected


def test_the_working_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert redact(f"{tmp_path}/sweeps/a/plan.json", {}) == "./sweeps/a/plan.json"


@given(st.text(alphabet="abc xyz.,:=\n", max_size=60))
def test_plain_text_is_left_alone(text: str) -> None:
    assert redact(text, SECRETS) == text
