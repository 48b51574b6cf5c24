"""The cause and the rank of every kind of failure, from scripted ranks (fake_engine)."""

import pytest
from fake_engine import (
    LOST,
    ROOT,
    FakeEngine,
    becomes,
    begins,
    dump,
    ends,
    falls_silent,
    is_done,
    is_lost,
    is_seen_to_end,
    raises,
    reaches,
    stands,
    starts,
    supervised,
)

from benchmarks import record as records
from benchmarks.rank.stacks import collective_as_stack, last_collectives
from benchmarks.record import CellFolder
from launch.supervision import failure as logs
from launch.supervision import watch
from launch.supervision.watch import StackState, Watch

TORCH = "/env/lib/python3.12/site-packages/torch"
WORKER_FILE, SERVER_FILE = f"{ROOT}/benchmarks/rank/worker.py", f"{ROOT}/trainers/kvstore/server.py"
WORKER = [(WORKER_FILE, 117, "_rank"), (WORKER_FILE, 64, "main")]
STEP = [(f"{ROOT}/trainers/step.py", 60, "step"), *WORKER]


def in_torch(file, function):
    return (f"{TORCH}/{file}", 900, function)


def collective(name):
    calls = ("distributed_c10d.py", name), ("c10d_logger.py", "wrapper")
    return [*(in_torch(f"distributed/{file}", function) for file, function in calls), *STEP]


# Stacks, the newest call first.
ENGINE = in_torch("autograd/graph.py", "_engine_run_backward")
BACKWARD = [ENGINE, in_torch("_tensor.py", "backward"), *STEP]
ON_GPU = [in_torch("cuda/__init__.py", "synchronize"), *STEP]
CONVOLUTION = (f"{TORCH}/nn/modules/conv.py", 553, "_conv_forward")
COMPUTES = [CONVOLUTION, ("/home/me/my_model.py", 3, "forward"), *STEP]
RENDEZVOUS = in_torch("distributed/rendezvous.py", "_env_rendezvous_handler")
IN_STORE = [RENDEZVOUS, *collective("init_process_group")]
WAITS_FOR_SERVERS = [
    (f"{ROOT}/trainers/kvstore/push_pull_worker.py", 240, "wait_for_replies"),
    *STEP,
]
SERVES = [(SERVER_FILE, 164, "run"), *WORKER]
SUMS = [(SERVER_FILE, 60, "serve"), *SERVES]
FROZEN = ("<frozen importlib._bootstrap>", 241, "_call_with_frames_removed")
IMPORTS = [FROZEN, ("/home/me/my_model.py", 1, "load")]
ASLEEP = "it is in forward (my_model.py:3: `time.sleep(600)`)"
PEER = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"


def add_collectives(job, *names):
    """Have ranks say which collective is not finished."""
    for number, name in enumerate(names):
        entries = [
            {"profiling_name": "nccl:all_gather", "state": "completed", "retired": True},
            {"profiling_name": f"nccl:{name}", "state": "started", "frames": []},
            {"profiling_name": "nccl:all_to_all", "state": "scheduled"},
        ]
        job.stacks[number] += collective_as_stack(entries)


def record(job, *histories):
    """Have ranks say which collectives they began last."""
    for number, names in enumerate(histories):
        entry = {"process_group": ["0", "default_pg"], "is_p2p": False, "input_sizes": [[1024, 2]]}
        entries = []
        for place, name in enumerate(names):
            numbered = {"profiling_name": f"nccl:{name}", "collective_seq_id": 7 + place}
            entries.append(entry | numbered)
        job.stacks[number] += last_collectives(entries)


@pytest.fixture
def asleep(tmp_path):
    """Frames of a rank whose model sleeps."""
    file = tmp_path / "my_model.py"
    file.write_text("import time\ndef forward(x):\n    time.sleep(600)\n")
    return [(str(file), 3, "forward"), (f"{TORCH}/nn/modules/module.py", 1700, "_call_impl"), *STEP]


