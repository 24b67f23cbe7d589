"""Test how answers of squeue and sacct are read. Scripts replace both programs here. tests/slurm shows that the real
ones answer in the same way."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.common.poll_interval import LEAST_SECONDS, MOST_SECONDS, poll_interval
from launch.slurm import command as slurm_command
from launch.slurm.job_states import ENDED, RUNNING, WAITING, stage_of
from orchestrator.errors import SystemFault
from orchestrator.slurm import polled_command
from orchestrator.slurm.job_listing import GONE, UNHEARD, Job, parse_sacct, parse_squeue
from orchestrator.sweeps import slurm_jobs
from orchestrator.sweeps.slurm_jobs import GRACE_SECONDS, GRACE_WITHOUT_ACCOUNTS, JobMonitor, Jobs
from orchestrator.sweeps.submissions import Submission

SEPARATOR = "5e9a7a704"
NOW = 1_760_000_000.0
STATES = sorted({*ENDED, *WAITING, *RUNNING} - {GONE})

# --- what they print ------------------------------------------------------------------------------------------------

texts = st.text(max_size=20).filter(lambda text: SEPARATOR not in text)
# squeue prints "None" for a job that has no reason.
reasons = texts.filter(lambda text: text != "None")
job_ids = st.from_regex(r"[1-9][0-9]{0,6}(_[0-9]{1,4})?", fullmatch=True)


@given(st.lists(st.tuples(job_ids, st.sampled_from(STATES), reasons, st.integers(0, 2**33), texts), max_size=8))
def test_a_line_of_squeue_is_a_job_whatever_it_is_called(rows: list[tuple[str, str, str, int, str]]) -> None:
    """A name may contain line breaks, and text that looks like another line."""
    text = "".join(
        SEPARATOR.join(("17", job_id, state, reason, str(start), "node[1-2]", name)) + "\n"
        for job_id, state, reason, start, name in rows
    )
    rows_read = list(parse_squeue(text, SEPARATOR))
    assert [submitted for submitted, _ in rows_read] == [17.0] * len(rows)
    assert [job for _, job in rows_read] == [
        Job(job_id, name, state, reason, float(start), "node[1-2]")
        if stage_of(state) == "waits"
        else Job(job_id, name, state, nodes="node[1-2]")
        for job_id, state, reason, start, name in rows
    ]


@given(st.lists(st.tuples(job_ids, st.sampled_from(STATES), texts), max_size=8))
def test_a_line_of_sacct_is_a_job_whatever_it_is_called(rows: list[tuple[str, str, str]]) -> None:
    text = "".join(SEPARATOR.join(("17", job, f"{state} by 1000", "None assigned", name)) + "\n"
                   for job, state, name in rows)  # fmt: skip
    assert list(parse_sacct(text, SEPARATOR)) == [(17.0, Job(job, name, state)) for job, state, name in rows]


@given(st.lists(st.sampled_from([*"ab1_[]-,%\n", SEPARATOR]), max_size=60).map("".join))
def test_no_text_is_too_strange_to_be_read(text: str) -> None:
    list(parse_squeue(text, SEPARATOR))
    list(parse_sacct(text, SEPARATOR))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20), st.integers(1, 4)), min_size=1, max_size=4),
       st.sampled_from(["", "%4"]))  # fmt: skip
def test_elements_that_have_not_begun_are_one_line_of_sacct(spans: list[tuple[int, int, int]], bound: str) -> None:
    words = [f"{a}-{a + n}:{k}" if k > 1 else f"{a}-{a + n}" if n else f"{a}" for a, n, k in spans]
    line = SEPARATOR.join(("17", f"12_[{','.join(words)}{bound}]", "PENDING", "", "name")) + "\n"
    expected = [f"12_{place}" for a, n, k in spans for place in range(a, a + n + 1, k)]
    assert [job.job_id for _, job in parse_sacct(line, SEPARATOR)] == expected


def test_a_job_that_has_no_reason_and_no_expected_start() -> None:
    line = SEPARATOR.join(("N/A", "12", "PENDING", "None", "N/A", "", "name")) + "\n"
    assert list(parse_squeue(line, SEPARATOR)) == [(0.0, Job("12", "name", "PENDING"))]


# --- how often they are asked ---------------------------------------------------------------------------------------


@given(st.floats(0, 120), st.integers(0, 1000))
def test_calls_take_a_small_share_of_the_time_and_a_failing_one_is_tried_again(took: float, failures: int) -> None:
    seconds = poll_interval(took, failures=failures)
    assert seconds >= LEAST_SECONDS
    if failures:
        assert seconds <= max(took, MOST_SECONDS) and seconds >= poll_interval(took, failures=failures - 1) * (
            failures > 1
        )
    else:
        assert took <= 0.05 * seconds * (1 + 1e-9)


# --- the scheduler --------------------------------------------------------------------------------------------------


class Programs:
    """Scripts in place of squeue and sacct, before the real ones on PATH. Files have their output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("squeue", "sacct"):
            script = folder / name
            # The separator stands between the first two letters of the requested format.
            script.write_text(
                f'#!/bin/sh\necho "$@" >> {folder}/{name}.calls\ncat {folder}/{name}.error >&2 2>/dev/null\n'
                f'for word in "$@"; do case $word in --format=%V*) s=${{word#--format=%V}}; s=${{s%%\\%*}};;'
                f" --delimiter=*) s=${{word#--delimiter=}};; esac; done\n"
                f'test -e {folder}/{name}.error && exit 1\nsed "s/@/$s/g" {folder}/{name}.text\n'
            )
            script.chmod(0o755)
            self.say(name)

    def say(self, name: str, *rows: Sequence[str]) -> None:
        (self.folder / f"{name}.error").unlink(missing_ok=True)
        (self.folder / f"{name}.text").write_text("".join("@".join(row) + "\n" for row in rows))

    def fail(self, name: str, words: str) -> None:
        (self.folder / f"{name}.error").write_text(words + "\n")

    def queue(self, states: Mapping[str, str], name: str = "token") -> None:
        self.say("squeue", *(self.row(job, state, name) for job, state in states.items()))

    @staticmethod
    def row(job: str, state: str, name: str, submitted: float = NOW) -> tuple[str, ...]:
        return f"{submitted:.0f}", job, state, "Resources", "N/A", "node1", name

    def accounts(self, states: Mapping[str, str], name: str = "token", submitted: float = NOW) -> None:
        self.say("sacct", *((f"{submitted:.0f}", job, state, "node1", name) for job, state in states.items()))

    def calls(self, name: str) -> list[str]:
        path = self.folder / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(polled_command, "poll_interval", lambda took, failures: 0.0)
    return Programs(tmp_path)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def scheduler(programs: Programs, clock: Clock) -> JobMonitor:
    return JobMonitor(clock)


