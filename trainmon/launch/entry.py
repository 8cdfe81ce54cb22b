"""Our part of a host's YAML or JSON file: where it stands, and the file's text without it.

The host never sees the entry, and everything else of the file stays as it is, to the byte: lines are cut out of the
text, which is read again afterwards and must then say the same as before but for the entry.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from trainmon.config import ConfigError, Place, Problem
from trainmon.config.files import parse, read_bytes
from trainmon.config.load import entries_of, none_found
from trainmon.config.tree import Value

__all__ = ["Entry", "find_entry"]

_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_NEXT = re.compile(r"[ \t]*(?:-\s|<<[ \t]*:)")
_BOM = "\ufeff"
#: What a file has that may hold an entry of ours.
_OURS = re.compile(rb"\bTrainMonitor\b|^[ \t{,\"']*trainmon[\"']?[ \t]*:", re.MULTILINE)
_SURELY = re.compile(
    rb"\btype[\"']?[ \t]*:\s*[\"']?TrainMonitor\b|^[ \t{,\"']*trainmon[\"']?[ \t]*:", re.MULTILINE
)
_ADVICE = "put its keys into a file of their own, for --monitor, and take it out of here"


@dataclass(frozen=True, slots=True)
class Entry:
    """Our part of a file.

    Attributes:
        place: where it stands.
        rest: the file without it; None: the host builds our class by itself (`auto_register`), the file stays.
    """

    place: Place
    rest: bytes | None


def find_entry(path: str) -> tuple[Entry | None, str]:
    """Our part of a file, or None and, if something there looks like one, what is wrong with it.

    Raises:
        ConfigError: the file seems to have one and can't be read, has two, or it can't be cut out.
    """
    raw = read_bytes(path)
    if not _OURS.search(raw):
        return None, _near_miss(raw, path)
    try:
        root = parse(raw, path)
    except ConfigError as error:
        if not _SURELY.search(raw):
            return None, ""  # the host may read it otherwise
        reason = Problem(Place(path), "", f"holds an entry of type TrainMonitor, it seems; {_ADVICE}")
        raise ConfigError([*error.problems, reason]) from None
    if not isinstance(root.data, dict):
        return None, ""
    entries = entries_of(root)
    section = root.child("trainmon") if "trainmon" in root.data else None
    if not entries and section is None:
        _misplaced(root)
        return None, _hint(root)
    if len(entries) + (section is not None) > 1:
        return Entry((entries[0] if entries else root).place, None), ""  # reading the configuration says it
    if section is not None:
        return Entry(root.keys["trainmon"], _without_key(raw, root, "trainmon", section)), ""
    entry = entries[0]
    if "auto_register" in _mapping(entry):
        return Entry(entry.place, None), ""
    callbacks = root.child("callbacks")
    assert isinstance(callbacks.data, list)
    if len(callbacks.data) == 1:
        return Entry(entry.place, _without_key(raw, root, "callbacks", entry)), ""
    return Entry(entry.place, _without_item(raw, root, callbacks, entry)), ""


def _mapping(value: Value) -> Mapping[object, Value]:
    assert isinstance(value.data, dict)
    return value.data


def _near_miss(raw: bytes, path: str) -> str:
    """A hint if `callbacks:` has a type that is nearly ours."""
    if b"callbacks" not in raw or not re.search(rb"[Mm]on", raw):
        return ""
    try:
        return _hint(parse(raw, path))
    except ConfigError:
        return ""  # not ours to judge


def _hint(root: Value) -> str:
    if not isinstance(root.data, dict) or "callbacks" not in root.data:
        return ""
    callbacks = root.child("callbacks")
    said = none_found(callbacks)
    return f"{callbacks.place}: {said}" if "did you mean" in said else ""


def _misplaced(root: Value, depth: int = 0) -> None:
    """Refuses an entry below a section: nobody would read it there."""
    for value in _mapping(root).values():
        if isinstance(value.data, dict) and depth < 8:
            found = entries_of(value)
            if found:
                text = "an entry of TrainMonitor counts only under `callbacks:` at the top of the file; move it there"
                raise ConfigError([Problem(found[0].place, found[0].path, text)])
            _misplaced(value, depth + 1)


# ---- cutting ----


class _Text:
    """A file's characters, found by line and column."""

    def __init__(self, raw: bytes) -> None:
        text = raw.decode()
        self.bom = _BOM if text.startswith(_BOM) else ""
        self.text = text[len(self.bom) :]
        self.starts = [0, *(match.end() for match in _BREAK.finditer(self.text))]

    def at(self, place: Place) -> int:
        return self.starts[place.line - 1] + place.column - 1

    def line_of(self, offset: int) -> int:
        """The index of the line an offset lies in."""
        return bisect.bisect_right(self.starts, offset) - 1

    def line(self, index: int) -> str:
        end = self.starts[index + 1] if index + 1 < len(self.starts) else len(self.text)
        return self.text[self.starts[index] : end]

    def start(self, index: int) -> int:
        return self.starts[index] if index < len(self.starts) else len(self.text)

    def without(self, start: int, end: int) -> bytes:
        return (self.bom + self.text[:start] + self.text[end:]).encode()


