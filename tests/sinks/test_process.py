"""What happens to the files when the process is interrupted, killed, forked, or simply ends."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.sinks.make import finish, run_info, snapshot, start
from trainmon.sinks.jsonl import JsonlSink, read_jsonl

LOOP = """
writer = Writer([JsonlSink()], run_info(directory))
print("ready", flush=True)
try:
    for step in range(1, 10**9):
        writer.put(snapshot(step, loss__global=1.5, text=0.25))
finally:
    writer.close()
"""


def steps(directory, name="scalars.jsonl"):
    return [r["step"] for r in read_jsonl(directory / "rank_0" / name) if "record" not in r]


def wait_for_bytes(process, path, least):
    """Until the child has written so much; it fails with the child."""
    while not (path.exists() and path.stat().st_size > least):
        assert process.poll() is None, process.communicate()


def test_kill_leaves_whole_lines_and_the_next_life_goes_on(tmp_path):
    path = tmp_path / "rank_0" / "scalars.jsonl"
    process = start(LOOP, tmp_path)
    wait_for_bytes(process, path, 50_000)
    process.send_signal(signal.SIGKILL)
    finish(process)
    *lines, rest = path.read_bytes().split(b"\n")
    # One write a record: the kill can't tear one on a local file system.
    assert rest == b""
    numbers = [json.loads(line).get("step") for line in lines[1:]]
    assert len(numbers) > 100 and numbers == sorted(numbers)

    # A file system that does tear a record leaves half a line, which must not swallow the next one.
    os.truncate(path, path.stat().st_size - 10)
    sink = JsonlSink()
    sink.open(run_info(tmp_path, life=2, resumed_step=numbers[-1] - 1))
    sink.write(snapshot(numbers[-1], loss__global=7.0))
    sink.close()
    records = read_jsonl(path)
    assert [r["life"] for r in records if "record" in r] == [1, 2]
    assert records[-1]["loss/global"] == 7.0
    assert len(records) == len(numbers) + 2


def test_interrupt_leaves_whole_files(tmp_path):
    process = start(LOOP, tmp_path)
    wait_for_bytes(process, tmp_path / "rank_0" / "scalars.jsonl", 20_000)
    process.send_signal(signal.SIGINT)
    status, _, err = finish(process)
    assert status == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    path = tmp_path / "rank_0" / "scalars.jsonl"
    assert path.read_bytes().endswith(b"}\n")
    assert steps(tmp_path)
    # The queue overflowed on purpose; the losses were counted and said.
    assert read_jsonl(tmp_path / "rank_0" / "events.jsonl")[-1]["kind"] == "sink_losses"


def test_a_program_that_never_closes_loses_nothing(tmp_path):
    script = """
    writer = Writer([JsonlSink()], run_info(directory), capacity=1000)
    for step in range(1, 501):
        writer.put(snapshot(step))
    """
    assert finish(start(script, tmp_path)) == (0, "", "")
    assert steps(tmp_path) == list(range(1, 501))


def test_closing_while_the_interpreter_goes_down_ends(tmp_path):
    script = """
    class Late:
        # Modules may be empty by then, so it brings what it needs.
        def __del__(self, write=os.write, extra=snapshot(2)):
            self.writer.put(extra)
            self.writer.flush(0.1)
            write(1, b"%d" % self.writer.close(timeout=0.1))
    late = Late()
    late.writer = Writer([JsonlSink()], run_info(directory))
    late.writer.put(snapshot(1))
    """
    assert finish(start(script, tmp_path)) == (0, "1", "")
    assert steps(tmp_path) == [1]


def test_signal_handlers_may_say_and_close_at_any_point(tmp_path):
    script = """
    writer = Writer([JsonlSink()], run_info(directory), capacity=4)
    fired = 0
    def handler(number, frame):
        global fired
        fired += 1
        writer.say(message(f"fired {fired}"))
        writer.put(snapshot(10**6 + fired))
        writer.flush(0.0005)
        if fired < 200:
            # Armed again only now: handlers that interrupt each other would count in any order.
            signal.setitimer(signal.ITIMER_REAL, 0.001)
        else:
            print(writer.close(60), flush=True)
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    step = 0
    while fired < 200:
        step += 1
        writer.put(snapshot(step))
        writer.say(message("loop")) if step % 1000 == 0 else None
    """
    assert finish(start(script, tmp_path)) == (0, "True\n", "")
    texts = [r.get("text", "") for r in read_jsonl(tmp_path / "rank_0" / "events.jsonl")]
    assert [t for t in texts if t.startswith("fired")] == [f"fired {n}" for n in range(1, 201)]


def test_forked_children_write_nothing_and_never_hang(tmp_path):
    script = """
    writer = Writer([JsonlSink(), LogSink()], run_info(directory), capacity=10_000)
    for step in range(1, 201):
        writer.put(snapshot(step))
        if step % 20 == 0:
            child = os.fork()
            if child == 0:
                # As a data loader's worker would: uses what it inherited, prints, exits in the ordinary way.
                for extra in range(20_000, 20_100):
                    writer.put(snapshot(extra))
                    writer.say(message("from the child"))
                flushed, closed = writer.flush(5), writer.close(5)
                print("child", flushed, closed, flush=True)
                print("child", file=sys.stderr, flush=True)
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
    assert writer.close(60)
    """
    status, out, err = finish(start(script, tmp_path))
    assert status == 0, err
    assert out == "child False False\n" * 10
    # print() writes its line end apart, so that a line of the log may come in between.
    assert err.count("child") == 10
    assert steps(tmp_path) == list(range(1, 201))
    assert "from the child" not in (tmp_path / "rank_0" / "events.jsonl").read_text()
    log = (tmp_path / "rank_0" / "log.txt").read_text().splitlines()
    assert len(log) == 201


def test_a_forked_child_of_a_full_blocking_writer_does_not_wait(tmp_path):
    script = """
    from tests.sinks.make import Memory
    sink = Memory()
    sink.gate.clear()
    writer = Writer([sink], run_info(directory), capacity=1, on_full="block")
    writer.put(snapshot(1))
    child = os.fork()
    if child == 0:
        writer.put(snapshot(2))
        os._exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sink.gate.set()
    """
    assert finish(start(script, tmp_path)) == (0, "3\n", "")


LOG_ONLY = """
writer = Writer([LogSink()], run_info(directory), capacity=1000)
for step in range(1, 101):
    writer.put(snapshot(step))
print(writer.close(60), writer.failed, writer.switched_off)
"""


@pytest.mark.parametrize("how", ["closed", "broken pipe", "full"])
def test_without_a_console_the_log_file_goes_on(tmp_path, how):
    options = {}
    if how == "closed":
        options["preexec_fn"] = lambda: os.close(2)
        options["stderr"] = None
    elif how == "broken pipe":
        read, write = os.pipe()
        os.close(read)
        options["stderr"] = write
    else:
        options["stderr"] = os.open("/dev/full", os.O_WRONLY)
    process = start(LOG_ONLY, tmp_path, **options)
    if isinstance(options.get("stderr"), int):
        os.close(options["stderr"])
    status, out, _ = finish(process)
    assert (status, out) == (0, "True {} ()\n")
    lines = (tmp_path / "rank_0" / "log.txt").read_text().splitlines()
    assert sum(" step " in line for line in lines) == 100
    assert sum("the console is gone" in line for line in lines) == (how != "closed")
