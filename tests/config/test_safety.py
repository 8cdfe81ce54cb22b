"""The YAML reader under damage: mutated texts, counted references, watched memory, failing allocations."""

from __future__ import annotations

import gc
import os
import platform
import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.campaign import size
from trainmon import _config

SANITIZED = "asan" in os.environ.get("LD_PRELOAD", "")

SEEDS = [
    b"a: &x {b: [1, 2.5, 'c'], d: ~}\ne: *x\nf: |\n  text\n<<: *x\n",
    b"callbacks:\n- type: TrainMonitor\n  window: {start: 1, stop: 9}\n  target: ['^layers\\.', \"\\u00e9\"]\n",
    b"%YAML 1.1\n---\n? k\n: !!float 1e-5\nx: !!int 0x1F # c\ny: >-\n  folded\n  text\n...\n",
    b"a: &a {every: 10}\nb: &b [*a, *a]\nx: {<<: [*a, {c: 1:30}]}\nd: !foo {e: 1, e: 2}\n",
]
TOKENS = [b"{", b"}", b"[", b"]", b": ", b", ", b"&x ", b"*x", b"*a", b"<<: ", b"- ", b"? ", b"!!", b"!", b"|\n", b"'",
          b'"', b"\n", b"  ", b"\t", b"%", b"---\n", b"\\", b"#", b"\0", b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\xc2\x85",
          b"9" * 30, b"@", b"=", b"~"]  # fmt: skip


def mutated(chance: random.Random) -> bytes:
    text = bytearray(chance.choice(SEEDS))
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(text) + 1)
        match chance.randrange(4):
            case 0:
                text[at:at] = chance.choice(TOKENS)
            case 1:
                del text[at : at + chance.randint(1, 5)]
            case 2:
                text[at : at + 1] = bytes([chance.randrange(256)])
            case 3:
                other = chance.choice(SEEDS)
                start = chance.randrange(len(other))
                text[at:at] = other[start : start + chance.randint(1, 30)]
    return bytes(text)


def read(text: bytes) -> object:
    """The root, or the ParseError; any other outcome fails the test."""
    try:
        return _config.load(text, "f", max_nodes=2000)
    except _config.ParseError as error:
        lines = text.count(b"\n") + text.count(b"\r") + text.count(b"\x85") + 2
        assert error.problems and all(1 <= line <= lines and c >= 1 for line, c, _ in error.problems), text
        return None


@pytest.mark.soak
def test_mutated_texts_end_in_a_tree_or_a_parse_error() -> None:
    chance, texts = random.Random(20), size(20_000, 10_000_000)
    refused = sum(read(mutated(chance)) is None for _ in range(texts))
    assert 0.1 * texts < refused < 0.9 * texts  # both happen


def test_every_cut_of_a_text() -> None:
    for seed in SEEDS:
        for end in range(len(seed)):
            read(seed[:end])


def test_references_are_balanced_on_success_and_on_every_error() -> None:
    text, name = b"".join(SEEDS[:1]), "a name of its own"
    before = sys.getrefcount(text), sys.getrefcount(name)
    for _ in range(50):
        _config.load(text, name)
        for wrong in (b"a: 1\na: 2", b"a: [", b"\xff", b"- 1\n---\n- 1", b"a: *a", b"[" * 100, b"!x a"):
            with pytest.raises(_config.ParseError):
                _config.load(wrong, name)
        with pytest.raises(ValueError, match="max_depth"):
            _config.load(text, name, max_depth=0)
        with pytest.raises(TypeError):
            _config.load(text, name, max_depth="x")
    gc.collect()
    assert (sys.getrefcount(text), sys.getrefcount(name)) == before


def test_a_node_outlives_the_text_and_the_rest_of_its_tree() -> None:
    node = _config.load(bytes(bytearray(b"a: {b: [x, y]}")), "f").value["a"].value["b"]
    gc.collect()
    assert [item.value for item in node.value] == ["x", "y"]


def child(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.skipif(SANITIZED, reason="the sanitizer keeps freed memory for a while")
@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident size from /proc")
def test_memory_does_not_grow() -> None:
    code = f"""
        import random, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_safety import mutated, read
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096
        def run():
            chance = random.Random(5)
            for _ in range(3000):
                read(mutated(chance))
            bomb = b"a: &a [x,x,x,x,x,x,x,x]\\n" + b"".join(
                b"%c: &%c [%s]\\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 8)) for i in range(20))
            for _ in range(300):
                read(bomb)
                read(b"[" * 10_000)
                read(b"{{a: " * 10_000)
        run()
        before = resident()
        for _ in range(4):
            run()
        print(resident() - before)
    """
    assert int(child(code)) < 1 << 20  # a leak of 10 bytes a text would be near it, one of a node far above


def test_a_bomb_needs_little_memory() -> None:
    code = """
        import resource
        from tests.memory import peak
        from trainmon import _config
        lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
        lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 60)]
        text = "\\n".join(lines).encode()
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
        before = peak()
        try:
            _config.load(text, "f")
        except _config.ParseError as error:
            assert "aliases" in str(error)
            print(peak() - before)
    """
    assert int(child(code)) < 4 << 10  # KiB on Linux


def test_several_modules_and_a_fresh_import() -> None:
    code = """
        import importlib, sys
        from trainmon import _config as first
        del sys.modules["trainmon._config"]
        second = importlib.import_module("trainmon._config")
        assert first is not second and first.Node is not second.Node and first.ParseError is not second.ParseError
        root = first.load(b"a: 1", "f")
        del first
        import gc; gc.collect()
        print(type(root).__name__, root.value["a"].value, second.load(b"[2]", "f").value[0].value)
    """
    assert child(code) == "Node 1 2"


FAILING = """
    import ctypes
    from trainmon import _config
    fail_at = ctypes.CDLL(None).fail_at
    fail_at.argtypes, fail_at.restype = [ctypes.c_long], ctypes.c_long
    texts = [
        b"a: &a {every: 10, x: [1, 2.5, 1:30, 1:30.5, 0x1F, -07]}\\nb: {<<: [*a, *a], 'c': *a}\\nd: !!float 1e-5\\n",
        b"a: 1\\na: 2\\nb: !foo 3\\nc: {<<: 5}\\nd: [",
        b"".join(b"- &k%d x\\n" % i for i in range(40)),
        b"a: \\xff",
        b"",
    ]
    failures = 0
    for text in texts:
        for n in range(1, 100_000):
            error = None
            fail_at(n)
            try:
                _config.load(text, "f")
            except MemoryError:
                error = "memory"
            except _config.ParseError:
                error = "parse"
            try:
                left = fail_at(0)
            except Exception:  # the call of fail_at met the failing allocation itself
                left = 0
            if left > 0:
                break
            failures += error == "memory"
        else:
            raise SystemExit("no end")
    print(failures)
"""


@pytest.mark.skipif(SANITIZED, reason="the sanitizer has an allocator of its own")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or not shutil.which("cc"), reason="needs cc and glibc")
def test_every_allocation_that_fails_is_a_memory_error(tmp_path: Path) -> None:
    library = tmp_path / "failing_malloc.so"
    source = Path(__file__).with_name("failing_malloc.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    assert int(child(FAILING, LD_PRELOAD=str(library), PYTHONMALLOC="malloc")) > 300