def _without_key(raw: bytes, root: Value, key: str, entry: Value) -> bytes:
    """The file without a key at its top."""
    text = _Text(raw)
    begin = text.at(root.keys[key])
    if text.text[text.at(root.place) : begin].lstrip()[:1] == "{":
        rest = text.without(*_flow_span(text, text.at(root.place) + 1, begin))
    else:
        rest = _block_cut(text, begin, _next_key(text, root, begin), root.child(key))
    left = {name: value for name, value in _mapping(root).items() if name != key}
    if not left and parse(rest, "").data is None:
        rest += b"{}\n" if not rest or rest.endswith((b"\n", b"\r")) else b"\n{}\n"
    return _checked(rest, left, entry)


def _without_item(raw: bytes, root: Value, callbacks: Value, entry: Value) -> bytes:
    """The file without one of several entries of `callbacks:`."""
    text = _Text(raw)
    begin, key = text.at(entry.place), text.at(root.keys["callbacks"])
    limit = _next_key(text, root, key)
    if not key < begin < limit:
        _cannot(entry, "an alias or what a merge brings in")
    assert isinstance(callbacks.data, list)
    if text.text[text.at(callbacks.place)] == "[":
        rest = text.without(*_flow_span(text, text.at(callbacks.place) + 1, begin))
    else:
        rest = _block_cut(text, _dash(text, begin), limit, entry)
    left = dict(_mapping(root))
    left["callbacks"] = Value([item for item in callbacks.data if item is not entry])
    return _checked(rest, left, entry)


def _next_key(text: _Text, root: Value, begin: int) -> int:
    """Where the next key of the file's mapping stands, or the file's end."""
    return min([at for place in root.keys.values() if (at := text.at(place)) > begin], default=len(text.text))


def _last_line(value: Value) -> int:
    """The last line in which something of a value begins."""
    children: Iterable[Value] = ()
    if isinstance(value.data, dict | list):
        children = value.data.values() if isinstance(value.data, dict) else value.data
    below = map(_last_line, children)
    return max(value.place.line, *(place.line for place in value.keys.values()), *below, 0)


def _dash(text: _Text, item: int) -> int:
    """The dash before an item; its own place if there is none (which the check at the end finds)."""
    index = text.line_of(item)
    before = text.text[text.starts[index] : item]
    while not before.strip() or before.lstrip().startswith("#"):
        if index == 0:
            return item
        index -= 1
        before = text.line(index)
    at = len(before) - len(before.lstrip())
    return text.starts[index] + at if before[at] == "-" else item


