"""The log: what its lines say, and how they look on a terminal and elsewhere."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess

import pytest

from tests.sinks.make import message, run_info, snapshot, start, table
from trainmon.sinks.base import (
    literal,
    long_time,
    percent,
    scientific,
    short_number,
    short_time,
    significant,
    whole_number,
)
from trainmon.sinks.log import LogSink, format_message, format_step

NAMES = ["experts[/0].w", "w[bold]x", "[red]a", "[/b]", ":smile:", "a\\[b]"]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def show(tmp_path, *items, stream=None, **facts):
    """What a sink writes to its console for snapshots and messages; its log.txt stays in ``tmp_path``."""
    stream = io.StringIO() if stream is None else stream
    options = {key: facts.pop(key) for key in ("every", "progress", "file", "series") if key in facts}
    sink = LogSink(stream=stream, **options)
    sink.open(run_info(tmp_path, **facts))
    for item in items:
        sink.message(item) if hasattr(item, "kind") else sink.write(item)
    sink.flush()
    sink.close()
    return stream.getvalue()


def test_the_line_of_a_step():
    shown = snapshot(
        12,
        total=150,
        loss__global=2.34567,
        grad__norm=1.2345,
        optim__lr=3e-4,
        perf__tokens_per_second=12345.6,
        time__step=0.83,
        time__eta=131.4,
        grad__nonfinite=0.0,
        perf__monitor_overhead=0.0012,
        moe__dead=1.0,
    )
    assert format_step(shown) == (
        "step  12/150  loss  2.3457  grad norm  1.2345  lr 3.000e-04  12.3k tok/s   830 ms/step  "
        "monitor 0.12%  ETA  2:11"
    )


def test_further_series_by_name(tmp_path):
    few = table({"0": 2.0, "1": None, "2": 1.5}, series="loss/micro", probe="loss")
    many = table({f"w[{row}]": row / 8 for row in range(9)}, series="grad/norm_local/<p>")
    shown = snapshot(3, few, many, loss__global=1.0, loss__device=2.5, grad__norm_device=None)
    patterns = [re.compile("^loss/"), re.compile("^grad/norm_(local|device)$"), re.compile("^nothing$")]
    line = "step      3  loss  1.0000  loss/device 2.5000  grad/norm_device -  loss/micro 2.0000 1.5000  "
    line += "grad/norm_local 0.50000, at most 1.0000 (w[8])\n"
    assert show(tmp_path, shown, series=patterns) == line
    assert show(tmp_path, shown) == "step      3  loss  1.0000\n"
    unknown = table({"0": None}, series="loss/micro", probe="loss")
    assert show(tmp_path, snapshot(3, unknown), series=patterns).endswith("loss/micro -\n")


def test_null_nonfinite_and_absent():
    line = format_step(snapshot(3, loss__global=math.nan, grad__norm=None, grad__nonfinite=17.0))
    assert line == "step      3  loss     NaN  grad norm       -  !! 17 NON-FINITE GRADIENT VALUES"
    assert "Inf" in format_step(snapshot(3, loss__global=math.inf))
    assert format_step(snapshot(3, other=1.0)) == "step      3"
    assert format_step(snapshot(3, optim__overflow=1.0)).endswith("!! OVERFLOW")


def test_columns_stay_in_place():
    lines = [
        format_step(snapshot(step, total=1000, loss__global=loss, grad__norm=norm, time__step=time))
        for step, loss, norm, time in [
            (1, 10.832, 123.4, 12.0),
            (1000, 0.98765, 0.5, 0.012),
            (9, None, math.inf, 1),
        ]
    ]
    assert len({line.index("grad norm") for line in lines}) == 1
    assert len({line.index("/step") for line in lines}) == 1


@pytest.mark.parametrize(
    ("formatter", "value", "expected"),
    [
        (significant, 2.34567, "2.3457"),
        (significant, 12345.678, "12346"),
        (significant, 0.0, "0"),
        (significant, 1.23456e-7, "1.2346e-07"),
        (significant, -math.inf, "-Inf"),
        (scientific, 3e-4, "3.000e-04"),
        (scientific, 0.0, "0"),
        (short_number, 987.0, "987"),
        (short_number, 9.996, "10.0"),
        (short_number, 999.6, "1.00k"),
        (short_number, 12345.6, "12.3k"),
        (short_number, 1.5e15, "1500T"),
        (short_number, math.nan, "NaN"),
        (whole_number, 3.0, "3"),
        (percent, 0.457, "45.7%"),
        (short_time, 0.00085, "850 us"),
        (short_time, 0.9999, "1.00 s"),
        (short_time, 0.0123, "12.3 ms"),
        (short_time, 83.21, "83.2 s"),
        (short_time, 605.0, "10:05"),
        (long_time, 59.6, "1:00"),
        (long_time, 11220.0, "3:07:00"),
        (long_time, 2 * 86400 + 11220.0, "2d 03:07:00"),
        (long_time, -3.0, "0:00"),
        (long_time, math.inf, "Inf"),
    ],
)
def test_numbers_for_people(formatter, value, expected):
    assert formatter(value) == expected


def test_plain_lines_when_there_is_no_terminal(tmp_path):
    items = [snapshot(1, total=10), message("a\nb\rc\x1b[31md", level="error"), snapshot(2, total=10)]
    out = show(tmp_path, *items, progress=True)
    assert out == ("step  1/10  loss  1.0000\nERROR: step 1: a\\nb\\rc\\x1b[31md\nstep  2/10  loss  2.0000\n")


@pytest.mark.parametrize("name", NAMES)
def test_every_character_is_shown(tmp_path, name, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    plain = show(tmp_path, message(name))
    assert f"step 1: {name}\n" in plain
    drawn = show(tmp_path, snapshot(1), message(name), stream=Terminal(), name=name)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn)
    assert f"WARNING: step 1: {name}" in text
    # And as the name of the run, beside the bar.
    assert f"\r{name} ━" in text or f"\n{name} ━" in text
    assert f"step 1: {name}\n" in (tmp_path / "rank_0" / "log.txt").read_text()


def test_log_file(tmp_path):
    show(tmp_path, *(snapshot(step) for step in range(1, 8)), message("said", step=7, level="info"), every=3)
    show(tmp_path, snapshot(4), life=2, resumed_step=3, name="d\x1be")
    lines = (tmp_path / "rank_0" / "log.txt").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", line) for line in lines)
    assert [line[21:] for line in lines] == [
        "run demo, life 1",
        "step      1  loss  1.0000",
        "step      3  loss  3.0000",
        "step      6  loss  6.0000",
        "step 7: said",
        "run d\\x1be, life 2, resumed after step 3",
        "step      4  loss  4.0000",
    ]


def test_a_torn_last_line_is_ended(tmp_path):
    show(tmp_path, snapshot(1))
    path = tmp_path / "rank_0" / "log.txt"
    os.truncate(path, path.stat().st_size - 4)
    show(tmp_path, snapshot(2), life=2)
    assert [line[21:] for line in path.read_text().splitlines()][1:3] == [
        "step      1  loss  1.0",
        "run demo, life 2",
    ]


def test_the_file_can_be_off_and_the_rank_is_named_among_many(tmp_path):
    out = show(tmp_path, snapshot(1), message(), rank=3, world=8, file=False)
    assert out == "[rank 3] step      1  loss  1.0000\n[rank 3] WARNING: step 1: hello\n"
    assert not (tmp_path / "rank_3").exists()


def test_a_stream_that_cannot_encode_a_name(tmp_path):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    sink = LogSink(stream=stream)
    sink.open(run_info(tmp_path))
    sink.message(message("é"))
    sink.close()
    assert raw.getvalue() == b"WARNING: step 1: \\xe9\n"
    assert "é" in (tmp_path / "rank_0" / "log.txt").read_text()


def test_a_stream_that_is_closed_under_way(tmp_path):
    stream = io.StringIO()
    sink = LogSink(stream=stream)
    sink.open(run_info(tmp_path))
    sink.write(snapshot(1))
    stream.close()
    for step in (2, 3):
        sink.write(snapshot(step))
    sink.close()
    lines = (tmp_path / "rank_0" / "log.txt").read_text().splitlines()
    assert sum("the console is gone" in line for line in lines) == 1
    assert lines[-1].endswith("step      3  loss  3.0000")


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="progress"):
        LogSink(progress="yes")
    with pytest.raises(ValueError, match="every"):
        LogSink(every=0)


def test_message_levels():
    assert format_message(message("x", level="info")) == "step 1: x"
    assert literal("tab\there\x9b") == "tab\\there\\x9b"


SCRIPT = """
writer = Writer([LogSink(file=False)], run_info(directory, name="gpt[/x]", total_steps=20))
for step in range(1, 21):
    writer.put(snapshot(step, total=20, loss__global=1.0 / step, time__eta=20.0 - step))
    if step == 3:
        writer.say(message("w[bold]x is NaN", step=3))
    writer.flush(60)
    if step == 10:
        print("MARK", flush=True)