def told(tmp_path, *steps, **options):
    """The failure of a script: (cause, rank, message), and the seconds until it was noticed."""
    outcome, job, seconds = supervised(tmp_path, FakeEngine(*steps), **options)
    assert outcome.state == "failed" and len(job.stopped) == 1
    return (outcome.failure.cause, outcome.failure.rank, outcome.failure.message), seconds


TIMED = "in phase 'timed'"


def killed(rank, signal):
    return "killed", rank, f"rank {rank} was ended by {signal} {TIMED}"


def raised(message, kind="RuntimeError"):
    return "exception", 1, f"rank 1 raised {kind} {TIMED}: {message}"


def left(rank, how):
    return "exception", rank, f"rank {rank} ended with {how} and wrote no reason"


MINE, SECOND = raises(1, "ValueError", "mine"), raises(0, "ValueError", "second")
LIKE_LOST, FROM_PEER = raises(1, "RuntimeError", PEER), raises(0, "RuntimeError", PEER)
BROKEN, STRANGE = raises(0, "RuntimeError", "Broken pipe"), raises(0, "RuntimeError", "what?")
NO_SUCH = raises(1, "RuntimeError", "no such thing\nand more")
BOTH_END, FIRST_ENDS = is_seen_to_end((0, 1), (1, 1)), is_seen_to_end((0, 1))
SECOND_ENDS = is_seen_to_end((1, 1))
UNSEEN = "killed", 1, f"rank 1 ended {TIMED}, and the agent did not say how"
OF_MINE = raised("mine", "ValueError")
TOO_EARLY = f"status 0 {TIMED}, before it was done,"
AGENT_FAILS = "start", None, "the agent ended with status 1 before any rank failed"
LOST_HOST = ("node_lost", None, LOST)
# Ranks that end: what happens after two ranks have begun to step, and the failure.
ENDS = {
    "killed": ([is_seen_to_end((1, -9))], killed(1, "SIGKILL")),
    "SIGTERM by somebody else": ([is_seen_to_end((0, -15))], killed(0, "SIGTERM")),
    "an unknown signal": ([is_seen_to_end((0, -64))], killed(0, "SIGRTMAX")),
    "exits": ([is_seen_to_end((1, 7))], left(1, f"status 7 {TIMED}")),
    "exits with 0": ([is_seen_to_end((1, 0))], left(1, TOO_EARLY)),
    "raises": ([NO_SUCH, SECOND_ENDS], raised("no such thing")),
    "raises as of a lost peer, and the agent ends it": ([LIKE_LOST, SECOND_ENDS], raised(PEER)),
    "raises as of a lost peer, which raises too": ([LIKE_LOST, BROKEN, BOTH_END], raised(PEER)),
    "is killed, and its peer raises at once": (
        [FROM_PEER, is_seen_to_end((0, 1), (1, -9))], killed(1, "SIGKILL")
    ),
    "is just ending, and its peer raises": ([FROM_PEER, is_seen_to_end((0, 1), (1, None))], UNSEEN),
    "writes why after its peer has seen it go": ([MINE, FROM_PEER, FIRST_ENDS], OF_MINE),
    "two raise, one after the other": ([MINE, SECOND, BOTH_END], OF_MINE),
    "gone while the agent does not move": ([becomes("zombie", 1)], UNSEEN),
    "gone, and an agent that is slow to end the others says why": (
        [becomes("gone", 1), is_seen_to_end((1, -11), agent=None)], killed(1, "SIGSEGV")
    ),
    "the agent is killed, and its ranks with it": (
        [becomes("gone", 0, 1), ends(-9)],
        ("killed", None, "the agent ended by SIGKILL before any rank failed"),
    ),
    "the agent fails": ([ends(1)], AGENT_FAILS),
    "the agent ends well too early": ([ends(0)], left(0, TOO_EARLY)),
    "a host is silent": ([is_lost], LOST_HOST),
    "a host is silent, and the agent of the other is killed": ([falls_silent, ends(-9)], LOST_HOST),
    "a host is silent, and a rank is gone with it": ([falls_silent, becomes("gone", 1)], LOST_HOST),
    "a host is silent, and the other raises": ([falls_silent, FROM_PEER, FIRST_ENDS], LOST_HOST),
    "a host is silent, and raised is unknown": ([falls_silent, STRANGE, FIRST_ENDS], LOST_HOST),
    "a rank raises, and then its host is silent": ([MINE, falls_silent, FIRST_ENDS], OF_MINE),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_the_first_that_ended_by_itself_is_the_cause(tmp_path, case):
    steps, expected = ENDS[case]
    failure, seconds = told(tmp_path, starts, begins, *steps)
    assert failure == expected
    assert seconds < 6


def ends_while_looked_at(job):
    is_done(job)
    job.states |= dict.fromkeys(job.numbers, "zombie")


@pytest.mark.parametrize("steps", [(ends_while_looked_at,), (is_done, falls_silent)])
def test_a_cell_that_every_rank_has_done_is_finished_whatever_is_seen_at_its_end(tmp_path, steps):
    outcome, _, _ = supervised(tmp_path, FakeEngine(starts, begins, *steps, ends(0)))
    assert outcome.state == "finished"


DAMAGED = "[[[", "[]", '{"1": []}', '{"x": 1}', '{"1": {"status": 1}}', '{"7": 1}'


@pytest.mark.parametrize("damaged", DAMAGED)
def test_damaged_failures_are_passed_over(tmp_path, damaged):
    def breaks(job):
        job.folder.failures.write_text(damaged)
        job.status = 1

    failure, _ = told(tmp_path, starts, begins, breaks)
    assert failure == AGENT_FAILS


@pytest.mark.parametrize(
    ("kind", "message", "cause"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB", "oom"),
        ("AcceleratorError", "CUDA error: out of memory", "oom"),
        ("MemoryError", "", "oom"),
        ("OSError", "1234 MiB of shared memory in /dev/shm: there is not that much", "exception"),
        ("DistBackendError", "NCCL error in: unhandled cuda error", "nccl"),
        ("AcceleratorError", "CUDA error: an illegal memory access was encountered", "exception"),
        ("RuntimeError", "shape '[2]' is invalid", "exception"),
    ],
)
def test_the_cause_of_an_exception_is_told_by_what_it_says(tmp_path, kind, message, cause):
    failure, _ = told(tmp_path, starts, begins, raises(1, kind, message), is_seen_to_end((1, 1)))
    assert failure == (cause, 1, f"rank 1 raised {kind} in phase 'timed': {message or kind}")


TORCHS = "NCCL error in: /pytorch/ProcessGroupNCCL.cpp:3135, invalid usage"
NCCLS = f"{TORCHS}\nncclInvalidUsage: This usually reflects invalid usage.\nLast error:\n"
REASON = "Bootstrap : no socket interface found"


@pytest.mark.parametrize(("after", "said"), [(REASON, f"{REASON} ({TORCHS})"), ("", TORCHS)])
def test_the_last_error_of_nccl_comes_first_where_there_is_one(tmp_path, after, said):
    exception = raises(1, "DistBackendError", NCCLS + after)
    failure, _ = told(tmp_path / "raised", starts, begins, exception, is_seen_to_end((1, 1)))
    assert failure == ("nccl", 1, f"rank 1 raised DistBackendError in phase 'timed': {said}")

    def prints(job):
        job.folder.rank_log(1).write_text(f"  what():  {NCCLS}{after}\n")

    failure, _ = told(tmp_path / "aborted", starts, begins, prints, is_seen_to_end((1, -6)))
    assert failure == ("nccl", 1, f"rank 1 was ended by SIGABRT {TIMED}: {said}")


ABORTS = [
    ("[Rank 1] watchdog of NCCL: CUDA error: an illegal memory access", "exception"),
    ("NCCL error: remote process exited", "nccl"),
    (None, "killed"),
]


@pytest.mark.parametrize(("said", "cause"), ABORTS)
def test_an_abort_in_a_thread_of_torch_is_told_by_what_it_printed(tmp_path, said, cause):
    def prints(job):
        text = f"terminate called after throwing an instance of 'X'\n  what():  {said}\nmore\n"
        job.folder.rank_log(1).write_text(text if said else "nothing\n")

    failure, _ = told(tmp_path, starts, begins, prints, is_seen_to_end((1, -6)))
    ended = f"rank 1 was ended by SIGABRT {TIMED}"
    assert failure == (cause, 1, f"{ended}: {said}" if said else ended)


# Ranks that live and do not go on: the rank to name, and words of the message. SLEEP among threads
# stands for the fixture `asleep`.
SLEEPS = "(my_model.py:3: `time.sleep(600)`)"
IN_ALL_REDUCE = [collective("all_reduce")]
BOTH_ON_GPU = stands(rank0=[ON_GPU], rank1=[ON_GPU])
BOTH_IN_BACKWARD = stands(rank0=[BACKWARD], rank1=[BACKWARD])
HUNG = {
    "sleeps": (
        [begins, stands(rank0=[BACKWARD], rank1=["SLEEP"])],
        1, f"{TIMED} after 5 iterations: {ASLEEP}, while rank 0 waits in backward",
    ),
    "sleeps though it is not behind": (
        [lambda job: begins(job, (5, 7)), stands(rank0=IN_ALL_REDUCE, rank1=["SLEEP"])],
        1, f"after 7 iterations: {ASLEEP}, while rank 0 waits in all_reduce",
    ),
    "sleeps while the other waits for its GPU": (
        [begins, stands(rank0=["SLEEP"], rank1=[ON_GPU])],
        0, f"{SLEEPS}, while rank 1 waits for its GPU",
    ),
    "sleeps in a thread of backward": (
        [begins, stands(rank0=[BACKWARD], rank1=["SLEEP", BACKWARD])],
        1, f"{ASLEEP}, while rank 0 waits in backward",
    ),
    "works in backward while its main thread waits": (
        [begins, stands(rank0=["SLEEP"], rank1=[COMPUTES, BACKWARD])],
        0, "while rank 1 is in _conv_forward (conv.py:553)",
    ),
    "is in the user's code": (
        [begins, stands(rank0=[IMPORTS], rank1=[collective("barrier")])],
        0, "it is in load (my_model.py:1), while rank 1 waits in barrier",
    ),
    "is behind": (
        [lambda job: begins(job, (9, 7)), BOTH_IN_BACKWARD],
        1, f"{TIMED} after 7 iterations: it waits in backward, while rank 0 waits in backward",
    ),
    "computes": (
        [begins, stands(rank0=[BACKWARD], rank1=[COMPUTES])],
        1, "it is in _conv_forward (conv.py:553), while rank 0 waits in backward",
    ),
    "is stopped": (
        [begins, becomes("stopped", 0), stands(rank1=["SLEEP"])],
        0, f"it is stopped, while rank 1 is in forward {SLEEPS}",
    ),
    "writes no stack": (
        [begins, stands(rank0=IN_ALL_REDUCE)],
        1, "wrote no stack, and its process is sleeping, while rank 0 waits in all_reduce",
    ),
    "nobody writes a stack": (
        [lambda job: begins(job, (5, 4))], 1, "it wrote no stack, and its process is sleeping"
    ),
    "waits in another collective": (
        [begins, stands(rank0=IN_ALL_REDUCE, rank1=[collective("broadcast")])],
        1, "waits in all_reduce; nothing tells which of them is wrong, and the last is named",
    ),
    "waits for its GPU in another collective": (
        [begins, BOTH_ON_GPU, lambda job: add_collectives(job, "all_reduce", "broadcast")],
        1, "(unfinished: broadcast), while rank 0 waits for its GPU (unfinished: all_reduce); ",
    ),
    "does not end though it is done": (
        [begins, is_done, becomes("gone", 0), stands(rank1=["SLEEP"])],
        1, f"in phase 'exit' after 5 iterations: {ASLEEP}",
    ),
    "all wait for the agent": (
        [begins, becomes("stopped", "agent"), BOTH_IN_BACKWARD],
        None, "which starts the ranks and serves their store, is stopped; each rank waits",
    ),
    "all wait for the same": (
        [begins, BOTH_IN_BACKWARD],
        None, f"each gave no sign for 12 s {TIMED}: each of rank 0, rank 1 waits in",
    ),
}  # fmt: skip


def three_begin(job):
    begins(job, (5, 5, 5))


def second_differs(job):
    """All later collectives of rank 0 are off by one."""
    same = ["all_reduce"] * 3
    record(job, ["all_reduce", "broadcast", "all_reduce"], same, same)


OF_THREE = {
    "waits elsewhere": (
        [three_begin, stands(rank0=[BACKWARD], rank1=[IN_STORE], rank2=[BACKWARD])],
        1, "it waits in init_process_group, while each of rank 0, rank 2 waits in backward",
    ),
    "began another collective": (
        [three_begin, stands(rank0=[ON_GPU], rank1=[collective("barrier")], rank2=[ON_GPU]),
         second_differs],
        0, "collective 8 was broadcast of 1024x2 where that of the others was all_reduce of 1024x2",
    ),
}  # fmt: skip
WAIT = {"rank0": [WAITS_FOR_SERVERS], "rank1": [WAITS_FOR_SERVERS]}
SERVERS = {
    "is stopped before its first push": (
        [reaches("build"), becomes("stopped", 2), stands(**WAIT, server=[SERVES])],
        2, "it is stopped, while each",
    ),
    "sleeps before its first push": (
        [reaches("build"), stands(**WAIT, server=["SLEEP"])],
        2, f"for 12 s, in phase 'build' after 0 iterations: {ASLEEP}, while each of rank 0, rank 1",
    ),
    "sums for ever": (
        [reaches("timed", 5, 5), stands(**WAIT, server=[SUMS])], 2, "it is in serve (server.py:60"
    ),
    "waits as it should, while a rank sleeps": (
        [reaches("timed", 5, 5), stands(**WAIT | {"rank0": ["SLEEP"]}, server=[SERVES])],
        0, "while rank 1 waits for the servers, server 0 waits for gradients",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [*HUNG, *OF_THREE, *SERVERS])
def test_the_process_that_is_not_where_the_others_are_is_named(tmp_path, asleep, case):
    steps, rank, said = (HUNG | OF_THREE | SERVERS)[case]

    def with_sleep(job):
        for number, text in job.stacks.items():
            job.stacks[number] = text.replace("SLEEP", dump(asleep))

    asked = {"servers": int(case in SERVERS), "ranks": 3 if case in OF_THREE else 2}
    failure, seconds = told(tmp_path, starts, *steps, with_sleep, **asked)
    assert failure[:2] == ("hang", rank) and said in failure[2], failure
    assert 12 < seconds < 15


@pytest.mark.parametrize("status", [0, 7, -9])
def test_a_server_that_ends_before_its_first_push_ends_the_cell(tmp_path, status):
    steps = (starts, reaches("build"), is_seen_to_end((2, status), agent=None))
    (_, rank, message), seconds = told(tmp_path, *steps, servers=1)
    assert rank == 2 and message.startswith("server 0 ")
    assert seconds < 1


FIRST_STEP = starts, reaches("first step", 0, 0)


def test_the_first_step_may_be_long_and_a_rank_that_is_stopped_in_it_is_noticed_early(tmp_path):
    stand = stands(rank0=[BACKWARD], rank1=[COMPUTES])
    (cause, rank, message), seconds = told(tmp_path / "long", *FIRST_STEP, stand)
    assert (cause, rank) == ("hang", 1) and "gave no sign for 300 s" in message
    assert 300 < seconds < 305
    (_, rank, _), seconds = told(tmp_path / "stopped", *FIRST_STEP, becomes("stopped", 0))
    assert rank == 0 and seconds < 15


def test_an_agent_that_is_stopped_before_its_ranks_report_is_named_at_once(tmp_path):
    engine = FakeEngine(becomes("stopped", "agent"))
    outcome, _, seconds = supervised(tmp_path, engine, lost_after_s=6.0)
    assert outcome.failure.message.startswith("the agent, which starts the ranks and serves")
    assert outcome.failure.cause == "hang" and 6 < seconds < 8


def test_ranks_of_two_hosts_that_all_wait_name_their_hosts(tmp_path):
    waits = stands(rank0=[collective("all_reduce")], rank1=[collective("all_reduce")])
    engine = FakeEngine(starts, begins, waits)
    outcome, _, _ = supervised(tmp_path, engine, ranks=1, hosts=("a", "b"))
    said = outcome.failure.message
    assert "each of rank 0 on a, rank 1 on b waits in all_reduce" in said
    assert "no data moves between hosts a and b: check the network between them" in said
    engine = FakeEngine(starts, begins, becomes("stopped", 1), waits)
    outcome, _, _ = supervised(tmp_path / "other", engine, ranks=1, hosts=("a", "b"))
    assert outcome.failure.message.startswith("rank 1 on b gave no sign")
    assert "no data" not in outcome.failure.message


def test_a_log_without_a_stack_has_no_place(tmp_path):
    log = tmp_path / "rank0.log"
    assert watch.locate(log, 0) is None and watch.log_bytes(log) == 0
    log.write_text("Thread of mine\n  File nothing\n\x00\xff")
    assert watch.locate(log, 0) is None
    before = watch.log_bytes(log)
    with log.open("a") as file:
        file.write(dump([("/home/me/fifo", 10**9, "f")]))
    assert watch.locate(log, before).state == StackState.FOREIGN


def test_pythons_own_code_is_not_foreign_wherever_it_is_installed(tmp_path):
    log = tmp_path / "rank0.log"
    for folder in ("/usr/lib/python3.12", "/usr/lib64/python3.9", "/opt/conda/lib/python3.14"):
        log.write_text(dump([(f"{folder}/threading.py", 359, "wait"), *STEP]))
        found = watch.locate(log, 0)
        assert found.state == StackState.BUSY and "threading" not in found.words, folder


def test_the_loops_that_wait_are_where_they_are_looked_for():
    for file, function in (*watch.LOOPS, watch.WORKING):
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), (file, function)


def test_a_count_is_newer_than_the_last_line(tmp_path):
    def counts(job):
        for number, count in enumerate((90, 110, 110)):
            job.folder.rank_count(number).write_text(str(count))

    steps = (lambda job: begins(job, (100, 99, 98)), counts)
    (cause, rank, message), _ = told(tmp_path, starts, *steps, ranks=3)
    assert (cause, rank) == ("hang", 0) and "after 90 iterations" in message


def test_a_torn_line_of_a_rank_is_passed_over(tmp_path):
    folder = CellFolder(tmp_path).make()
    folder.rank_lines(0).write_bytes(
        b'{"kind": "be\n\xff\n{"kind": "beat", "time": 3.0, "iterations": 7}\n{"kind"'
    )
    watch = Watch(folder, 1)
    assert watch.update() and watch.ranks[0].iterations == 7


def test_a_rank_is_not_silent_while_another_has_not_started(tmp_path):
    def one_starts(job):
        job.write(0, "start", rank=0, pid=100)

    (cause, rank, message), seconds = told(tmp_path, one_starts)
    assert (cause, rank, message) == (
        "start",
        1,
        "rank 1 did not report within 300 s (engine.start_timeout_s)",
    )
    assert 300 < seconds < 301


CURRENT = "Current thread 0x2 (most recent call first):"
CRASH = ["Fatal Python error: Segmentation fault", CURRENT, "  the call"]
CALLERS = [f"  caller {number}" for number in range(40)]
OTHER = ["", "Thread 0x1 (most recent call first):", "  other"]
ASKED_AND_RAISED = [CURRENT, "Traceback (most recent call last):", "  why"]


@pytest.mark.parametrize(
    ("log", "tail"),
    [
        (CALLERS, CALLERS[20:]),
        ([CRASH[0], *OTHER, *CRASH[1:], *CALLERS], [*CRASH, *CALLERS[:17]]),
        (9 * ASKED_AND_RAISED, [*ASKED_AND_RAISED[1:], *(6 * ASKED_AND_RAISED)]),
    ],
)
def test_the_end_of_a_log_that_tells_most_is_kept(tmp_path, log, tail):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").write_text("\n".join(log))
    told = logs.with_log(records.Failure("hang", 0, "said"), CellFolder(tmp_path))
    assert told.log_tail.splitlines() == tail
    assert logs.few_lines(told.log_tail, 3) == (CRASH if CRASH[0] in tail else tail[-3:])