def _block_cut(text: _Text, begin: int, limit: int, value: Value) -> bytes:
    """The text without the lines of what begins here, is `value`, and ends before the limit; of what follows it, blank
    lines and comments that are not indented deeper stay."""
    first, last = text.line_of(begin), text.line_of(limit) if limit < len(text.text) else len(text.starts)
    indent = begin - text.starts[first]
    for index in range(_last_line(value), last):
        if _NEXT.match(line := text.line(index)) and len(line) - len(line.lstrip()) <= indent:
            last = index  # another item, or a merge, which is no key
            break
    while last - 1 > first and _stays(text.line(last - 1), indent):
        last -= 1
    return text.without(text.starts[first], text.start(last))


def _stays(line: str, indent: int) -> bool:
    content = line.strip()
    if content.startswith("#"):
        return len(line) - len(line.lstrip()) <= indent
    return not content or content == "..."


def _flow_span(text: _Text, opened: int, begin: int) -> tuple[int, int]:
    """From where to where to cut an item of a flow collection: with the comma after it, or else the one before it.

    Args:
        opened: after the bracket that opens the collection.
        begin: where the item begins.
    """
    comma, end, closer = opened, begin, ""
    for at, character in _delimiters(text.text, opened):
        if character == ",":
            if at < begin:
                comma = at
            else:
                end, closer = at, ","
                break
        else:
            end, closer = at, character
            break
    if closer == ",":
        end += 1
        while end < len(text.text) and text.text[end] in " \t":
            end += 1
        line = text.text[text.starts[text.line_of(begin)] : begin]
        match = _BREAK.match(text.text, end)
        if not line.strip() and match:  # on lines of its own
            return begin - len(line), match.end()
        return begin, end
    start = comma
    return start, len(text.text[:end].rstrip()) if start != opened else end


def _delimiters(text: str, at: int) -> list[tuple[int, str]]:
    """The commas of a flow collection, and the bracket that closes it."""
    found: list[tuple[int, str]] = []
    depth, before = 0, ","
    while at < len(text):
        character = text[at]
        if character in "\"'" and before in " \t\n\r,[{:":
            at = _quoted(text, at)
            before = character
            continue
        if character == "#" and before in " \t\n\r":
            match = _BREAK.search(text, at)
            at = match.start() if match else len(text)
            continue
        if character in "[{":
            depth += 1
        elif character in "]}":
            if depth == 0:
                return [*found, (at, character)]
            depth -= 1
        elif character == "," and depth == 0:
            found.append((at, character))
        before = character
        at += 1
    return found


def _quoted(text: str, at: int) -> int:
    """After the end of a quoted text."""
    quote = text[at]
    at += 1
    while at < len(text):
        if quote == '"' and text[at] == "\\":
            at += 2
            continue
        if text[at] == quote:
            if quote == "'" and text[at : at + 2] == "''":
                at += 2
                continue
            return at + 1
        at += 1
    return at


# ---- the check ----


def _checked(rest: bytes, left: Mapping[object, Value], entry: Value) -> bytes:
    """The text, if it says what is to be left.

    Raises:
        ConfigError: it doesn't.
    """
    try:
        found = parse(rest, entry.place.file or "")
    except ConfigError:
        _cannot(entry, "it has an anchor that others use, or a form that is too unusual")
    if not _same(found, Value(dict(left))):
        _cannot(entry, "an alias, what a merge brings in, or a form that is too unusual")
    return rest


def _cannot(entry: Value, reason: str) -> NoReturn:
    text = f"can't be cut out of the file for the host: {reason}; {_ADVICE}"
    raise ConfigError([Problem(entry.place, entry.path, text)])


def _same(one: Value, other: Value) -> bool:
    if isinstance(one.data, dict) and isinstance(other.data, dict):
        return list(one.data) == list(other.data) and all(
            _same(value, other.child(key)) for key, value in one.data.items()
        )
    if isinstance(one.data, list) and isinstance(other.data, list):
        return len(one.data) == len(other.data) and all(map(_same, one.data, other.data))
    return (
        type(one.data) is type(other.data) and one.text == other.text and repr(one.data) == repr(other.data)
    )
