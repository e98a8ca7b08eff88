"""Seeded mutations of the files that commands read: JSON, JSON lines, tables, safetensors, and raw bytes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

# JSON values of unexpected types, and edge cases: an unpaired surrogate, numbers beyond 64 bits, NaN and infinity.
_STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**63, -(10**23), 0.5, 1e308, float("inf"), float("nan")),
    *("", " ", "\ud800", "a\x00b", "\t", "../up", "/", "a" * 5000, "\u2028", "os.getcwd", "own.Own", "float16"),
    *([], {}, [[]], {"": {}}, [1, "a"], {"_id": "d1"}),
)
_BYTES = (
    b"",
    b"\x00" * 64,
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"garbage",
    b"[" * 200_000,
    b'{"a":' * 100_000,
    b"1" * 401,
    b"\n",
)


def mutate(rng, file):
    """Damage a file in place; return a description for failure messages."""
    if rng.random() < 0.04:
        file.unlink()
        if rng.random() < 0.5:
            return "removed"
        file.mkdir()
        return "a folder in its place"
    content = file.read_bytes()
    by_kind = {".json": _json, ".jsonl": _json_lines, ".tsv": _table, ".safetensors": _safetensors}
    mutation: Callable[[random.Random, bytes], bytes] = by_kind.get(file.suffix, _raw)
    if rng.random() < 0.25:
        mutation = _raw
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        content = mutation(rng, content)
    file.write_bytes(content)
    return f"{mutation.__name__.strip('_')} -> {content[:120]!r}"


def snapshot(folder):
    """Content of every file below a folder, and None for every folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def _raw(rng, content):
    """Cut, overwrite, insert, repeat or flip bytes somewhere."""
    start, stop = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    stop = min(stop, start + rng.choice((1, 8, 100, 10**9)))
    match rng.randrange(6):
        case 0:
            return content[:start]
        case 1:
            return content[:start] + content[stop:]
        case 2:
            return content[:start] + rng.choice(_BYTES) + content[stop:]
        case 3:
            return content[:stop] + content[start:]
        case 4:
            return rng.choice(_BYTES)
    flipped = bytearray(content)
    for _ in range(rng.choice((1, 3, 30)) if flipped else 0):
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def _json(rng, content):
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return _raw(rng, content)
    return json.dumps(_strange_somewhere(rng, value)).encode()


def _strange_somewhere(rng, value):
    """A copy of the value with one element replaced, renamed, removed or repeated."""
    root = [copy.deepcopy(value)]
    slots: list[tuple[Any, Any]] = []
    stack: list[Any] = [root]
    while stack:
        holder = stack.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        # At most 30 keys: otherwise a vocabulary of thousands of words would take almost all mutations.
        for key in keys[:30]:
            slots.append((holder, key))
            if isinstance(holder[key], dict | list):
                stack.append(holder[key])
    holder, key = rng.choice(slots)
    action = rng.randrange(5)
    if action == 0 and holder is not root:
        del holder[key]
    elif action == 1 and isinstance(holder, dict):
        holder[rng.choice(("", "x", "_id", "text", "\ud800"))] = holder.pop(key)
    elif action == 2 and isinstance(holder, list) and holder is not root:
        holder.insert(key, copy.deepcopy(holder[key]))
    elif action == 3 and isinstance(holder[key], int | float):
        holder[key] = rng.choice((holder[key] + 1, holder[key] - 1, -holder[key], holder[key] * 1000, 0))
    else:
        holder[key] = copy.deepcopy(rng.choice(_STRANGE))
    return root[0]


def _json_lines(rng, content):
    lines = content.rstrip(b"\n").split(b"\n")
    line = rng.randrange(len(lines))
    match rng.randrange(6):
        case 0:
            lines.insert(line, lines[rng.randrange(len(lines))])
        case 1:
            del lines[line]
        case 2:
            lines[line] = _raw(rng, lines[line])
        case _:
            lines[line] = _json(rng, lines[line])
    return b"\n".join(lines)


def _table(rng, content):
    lines = content.rstrip(b"\n").split(b"\n")
    row = rng.randrange(len(lines))
    fields = lines[row].split(b"\t")
    field = rng.randrange(len(fields))
    match rng.randrange(5):
        case 0:
            lines.insert(row, lines[rng.randrange(len(lines))])
        case 1:
            del lines[row]
        case 2:
            del fields[field]
            lines[row] = b"\t".join(fields)
        case _:
            numbers = (b"-1", b"1.5", b"1" * 23, b"nan", b"1e9", b"0x1", b"", b" 1 ", "\u0661".encode(), b"1_0")
            fields[field] = rng.choice((*numbers, *_BYTES[2:6], b"d9", b"\xed\xa0\x80"))
            lines[row] = b"\t".join(fields)
    return b"\n".join(lines)


def _safetensors(rng, content):
    """Damage the header (with its length corrected) or the values; raw bytes if the file is no longer valid."""
    length = int.from_bytes(content[:8], "little")
    if not 0 < length <= len(content) - 8:
        return _raw(rng, content)
    header, values = content[8 : 8 + length], content[8 + length :]
    match rng.randrange(3):
        case 0:
            header = _json(rng, header)
        case 1:
            values = _raw(rng, values)
        case _:
            offset = rng.randrange(len(values) // 4 or 1) * 4
            pattern = rng.choice((b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f", b"\xff\xff\xff\xff"))
            count = rng.choice((1, 100))
            values = values[:offset] + (pattern * count)[: len(values) - offset] + values[offset + 4 * count :]
    return len(header).to_bytes(8, "little") + header + values
