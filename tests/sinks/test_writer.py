"""The writer thread: order, bounds, isolation of sinks, and its end."""

from __future__ import annotations

import errno
import logging
import threading

import pytest

from tests.sinks.make import Memory, message, run_info, snapshot, table
from trainmon.sinks.writer import PATIENCE, Writer


def disk_full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device", "scalars.jsonl")


def test_every_sink_sees_everything_in_order_from_one_thread():
    sinks = [Memory("a"), Memory("b")]
    writer = Writer(sinks, run_info(None))
    for step in range(1, 101):
        writer.put(snapshot(step))
        if step == 50:
            writer.say(message("half"))
    assert writer.close()
    expected = [*range(1, 51), "half", *range(51, 101)]
    for sink in sinks:
        assert sink.items == expected
        assert sink.calls == ["open", "flush", "close"]
        assert sink.thread is not None and sink.thread is not threading.current_thread()
    assert (writer.dropped, writer.failed, writer.lost, writer.switched_off) == (0, {}, {}, ())


def test_a_slow_sink_loses_the_oldest_steps_and_no_message():
    sink = Memory()
    sink.gate.clear()
    writer = Writer([sink], run_info(None), capacity=2)
    writer.put(snapshot(1))
    assert sink.entered.wait(60)
    # The sink hangs in step 1: whatever put() does now, it may not wait for it.
    for step in range(2, 8):
        writer.put(snapshot(step))
        writer.say(message(f"said {step}"))
    assert writer.dropped == 4
    sink.gate.set()
    assert writer.close()
    assert [item for item in sink.items if isinstance(item, int)] == [1, 6, 7]
    assert [m.text for m in sink.messages if m.kind == "test"] == [f"said {step}" for step in range(2, 8)]
    assert sink.kinds() == ["sinks_slow", "sink_losses"]
    assert sink.messages[-1].data["dropped"] == 4
    assert "4 steps dropped" in sink.messages[-1].text


def test_tables_that_wait_are_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr("trainmon.sinks.writer.WAITING", 10 * 9 * 100)
    sink = Memory()
    sink.gate.clear()
    writer = Writer([sink], run_info(None), capacity=1000)
    large = table({f"p{row}": 1.0 for row in range(100)})  # 9 bytes a value
    writer.put(snapshot(1, large))
    assert sink.entered.wait(60)
    for step in range(2, 52):
        writer.put(snapshot(step, large))
        writer.put(snapshot(1000 + step))  # without tables: no bytes, and in their order
    waiting = [one.step for _, one in writer._snapshots]
    assert [step for step in waiting if step < 1000] == list(range(42, 52)), "ten of them fit"
    writer.put(snapshot(60, table({f"p{row}": 1.0 for row in range(5000)})))
    assert [one.step for _, one in writer._snapshots] == [60], "a step by itself may be larger"
    sink.gate.set()
    assert writer.close()
    assert [item for item in sink.items if isinstance(item, int)] == [1, 60] and writer.dropped == 100
    assert writer._came == writer._went


def test_messages_are_bounded_too(monkeypatch):
    monkeypatch.setattr("trainmon.sinks.writer.MESSAGES", 3)
    sink = Memory()
    sink.gate.clear()
    writer = Writer([sink], run_info(None))
    writer.put(snapshot(1))
    assert sink.entered.wait(60)
    for number in range(5):
        writer.say(message(str(number)))
    sink.gate.set()
    writer.close()
    # The first ones name the cause, so they are the ones kept.
    assert sink.items == [1, "0", "1", "2", "sink_losses"]
    assert writer.refused == 2


def test_block_waits_for_room_and_loses_nothing():
    sink = Memory()
    sink.gate.clear()
    writer = Writer([sink], run_info(None), capacity=1, on_full="block")
    third = threading.Event()

    def train() -> None:
        for step in range(1, 4):
            if step == 3:
                third.set()
            writer.put(snapshot(step))

    training = threading.Thread(target=train)
    training.start()
    # Room for one: step 1 is in the sink's hands and still counts, so step 2 already waits.
    assert not third.wait(0.2)
    assert training.is_alive()
    sink.gate.set()
    training.join(60)
    assert not training.is_alive()
    assert writer.close()
    assert sink.items == [1, 2, 3]
    assert writer.dropped == 0


def test_block_does_not_wait_for_a_writer_that_is_gone():
    sink = Memory()
    sink.gate.clear()
    writer = Writer([sink], run_info(None), capacity=1, on_full="block")
    writer.put(snapshot(1))
    assert sink.entered.wait(60)
    training = threading.Thread(target=lambda: writer.put(snapshot(2)))
    training.start()
    assert not writer.close(timeout=0.05)
    training.join(60)
    assert not training.is_alive()
    sink.gate.set()