def submission(job_id: str | None = "12", bundles: int = 1, name: str = "token", time: float = NOW) -> Submission:
    return Submission(f"token-{job_id}-{time}", name, tuple(f"b{n}" for n in range(bundles)), time, "host", job_id)


def state(jobs: Jobs, job_id: str = "12") -> str:
    job = jobs.of(job_id)
    assert job is not None and job.job_id == job_id
    return job.state


def looks(scheduler: JobMonitor, clock: Clock, seconds: Sequence[float], *asked: Submission) -> Iterator[str]:
    for moment in seconds:
        clock.now = NOW + moment
        yield state(scheduler.look(asked or [submission()]))


def test_one_squeue_and_one_sacct_for_all_jobs(scheduler: JobMonitor, programs: Programs) -> None:
    arrays = [submission(str(100 + n), bundles=500, time=NOW + n) for n in range(20)]
    listed = {f"{100 + n}_{e}": "RUNNING" for n in range(10) for e in range(500)}
    programs.queue(listed)
    programs.accounts({f"{100 + n}_{e}": "COMPLETED" for n in range(10, 20) for e in range(500)})
    jobs = scheduler.look(arrays)
    assert {state(jobs, job) for job in listed} == {"RUNNING"} and state(jobs, "119_499") == "COMPLETED"
    assert len(programs.calls("squeue")) == len(programs.calls("sacct")) == 1
    (call,) = programs.calls("sacct")
    assert "--jobs=110,111,112,113,114,115,116,117,118,119 " in call
    local = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(NOW + 10 - 3600))
    assert f"--starttime={local}" in call


