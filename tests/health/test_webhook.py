"""The webhook against a real HTTP server on this machine: content, distance, failures, and never in the way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from trainmon.events import MicroEnd, StepBegin, StepEnd, TrainBegin, TrainEnd
from trainmon.health.webhook import Webhook
from trainmon.monitor import TrainMonitor
from trainmon.sinks.jsonl import read_jsonl


class Server:
    """Keeps what it is told; answers with ``status`` after ``hang`` seconds."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.status, self.hang = 200, 0.0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                time.sleep(outer.hang)
                outer.told.append(
                    {"path": self.path, "type": self.headers["Content-Type"], **json.loads(body)}
                )
                self.send_response(outer.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/secret?token=1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.stop()


def test_messages_arrive_in_order_and_keep_their_distance(server: Server) -> None:
    hook = Webhook(server.url, every=3600)
    for number in range(4):
        hook.put({"text": f"ä {number}"})
    hook.put({"text": "stop"}, urgent=True)
    hook.close()
    assert [(told["text"], told["left_out"]) for told in server.told] == [("ä 0", 0), ("stop", 3)]
    assert server.told[0]["type"] == "application/json" and server.told[0]["path"] == "/secret?token=1"
    assert (hook.sent, hook.failed, hook.left_out) == (2, 0, 3)
    hook.put({"text": "too late"}, urgent=True)
    hook.close()
    assert len(server.told) == 2


def test_failures_are_counted_and_the_next_message_is_tried(server: Server) -> None:
    hook = Webhook(server.url, every=0)
    server.status = 500
    hook.put({"text": "a"})
    hook.put({"text": "b"})
    hook.close()
    assert [told["text"] for told in server.told] == ["a", "b"]
    assert hook.failed == 2 and hook.sent == 0 and "500" in str(hook.error)
    assert "secret" not in str(hook.error)


def test_an_address_where_nobody_answers() -> None:
    hook = Webhook("http://127.0.0.1:9/x", every=0, timeout=1)
    hook.put({"text": "a"})
    hook.close()
    assert hook.failed == 1 and "refused" in str(hook.error).lower()


def test_a_hanging_server_delays_nothing_but_itself(server: Server) -> None:
    server.hang = 3.0
    hook = Webhook(server.url, every=0, timeout=30)
    began = time.perf_counter()
    for number in range(500):
        hook.put({"text": str(number)})
    put = time.perf_counter() - began
    hook.close(timeout=0.5)
    closed = time.perf_counter() - began - put
    assert put < 0.5 and closed < 1.5
    assert 400 < hook.left_out < 500, "what finds no room is counted"


def train(directory: Path, webhook: dict[str, Any], losses: list[float]) -> None:
    rule = {"series": "loss/global", "detector": "nonfinite", "action": ["notify", "stop"], "name": "n"}
    keys = {"output_dir": str(directory), "run_name": "r", "sinks": {"log": False}}
    monitor = TrainMonitor(keys, health={"rules": [rule], "webhook": webhook})
    monitor.begin(TrainBegin(actions=["log", "notify", "mark_unhealthy", "stop"]))  # type: ignore[arg-type]
    for step, loss in enumerate(losses, start=1):
        monitor.handle(StepBegin(step, float(step)))
        monitor.handle(MicroEnd(step, 0, loss, 8))
        monitor.handle(StepEnd(step, step + 1.0))
    monitor.handle(TrainEnd(len(losses), "completed"))
    monitor.close()


def test_a_run_tells_the_cause_and_keeps_the_address_to_itself(server: Server, tmp_path: Path) -> None:
    train(tmp_path, {"url": server.url}, [1.0, float("nan"), float("nan")])
    alarm, stop = server.told
    assert alarm["text"] == "rule 'n': loss is nan in micro-batch 0 of step 2"
    assert (alarm["run"], alarm["step"], alarm["kind"]) == ("r", 2, "alarm")
    assert alarm["data"]["series"]["loss/global"] == "NaN", "JSON that any reader takes"
    assert stop["kind"] == "stop" and stop["level"] == "error"
    assert "secret" not in (tmp_path / "r/run.json").read_text()


def test_what_could_not_be_posted_is_said(tmp_path: Path) -> None:
    train(tmp_path, {"url": "http://127.0.0.1:9/x"}, [float("nan")])
    (told,) = [e for e in read_jsonl(tmp_path / "r/rank_0/events.jsonl") if e.get("kind") == "webhook_failed"]
    assert "2 posts to the webhook failed" in told["text"]


def test_the_address_may_stand_in_the_environment(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", server.url)
    train(tmp_path, {"url_env": "HOOK"}, [float("nan")])
    assert len(server.told) == 2
    monkeypatch.delenv("HOOK")
    train(tmp_path / "b", {"url_env": "HOOK"}, [1.0])
    (told,) = [
        e for e in read_jsonl(tmp_path / "b/r/rank_0/events.jsonl") if e.get("kind") == "webhook_missing"
    ]
    assert "HOOK holds no address" in told["text"], (
        "not an exception: the other ranks don't have the variable either"
    )
