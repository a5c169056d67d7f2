"""A scorer may do anything: it costs the completion it was looking at and nothing else."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sagc_fast.errors import ConfigError, RewardError
from sagc_fast.tasks.base import Problem, Score, ScorerSpec
from sagc_fast.tasks.scoring import ScoringPool

PROBLEM = Problem("2+2=", answer="4", problem_id=17)


@pytest.fixture(autouse=True)
def _zoo_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def pool_of(function, workers=1, timeout_seconds=20.0, **options):
    kwargs = options.pop("kwargs", {})
    return ScoringPool(ScorerSpec(f"scorer_zoo:{function}", kwargs), workers, timeout_seconds, **options)


def zoo_scores(names, workers=1, timeout_seconds=20.0, **options):
    """Scores of these misbehaviours, each between two good completions that must come through."""
    texts = ["good", *(text for name in names for text in (name, "good"))]
    with pool_of("zoo", workers, timeout_seconds, **options) as pool:
        scores = pool.results(pool.submit_many(PROBLEM, texts))
        assert pool.num_pending == 0
        errors = dict(pool.errors)
    assert scores[::2] == [Score(0.5, False)] * len(scores[::2])
    return dict(zip(names, scores[1::2], strict=True)), errors


def test_rewards_and_scores_come_back_in_order():
    with pool_of("echo", workers=2) as pool:
        tickets = pool.submit_many(PROBLEM, [str(i / 8) for i in range(200)])
        late = pool.submit(PROBLEM, "-1")
        assert pool.result(late) == Score(-1.0, False)
        assert [s.reward for s in reversed(pool.results(reversed(tickets)))] == [i / 8 for i in range(200)]
    with pool_of("by_answer", kwargs={"bonus": 0.25}) as pool:
        assert pool.results(pool.submit_many(PROBLEM, ["4", "5"])) == [Score(1.25, True), Score(0.25, False)]


def test_a_number_alone_is_correct_from_one_on():
    with pool_of("echo") as pool:
        outcomes = [s.outcome for s in pool.results(pool.submit_many(PROBLEM, ["0.99", "1", "2"]))]
    assert outcomes == [False, True, True]


@pytest.mark.parametrize(
    ("name", "kind", "detail"),
    [
        ("raise", "raise", "ValueError: no such luck"),
        ("exit", "raise", "SystemExit"),
        ("unprintable", "raise", "Unprintable"),
        ("recurse", "raise", "RecursionError"),
        ("nan", "nonfinite", "nan"),
        ("inf", "nonfinite", "-inf"),
        ("none", "type", "None"),
        ("text", "type", "'1.0'"),
        ("list", "type", "[1.0]"),
        ("bad outcome", "type", "'yes'"),
        ("memory", "memory", "memory limit"),
        ("die", "crash", "exit status 3"),
        ("killed", "crash", "signal 9"),
        ("segfault", "crash", "signal 11"),
        ("orphan and die", "crash", "exit status 4"),
        ("close", "crash", "its process"),
        ("report", "reported", "cannot judge this"),
    ],
)
def test_misbehaviour_costs_that_completion_only(name, kind, detail):
    scores, errors = zoo_scores([name])
    assert (scores[name].reward, scores[name].outcome) == (0.0, False)
    assert scores[name].error.startswith(f"{kind}: ")
    assert detail in scores[name].error
    assert len(scores[name].error) < 300
    assert errors == {kind: 1}


@pytest.mark.parametrize("name", ["hang", "hang in C", "deaf"])
def test_a_hanging_scorer_is_killed_at_its_time_limit(name):
    scores, errors = zoo_scores([name], timeout_seconds=1.5)
    assert scores[name] == Score(0.0, False, "timeout: over 1.5 seconds")
    assert errors == {"timeout": 1}


@pytest.mark.parametrize(("name", "reward"), [("print", 0.5), ("read", 0.0), ("fork", 0.5), ("orphan", 0.5)])
def test_output_input_and_children_do_no_harm(name, reward, capfd):
    scores, errors = zoo_scores([name])
    assert scores[name] == Score(reward, False)
    assert errors == {}
    assert capfd.readouterr() == ("", "")


def test_a_scorer_that_writes_to_the_pool_s_pipe_pays_for_it():
    scores, errors = zoo_scores(["forge"])
    assert scores["forge"].error.startswith("crash: ")
    assert errors == {"crash": 1}


def test_memory_leaked_by_earlier_completions_is_not_held_against_a_later_one():
    with pool_of("zoo", memory_limit_mb=400) as pool:
        scores = pool.results(pool.submit_many(PROBLEM, ["leak"] * 12))
        assert scores == [Score(0.5, False)] * 12
        assert pool.errors == {}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_dies_of_its_past_is_replaced_and_the_completion_tried_again(workers):
    """In a fresh process, not in another one that is idle and has a past too."""
    with pool_of("remembers", workers) as pool:
        pids = set()
        while len(pids) < workers:
            pids |= {score.reward for score in pool.results(pool.submit_many(PROBLEM, ["x"] * 4))}
        assert pool.result(pool.submit(PROBLEM, "first only")).reward not in pids
        assert pool.errors == {}


def test_a_process_forked_by_a_scorer_does_not_answer_for_the_worker():
    with pool_of("zoo") as pool:
        before, _, after = pool.results(pool.submit_many(PROBLEM, ["pid", "fork", "pid"]))
        assert before == after


def test_scores_do_not_depend_on_the_number_of_workers():
    names = ["die", "nan", "raise", "none", "memory", "print", "killed", "exit"]
    texts = [text for name in names for text in (name, "good", "good")]
    results = []
    for workers in (1, 3):
        with pool_of("zoo", workers) as pool:
            results.append(pool.results(pool.submit_many(PROBLEM, texts)))
    assert results[0] == results[1]
    draws = []
    for workers in (1, 3):
        with pool_of("draws", workers) as pool:
            draws.append(pool.results(pool.submit_many(PROBLEM, [f"text {i}" for i in range(90)])))
    assert draws[0] == draws[1]


def test_a_scorer_that_changes_its_problem_changes_a_copy():
    with pool_of("spoils") as pool:
        assert [s.reward for s in pool.results(pool.submit_many(PROBLEM, ["a", "b", "c"]))] == [1.0] * 3
    assert PROBLEM.meta == {}


def test_workers_start_without_torch_or_numpy():
    with pool_of("environment") as pool:
        assert pool.result(pool.submit(PROBLEM, "x")).reward == 0.0


def test_huge_completions_and_lone_surrogates_pass():
    with pool_of("by_answer", workers=2) as pool:
        big = Problem("q", answer="z" * 3_000_000)
        assert pool.results(pool.submit_many(big, [big.answer, "z"] * 3)) == [Score(1.0, True), Score(0.0, False)] * 3
        odd = Problem("q", answer="\ud800\x00é")
        assert pool.result(pool.submit(odd, "\ud800\x00é")).outcome


def test_each_kind_is_logged_once_with_problem_and_reward(caplog):
    with caplog.at_level(logging.WARNING, logger="sagc_fast"), pool_of("zoo") as pool:
        pool.results(pool.submit_many(PROBLEM, ["raise", "raise", "nan", "raise", "nan"]))
        assert pool.errors == {"raise": 3, "nonfinite": 2}
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "scorer_zoo:zoo raised an exception on problem 17 (ValueError: no such luck" in messages[0]
    assert "scorer_zoo:zoo returned NaN or infinity on problem 17" in messages[1]


def test_scoring_goes_on_while_the_caller_does_something_else():
    with pool_of("sleeps") as pool:
        tickets = pool.submit_many(PROBLEM, ["0.01"] * 5)
        deadline = time.monotonic() + 30
        while pool.num_pending and time.monotonic() < deadline:
            time.sleep(0.01)  # never asks for a result
        assert pool.num_pending == 0
        assert all(s.outcome for s in pool.results(tickets))


def test_a_ticket_is_taken_once():
    with pool_of("echo") as pool:
        ticket = pool.submit(PROBLEM, "1")
        pool.result(ticket)
        with pytest.raises(KeyError):
            pool.result(ticket)


def test_closing_ends_the_workers_and_whoever_waits():
    pool = pool_of("pid", workers=2)
    pids = {int(s.reward) for s in pool.results(pool.submit_many(PROBLEM, ["x"] * 50))}
    pool.close()
    pool.close()
    assert pids
    assert not any(is_alive(pid) for pid in pids)
    with pytest.raises(RewardError, match="pool is closed"):
        pool.submit(PROBLEM, "1")
    pool = pool_of("sleeps")
    ticket = pool.submit(PROBLEM, "3600")
    pool.close()
    with pytest.raises(RewardError, match="closed before the completion was scored"):
        pool.result(ticket)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "hanging"])
def test_workers_die_with_a_killed_parent(busy, tmp_path):
    """A training process that is killed without a word leaves no scorer behind, not even one that hangs."""
    code = (
        "import sys, time\n"
        "from sagc_fast.tasks.base import Problem, ScorerSpec\n"
        "from sagc_fast.tasks.scoring import ScoringPool\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "pool = ScoringPool(ScorerSpec('scorer_zoo:pid'), timeout_seconds=600)\n"
        "print(int(pool.result(pool.submit(Problem('q'), 'x')).reward), flush=True)\n"
        "pool.spec = ScorerSpec('scorer_zoo:sleeps')\n"
        "other = ScoringPool(pool.spec, timeout_seconds=600)\n"
        "other.submit(Problem('q'), '600')\n"
        "print(other._workers[0].process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    idle, hanging = int(parent.stdout.readline()), int(parent.stdout.readline())
    pid = hanging if busy else idle
    assert is_alive(pid)
    time.sleep(0.2)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(pid)


def test_the_users_own_reward_is_found_in_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text("def score(completion, problem):\n    return len(completion) / 10\n")
    monkeypatch.chdir(tmp_path)
    with ScoringPool(ScorerSpec("my_reward:score")) as pool:
        assert pool.result(pool.submit(PROBLEM, "abc")).reward == 0.3


@pytest.mark.parametrize(
    ("target", "kwargs", "message"),
    [
        ("no_such_module:score", {}, r"module 'no_such_module', which is neither installed nor in .*PYTHONPATH"),
        ("scorer_zoo.deeper:score", {}, r"fails when imported|neither installed nor"),
        ("scorer_zoo:zooo", {}, r"'scorer_zoo' .* has no function 'zooo'; did you mean zoo\?$"),
        ("scorer_zoo:nothing_like_it", {}, "define it at module level"),
        (
            "scorer_zoo:not_a_function",
            {},
            r"cannot be called under the name 'not_a_function'; define it at module level",
        ),
        ("scorer_zoo:takes_one", {}, r"takes_one\(completion, problem, \*\*kwargs\).*too many positional"),
        ("scorer_zoo:by_answer", {"bonsu": 1}, "unexpected keyword argument 'bonsu'"),
        ("scorer_zoo", {}, "not of the form module:function"),
        ("scorer_zoo:", {}, "not of the form module:function"),
    ],
)
def test_a_reward_that_cannot_be_loaded_says_what_to_do(target, kwargs, message):
    with pytest.raises(RewardError, match=message):
        ScoringPool(ScorerSpec(target, kwargs))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import not_installed_anywhere\n", "needs the module 'not_installed_anywhere', which is not installed"),
        ("raise RuntimeError('half done')\n", "fails when imported: RuntimeError: half done"),
        ("def score(:\n", "fails when imported: SyntaxError"),
        ("import sys; sys.exit(7)\n", "fails when imported: SystemExit: 7"),
        ("import os; os._exit(7)\n", "ended with exit status 7 while loading it, 3 times in a row"),
    ],
)
def test_a_reward_module_that_fails_says_how(source, message, tmp_path, monkeypatch):
    (tmp_path / "failing_reward.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RewardError, match=message):
        ScoringPool(ScorerSpec("failing_reward:score"))


def test_a_reward_that_loads_for_ever_is_given_up(tmp_path, monkeypatch):
    (tmp_path / "slow_reward.py").write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RewardError, match=r"takes more than 0\.5 seconds"):
        ScoringPool(ScorerSpec("slow_reward:score"), startup_seconds=0.5)


def test_imports_inside_a_reward_do_not_run_against_its_time_limit(tmp_path, monkeypatch):
    """A reward that imported torch when it was called first timed out on that call."""
    (tmp_path / "heavy_module.py").write_text("import time\ntime.sleep(1.5)\nVALUE = 0.25\n")
    (tmp_path / "lazy_reward.py").write_text(
        "def score(completion, problem):\n"
        "    try:\n"
        "        import no_such_module\n"
        "    except ImportError:\n"
        "        return value()\n\n\n"
        "def value():\n"
        "    from heavy_module import VALUE\n"
        "    return VALUE\n\n\n"
        "def unused():\n"
        "    import never_imported\n"
    )
    (tmp_path / "never_imported.py").write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.chdir(tmp_path)
    with ScoringPool(ScorerSpec("lazy_reward:score"), timeout_seconds=1.0) as pool:
        assert pool.results(pool.submit_many(Problem("q"), ["a", "b"])) == [Score(0.25, False)] * 2


def test_what_cannot_be_pickled_is_refused_at_once():
    with pytest.raises(RewardError, match="keyword arguments of the reward"):
        pool_of("echo", kwargs={"f": lambda: 0})
    with pool_of("echo") as pool, pytest.raises(RewardError, match="Problem 3 cannot be sent"):
        pool.submit(Problem("q", answer=lambda: 0, problem_id=3), "1")


@pytest.mark.parametrize(
    "options", [{"workers": 0}, {"timeout_seconds": 0}, {"timeout_seconds": float("nan")}, {"memory_limit_mb": 1}]
)
def test_settings_out_of_range_are_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        pool_of("echo", **options)


def test_no_file_descriptor_is_left_behind():
    def count():
        return len(os.listdir("/proc/self/fd"))

    pool_of("echo").close()
    before = count()
    for _ in range(3):
        with pool_of("zoo", timeout_seconds=0.3) as pool:
            pool.results(pool.submit_many(PROBLEM, ["die", "good", "hang"]))
    assert count() == before