def test_of_more_arrays_than_one_call_takes_none_is_forgotten(
    scheduler: JobMonitor, programs: Programs, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_jobs, "MOST_IDS", 2)
    asked = [submission(str(job)) for job in range(1, 6)]
    programs.accounts({str(job): "COMPLETED" for job in range(1, 6)})
    clock.now += 10 * GRACE_SECONDS  # A job whose state nobody asked for stays in doubt, however much time has passed.
    seen = []
    for _ in range(3):
        jobs = scheduler.look(asked)
        seen.append([state(jobs, str(job)) for job in range(1, 6)].count("COMPLETED"))
    assert seen == [2, 4, 5] and not jobs.doubtful


def test_a_job_that_has_ended_is_asked_about_no_more(scheduler: JobMonitor, programs: Programs) -> None:
    programs.queue({"12": "RUNNING"})
    assert state(scheduler.look([submission()])) == "RUNNING"
    programs.queue({"12": "FAILED"})
    ended = scheduler.look([submission()])
    assert state(ended) == "FAILED"
    assert scheduler.look([submission()]) is ended and len(programs.calls("squeue")) == 2
    assert scheduler.look([submission(job_id=None)]) is ended, "nobody knows its id"


def test_nothing_is_asked_before_the_interval_is_over(
    scheduler: JobMonitor, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polled_command, "poll_interval", poll_interval)
    programs.queue({"12": "RUNNING"})
    first = scheduler.look([submission()])
    assert scheduler.look([submission(), submission("13")]) is first and first.of("13") is None
    assert len(programs.calls("squeue")) == 1


def test_an_id_counts_with_the_name_that_it_was_submitted_under(
    scheduler: JobMonitor, programs: Programs, clock: Clock
) -> None:
    """After a crash, Slurm gave the id to another job."""
    programs.queue({"12": "RUNNING"}, name="another")
    programs.accounts({"12": "COMPLETED"}, name="a third")
    assert list(looks(scheduler, clock, (0, GRACE_SECONDS + 1))) == [UNHEARD, GONE]