def test_a_sink_that_fails_in_a_row_is_switched_off_and_said_once(caplog):
    bad, good = Memory("bad"), Memory("good")
    bad.errors = [ValueError("[/b] broke")] * 10
    writer = Writer([bad, good], run_info(None))
    with caplog.at_level(logging.WARNING, "trainmon"):
        for step in range(1, 8):
            writer.put(snapshot(step))
        assert writer.close()
    assert [item for item in good.items if isinstance(item, int)] == list(range(1, 8))
    assert good.kinds() == ["sink_off", "sink_losses"]
    assert good.items[PATIENCE - 1 : PATIENCE + 1] == ["sink_off", PATIENCE]
    assert "bad failed 3 times in a row and is switched off: ValueError: [/b] broke" in good.messages[0].text
    assert [r.message for r in caplog.records].count(good.messages[0].text) == 1
    assert writer.failed == {"bad": PATIENCE}
    assert writer.switched_off == ("bad",)
    # It could release its files, and was left alone afterwards.
    assert bad.calls == ["open", "close"] and bad.messages == []


def test_failures_that_are_not_in_a_row_switch_nothing_off():
    sink = Memory()
    sink.errors = [RuntimeError("x"), RuntimeError("x"), None] * 3
    writer = Writer([sink], run_info(None))
    for step in range(1, 10):
        writer.put(snapshot(step))
    writer.close()
    assert [item for item in sink.items if isinstance(item, int)] == [3, 6, 9]
    assert writer.failed == {"memory": 6}
    assert writer.switched_off == ()


def test_a_sink_that_cannot_open_is_said_through_the_ones_after_it():
    bad, good = Memory("bad"), Memory("good")
    bad.open_error = PermissionError(errno.EACCES, "Permission denied", "runs/x")
    writer = Writer([bad, good], run_info(None))
    writer.put(snapshot(1))
    writer.close()
    assert good.items[:2] == ["sink_off", 1]
    assert "bad could not be opened" in good.messages[0].text and "runs/x" in good.messages[0].text
    assert bad.items == []


def test_a_full_disk_loses_records_but_never_the_sink():
    full, good = Memory("full"), Memory("good")
    full.errors = [None, *[disk_full()] * 5, None]
    writer = Writer([full, good], run_info(None))
    for step in range(1, 9):
        writer.put(snapshot(step))
    writer.close()
    assert [item for item in full.items if isinstance(item, int)] == [1, 7, 8]
    assert good.kinds() == ["disk_full", "disk_room", "sink_losses"]
    assert "scalars.jsonl" in good.messages[0].text
    assert "5 records were lost" in good.messages[1].text
    assert writer.lost == {"full": 5}
    assert writer.failed == {} and writer.switched_off == ()
    assert good.messages[2].data["lost"] == {"full": 5}


def test_a_sink_that_found_the_disk_full_at_opening_is_opened_later():
    sink = Memory()
    sink.open_error = disk_full()
    writer = Writer([sink], run_info(None))
    writer.put(snapshot(1))
    assert writer.flush(60)
    sink.open_error = None
    writer.put(snapshot(2))
    writer.close()
    assert [item for item in sink.items if isinstance(item, int)] == [2]
    assert writer.lost == {"memory": 2}


def test_flush_waits_for_what_was_put():
    sink = Memory()
    writer = Writer([sink], run_info(None))
    for step in range(1, 20):
        writer.put(snapshot(step))
    assert writer.flush(60)
    assert sink.items == list(range(1, 20))
    assert "flush" in sink.calls
    sink.gate.clear()
    writer.put(snapshot(20))
    assert not writer.flush(0.01)
    sink.gate.set()
    assert writer.close()
    assert writer.flush()


def test_close_gives_up_a_sink_that_hangs_and_may_be_called_again(caplog):
    sink = Memory()
    sink.gate.clear()
    writer = Writer([sink], run_info(None))
    writer.put(snapshot(1))
    assert sink.entered.wait(60)
    writer.put(snapshot(2))
    with caplog.at_level(logging.WARNING, "trainmon"):
        assert not writer.close(timeout=0.01)
        assert not writer.close(timeout=0.01)
    assert [r.message for r in caplog.records] == [
        "memory did not finish within 0.01 s; 1 steps and 0 messages were not written"
    ]
    writer.put(snapshot(3))
    sink.gate.set()
    assert writer.close(timeout=60)
    assert sink.items == [1, 2]
    assert sink.calls.count("close") == 1


def test_without_a_thread_close_writes_everything_itself(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    sink = Memory()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        writer = Writer([sink], run_info(None), capacity=2, on_full="block")
    for step in range(1, 5):
        writer.put(snapshot(step))
    assert not writer.flush(0.01)
    assert writer.close()
    assert [item for item in sink.items if isinstance(item, int)] == [3, 4]
    assert sink.thread is threading.current_thread()
    assert writer.dropped == 2


@pytest.mark.parametrize("options", [{"capacity": 0}, {"capacity": True}, {"on_full": "wait"}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Writer([], run_info(None), **options)