writer.close()
"""


def on_a_terminal(tmp_path, **environment):
    """What a program draws on a pseudo-terminal that is its standard error."""
    leader, follower = os.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environment}
    env = {name: value for name, value in env.items() if value is not None}
    if "NO_COLOR" not in environment:
        env.pop("NO_COLOR", None)
    process = start(SCRIPT, tmp_path, stderr=follower, stdout=subprocess.DEVNULL, env=env)
    os.close(follower)
    drawn = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:
            # Linux's way of saying that the other side is closed.
            break
        if not piece:
            break
        drawn += piece
    os.close(leader)
    assert process.wait(60) == 0
    return drawn.decode()


def screen(drawn):
    """The lines that stay visible: a terminal small enough to write down."""
    rows, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", drawn):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif token.endswith("A") and token.startswith("\x1b"):
            row -= int(token[2:-1] or 1)
        elif token == "\x1b[2K":
            rows[row] = ""
        elif not token.startswith("\x1b"):
            rows[row] = rows[row][:column].ljust(column) + token + rows[row][column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in rows if line.strip()]


def test_a_bar_below_the_lines_on_a_terminal(tmp_path):
    drawn = on_a_terminal(tmp_path)
    *lines, bar = screen(drawn)
    assert lines[2] == "step  3/20  loss 0.33333  ETA  0:17"
    assert lines[3] == "WARNING: step 3: w[bold]x is NaN"
    assert len(lines) == 21 and lines[-1].startswith("step 20/20")
    assert re.fullmatch(r"gpt\[/x\] ━+ 20/20 100% ETA 0:00", bar)
    assert "10/20 50% ETA 0:10" in drawn
    # The warning is coloured, and a killed run would leave the cursor visible.
    assert "\x1b[33m" in drawn
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")
    first_line = drawn.index("step  2/20")
    assert "\x1b[?25l" not in drawn[first_line:]


def test_no_color_on_a_terminal(tmp_path):
    drawn = on_a_terminal(tmp_path, NO_COLOR="1")
    assert not re.search(r"\x1b\[(3|4|9)[0-9]|\x1b\[[34]8;", drawn)
    assert len(screen(drawn)) == 22


@pytest.mark.parametrize("term", ["dumb", None])
def test_plain_lines_on_a_terminal_that_cannot_draw(tmp_path, term):
    drawn = on_a_terminal(tmp_path, TERM=term)
    assert "\x1b" not in drawn
    assert len(drawn.splitlines()) == 21