@pytest.mark.parametrize("name", ["another", "token"])
def test_an_id_that_slurm_gives_again_to_the_same_sweep_is_another_job(
    scheduler: JobMonitor, programs: Programs, clock: Clock, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The controller forgot the first job. The jobs of a chain have one name."""
    programs.fail("sacct", "Slurm accounting storage is disabled")
    forgotten = submission()
    assert list(looks(scheduler, clock, (0, GRACE_WITHOUT_ACCOUNTS), forgotten)) == [UNHEARD, GONE]
    later = replace(submission(name=name, time=clock.now), number=1)
    programs.queue({"12": "PENDING"}, name)
    assert state(scheduler.look([forgotten, later])) == "PENDING"
    monkeypatch.setattr(polled_command, "poll_interval", poll_interval)
    scheduler.look([later])
    assert scheduler.look([replace(later, number=2)]).of("12") is None, "squeue was not asked since"


def test_of_a_job_that_was_requeued_the_latest_record_counts(scheduler: JobMonitor, programs: Programs) -> None:
    rows = [(f"{NOW + later:.0f}", "12", word, "", "token") for later, word in ((9, "TIMEOUT"), (0, "NODE_FAIL"))]
    programs.say("sacct", *rows)
    assert state(scheduler.look([submission()])) == "TIMEOUT"


@pytest.mark.parametrize("said", [None, "RUNNING", "PENDING", "A_STATE_TO_COME"])
def test_a_job_is_gone_when_nobody_has_known_it_for_the_grace_period(
    scheduler: JobMonitor, programs: Programs, clock: Clock, said: str | None
) -> None:
    """sacct may forever report a running job that the controller has forgotten."""
    programs.accounts({"12": said} if said else {})
    begun = said or UNHEARD
    assert list(looks(scheduler, clock, (0, 59, GRACE_SECONDS))) == [begun, begun, GONE]


def test_the_grace_period_begins_when_the_job_is_first_missed(
    scheduler: JobMonitor, programs: Programs, clock: Clock
) -> None:
    programs.queue({"12": "RUNNING"})
    assert list(looks(scheduler, clock, (0, 1000))) == ["RUNNING"] * 2
    programs.queue({})
    assert list(looks(scheduler, clock, (1001, 1060))) == ["RUNNING"] * 2
    programs.queue({"12": "RUNNING"})
    assert list(looks(scheduler, clock, (1061,))) == ["RUNNING"]
    programs.queue({})
    assert list(looks(scheduler, clock, (1062, 1121, 1122))) == ["RUNNING", "RUNNING", GONE]


def test_accounts_that_come_late_tell_how_a_job_ended(scheduler: JobMonitor, programs: Programs, clock: Clock) -> None:
    programs.accounts({"12": "RUNNING"})
    assert list(looks(scheduler, clock, (0, 50))) == ["RUNNING"] * 2
    assert scheduler.look([submission()]).doubtful == {"12"}
    programs.accounts({"12": "TIMEOUT"})
    assert list(looks(scheduler, clock, (59,))) == ["TIMEOUT"]
    assert not scheduler.look([submission()]).doubtful


def test_accounts_that_fail_end_nothing_before_the_grace_period(
    scheduler: JobMonitor, programs: Programs, clock: Clock
) -> None:
    programs.queue({"12": "RUNNING"})
    assert list(looks(scheduler, clock, (0,))) == ["RUNNING"]
    programs.queue({})
    programs.fail("sacct", "sacct: error: Problem talking to the database: Connection refused")
    assert list(looks(scheduler, clock, (1, 60))) == ["RUNNING"] * 2
    fault = scheduler.look([submission()]).fault
    assert re.fullmatch(
        r"sacct has not answered since \d\d:\d\d:\d\d \(Problem talking to the database: Connection refused\)", fault
    )
    programs.accounts({"12": "NODE_FAIL"})
    assert list(looks(scheduler, clock, (60.5,))) == ["NODE_FAIL"]
    assert scheduler.look([submission()]).fault == ""


def test_an_element_that_leaves_no_trace_was_cancelled_before_it_began(
    scheduler: JobMonitor, programs: Programs, clock: Clock
) -> None:
    """Slurm knows other elements of its array, so it has not forgotten the job. A later command need not wait to be
    certain."""
    programs.queue({"12_0": "RUNNING", "12_1": "PENDING", "12_2": "PENDING"})
    array = submission(bundles=3)
    scheduler.look([array])
    clock.now += 100
    programs.queue({"12_0": "RUNNING"})
    programs.accounts({"12_0": "RUNNING"})
    jobs = scheduler.look([array])
    assert state(jobs, "12_1") == "PENDING" and jobs.doubtful == {"12_1", "12_2"}
    later = JobMonitor(clock).look([array])
    assert [state(later, f"12_{place}") for place in range(3)] == ["RUNNING", "CANCELLED", "CANCELLED"]
    clock.now += GRACE_SECONDS
    assert state(scheduler.look([array]), "12_2") == "CANCELLED"
    programs.queue({})
    assert state(JobMonitor(clock).look([array]), "12_1") == "CANCELLED", "accounts know the array"
    programs.accounts({})
    assert state(JobMonitor(clock).look([array]), "12_1") == GONE, "nobody knows the array"


def test_accounts_that_fail_say_nothing_of_a_job_that_was_submitted_long_ago(
    scheduler: JobMonitor, programs: Programs, clock: Clock
) -> None:
    """The same holds for an element whose array squeue still lists: it may have run, with an unknown end."""
    programs.fail("sacct", "sacct: error: Connection refused")
    programs.queue({"12_0": "RUNNING"})
    array = submission(bundles=2)
    clock.now += 100 * GRACE_SECONDS
    jobs = scheduler.look([array])
    assert state(jobs, "12_1") == UNHEARD and jobs.doubtful == {"12_1"}
    clock.now += GRACE_SECONDS
    assert state(scheduler.look([array]), "12_1") == GONE


def test_while_accounts_are_not_asked_a_job_stays_what_it_was(
    scheduler: JobMonitor, programs: Programs, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sacct failed a moment ago, so its answer is unknown."""
    monkeypatch.setattr(polled_command, "poll_interval", lambda took, failures: 60.0 if failures else 0.0)
    programs.fail("sacct", "sacct: error: Connection refused")
    assert list(looks(scheduler, clock, (0, 2 * GRACE_SECONDS))) == [UNHEARD] * 2
    assert len(programs.calls("sacct")) == 1 and len(programs.calls("squeue")) == 2


def test_without_accounting_a_job_is_gone_after_some_seconds(
    scheduler: JobMonitor, programs: Programs, clock: Clock
) -> None:
    programs.fail("sacct", "Slurm accounting storage is disabled")
    assert list(looks(scheduler, clock, (0, 4, GRACE_WITHOUT_ACCOUNTS))) == [UNHEARD, UNHEARD, GONE]
    jobs = scheduler.look([submission()])
    assert (jobs.accounting, jobs.fault) == (False, "") and len(programs.calls("sacct")) == 1
    later = JobMonitor(clock)
    assert state(later.look([submission()])) == GONE, "it was submitted long enough ago"


def test_without_accounting_a_job_that_was_listed_is_not_gone_at_once(
    scheduler: JobMonitor, programs: Programs, clock: Clock
) -> None:
    programs.fail("sacct", "Slurm accounting storage is disabled")
    programs.queue({"12": "RUNNING"})
    assert list(looks(scheduler, clock, (100,))) == ["RUNNING"]
    programs.queue({})
    assert list(looks(scheduler, clock, (101, 105, 106))) == ["RUNNING", "RUNNING", GONE]


def test_a_queue_that_does_not_answer_changes_nothing_and_is_said(
    scheduler: JobMonitor, programs: Programs, clock: Clock
) -> None:
    programs.fail("squeue", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    first = scheduler.look([submission()])
    assert first.of("12") is None and not scheduler.answers()
    programs.queue({"12": "RUNNING"})
    assert list(looks(scheduler, clock, (1,))) == ["RUNNING"] and scheduler.answers()
    programs.fail("squeue", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    faults = set()
    for seconds in (2, 1000, 100_000):
        assert list(looks(scheduler, clock, (seconds,))) == ["RUNNING"]
        faults.add(scheduler.look([submission()]).fault)
    (fault,) = faults
    assert fault.startswith("squeue has not answered since ") and "(connect failure)" in fault
    with pytest.raises(SystemFault, match="it is unknown without it which jobs have been submitted"):
        scheduler.find("token", NOW)
    programs.queue({})
    assert list(looks(scheduler, clock, (100_001,))) == ["RUNNING"], "only now it is missed"


def test_a_program_that_is_not_there_is_said(
    programs: Programs, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert "squeue has not answered since" in JobMonitor(clock).look([submission()]).fault
    assert "(not on PATH here)" in JobMonitor(clock).look([submission()]).fault


def test_a_program_that_hangs_is_given_up(
    scheduler: JobMonitor, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_command, "ANSWER_SECONDS", 0.2)
    (programs.folder / "squeue").write_text("#!/bin/sh\nexec sleep 60\n")
    begun = time.monotonic()
    assert "(no answer within 0.2 s)" in scheduler.look([submission()]).fault
    assert time.monotonic() - begun < 10


def test_what_users_set_for_their_own_eyes_does_not_reach_the_programs(
    scheduler: JobMonitor, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setenv("SACCT_FEDERATION", "1")
    (programs.folder / "squeue").write_text(f"#!/bin/sh\nenv > {programs.folder}/seen\n")
    scheduler.look([submission()])
    seen = (programs.folder / "seen").read_text()
    assert "SLURM_TIME_FORMAT=%s\n" in seen and "SQUEUE_" not in seen and "SACCT_" not in seen


def test_jobs_are_found_by_their_name_in_queue_and_accounts(scheduler: JobMonitor, programs: Programs) -> None:
    listed = [programs.row(job, "PENDING", "token") for job in ("9_0", "9_1", "100")]
    others = programs.row("101", "PENDING", "tok"), programs.row("6", "PENDING", "token", NOW - 301)
    programs.say("squeue", *listed, *others)
    programs.accounts({"7": "COMPLETED"})
    assert scheduler.find("token", NOW) == ("7", "9", "100"), "a chain's name is of earlier jobs too"
    assert scheduler.find("tok", NOW) == ("101",) and scheduler.find("to", NOW) == ()
    assert "--name=token" in programs.calls("sacct")[0]
    programs.fail("sacct", "sacct: error: Connection refused")
    assert scheduler.find("token", NOW) == ("9", "100")


def test_a_job_is_found_whose_controllers_clock_is_minutes_behind(scheduler: JobMonitor, programs: Programs) -> None:
    programs.say("squeue", programs.row("7", "PENDING", "token", NOW - 290))
    assert scheduler.find("token", NOW) == ("7",)


@pytest.mark.parametrize(("node", "found"), [("", ()), ("node1", ("7",))])
def test_what_sbatch_was_refused_is_no_job(
    scheduler: JobMonitor, programs: Programs, node: str, found: tuple[str, ...]
) -> None:
    """Slurm lists it as a job that failed, without a node."""
    programs.say("squeue", (f"{NOW:.0f}", "7", "FAILED", "BadConstraints", "N/A", node, "token"))
    assert scheduler.find("token", NOW) == found


def test_whoever_must_be_certain_waits_until_no_job_is_in_doubt(
    scheduler: JobMonitor, programs: Programs, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(seconds: float) -> None:
        clock.now += 20.0

    monkeypatch.setattr(slurm_jobs, "time", SimpleNamespace(**vars(time) | {"sleep": wait}))
    assert state(scheduler.settled([submission()])) == GONE
    programs.fail("squeue", "slurm_load_jobs error: nobody there")
    assert scheduler.settled([submission("13")]).fault, "it does not wait for Slurm to come back"


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["away", "away", "down", "NEW_ONE", *STATES]),
                          st.sampled_from([None, "down", "NEW_ONE", *STATES]), st.floats(0, 40)), max_size=8))  # fmt: skip
def test_a_job_ends_by_slurms_word_or_after_the_grace_period_alone(
    programs: Programs, history: list[tuple[str, str | None, float]]
) -> None:
    """This holds for any sequence of answers from squeue and sacct."""
    clock = Clock()
    scheduler = JobMonitor(clock)
    last: str | None = None
    missed = 0.0
    for queued, account, seconds in history:
        clock.now += seconds
        programs.queue({} if queued == "away" else {"12": queued})
        programs.accounts({"12": account} if account else {})
        for name in [name for name, word in (("squeue", queued), ("sacct", account)) if word == "down"]:
            programs.fail(name, "nobody there")
        job = scheduler.look([submission()]).of("12")
        now = job.state if job else None
        if queued == "down" or (last is not None and stage_of(last) == "ended"):
            assert now == last
        elif queued != "away":
            assert now == queued
            missed = 0.0
        else:
            missed = missed or clock.now
            unheard = last in (None, UNHEARD) and account is None
            begun = NOW if unheard else missed  # If Slurm never listed the job, count from its submission.
            assert now in (last, account, UNHEARD, GONE)
            if now == GONE:
                assert clock.now - begun >= GRACE_SECONDS
            elif now is not None and stage_of(now) == "ended":
                assert now == account
        last = now
