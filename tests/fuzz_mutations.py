"""Damage to a file, drawn from a random source: what a full disk, a torn copy, an edit or a hostile sender may make of it.

A mutation takes (random, data, others) and returns bytes; `others` are further files of the same kind.
"""

import gzip
import json
import re
import sqlite3

HUGE = (
    "9" * 19, "9" * 400, "9" * 5000, "18446744073709551616", "2147483648", "1e308", "1e309", "1e-400", "1000000000", "0", "-1",
    "-0", "-9223372036854775809", "nan", "NaN", "inf", "Infinity", "-Infinity", "0x10", "1_000", "٣", "²", "½", "1.2.3", "",
)  # fmt: skip
WORDS = (
    "null",
    "true",
    "\0",
    "\x1b[2J",
    "\ufeff",
    "\u202e",
    "é" * 5,
    "..",
    "/",
    "-",
    "A" * 5000,
    "${x}",
    "%s",
    "{",
    "]",
    '"',
    "\\",
)
# What a value of a JSON file may become.
VALUES = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 1e308, -1e308, 1e-320, float("nan"), float("inf"), float("-inf"), 0.5,
    "", "0", "nan", "inf", "²", "text", "\0", "\ud800", "../../x", "x" * 3000, [], [[]], {}, [None], [1, "a"], {"": None},
    {"name": 1}, [{}], "9" * 5000,
)  # fmt: skip
NUMBER = re.compile(rb"\d+(?:\.\d+)?")
TOKEN = re.compile(rb"[^\s,:;=\[\]{}()\"<>]+")
MOST_BYTES = 1 << 20  # what a mutation makes of a file of some kB


# --- what only takes away -----------------------------------------------------------------------------------------


def cut(random, data, others):
    """The end is missing: a full disk, a copy that broke off."""
    return data[: random.randrange(len(data) + 1)]


def lost_lines(random, data, others):
    """One to three runs of lines are missing."""
    lines = data.splitlines(keepends=True)
    for _ in range(random.choice((1, 1, 2, 3))):
        at = random.randrange(len(lines) + 1)
        del lines[at : at + random.choice((1, 1, 1, 2, 5, 20))]
    return b"".join(lines)


def lost_line(random, data, others):
    """One line is missing."""
    lines = data.splitlines(keepends=True) or [b""]
    del lines[random.randrange(len(lines))]
    return b"".join(lines)


def cut_gzip(random, data, others):
    """Packed, and the end of the packed file is missing."""
    return cut(random, gzip.compress(data, 1, mtime=0), others)


def lost_entry(random, data, others):
    """An entry of an object, or an element of a list, is missing."""
    return edited(random, data, lambda parent, key: parent.__delitem__(key))


# --- bytes and lines ----------------------------------------------------------------------------------------------


def splice(random, data, others):
    """The beginning of one file and the end of another."""
    other = random.choice(others)
    return data[: random.randrange(len(data) + 1)] + other[random.randrange(len(other) + 1) :]


def flip(random, data, others):
    """Up to 20 bits are wrong."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5, 20))) if changed else ():
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def replaced_bytes(random, data, others):
    """A run of bytes is something else: rubbish, or zeros as after a crash."""
    at, length = random.randrange(len(data) + 1), random.choice((1, 1, 4, 64, 512))
    new = bytes(length) if random.random() < 0.3 else random.randbytes(length)
    return data[:at] + new + data[at + random.choice((0, length)) :]


def moved_lines(random, data, others):
    """A line is doubled, or two change places."""
    lines = data.splitlines(keepends=True) or [b""]
    a, b = (random.randrange(len(lines)) for _ in range(2))
    if random.random() < 0.5:
        lines[a], lines[b] = lines[b], lines[a]
    else:
        lines[a:a] = [lines[b]] * min(
            random.choice((1, 1, 2, 50)), 1 + (4 << 20) // (len(lines[b]) + 1)
        )
    return b"".join(lines)


def foreign_line(random, data, others):
    """A line of another file stands between."""
    lines = data.splitlines(keepends=True)
    lines.insert(
        random.randrange(len(lines) + 1),
        random.choice(random.choice(others).splitlines(keepends=True) or [b"\n"]),
    )
    return b"".join(lines)


def long_line(random, data, others):
    """A line is very long: one byte, or one piece of the file, over and over."""
    at = random.randrange(len(data) + 1)
    piece = random.choice(
        (b"0", b" ", b"[", b"\t", b",", b"a", data[at : at + random.choice((1, 3, 10, 40))] or b"x")
    )
    piece = piece.replace(b"\n", b" ")
    return data[:at] + piece * (random.choice((2_000, 20_000, 100_000)) // len(piece)) + data[at:]


def wrong_number(random, data, others):
    """A number is another one: huge, negative, not finite, not of digits."""
    return _one(random, data, NUMBER, random.choice(HUGE))


def wrong_word(random, data, others):
    """A word is another one: a number, a control character, thousands of letters."""
    return _one(random, data, TOKEN, random.choice(HUGE + WORDS))


def other_digits(random, data, others):
    """Digits of another script, which Python's isdigit() takes for digits."""
    digits = str.maketrans(
        "0123456789",
        random.choice(("٠١٢٣٤٥٦٧٨٩", "⁰¹²³⁴⁵⁶⁷⁸⁹", "０１２３４５６７８９", "①②③④⑤⑥⑦⑧⑨⑩")),
    )
    found = list(NUMBER.finditer(data))
    for match in random.sample(found, min(len(found), random.choice((1, 1, 3)))):
        data = data.replace(match[0], match[0].decode().translate(digits).encode(), 1)
    return data


def packed(random, data, others):
    """The same file as gzip, whole or damaged, or as another encoding."""
    coded = random.choice(("gzip", "gzip", "utf-16", "utf-8-sig", "crlf"))
    if coded == "crlf":
        return data.replace(b"\n", b"\r\n")
    if coded != "gzip":
        return data.decode("utf-8", "replace").encode(coded)
    whole = gzip.compress(data, 1, mtime=0)
    return random.choice((whole, whole, flip(random, whole, others), whole + whole, whole + b"x"))


ANY = (
    splice, flip, replaced_bytes, moved_lines, foreign_line, long_line, wrong_number, wrong_word, other_digits, packed,
)  # fmt: skip


def _one(random, data, pattern, new):
    """Replace one match of a pattern."""
    found = list(pattern.finditer(data))
    if not found:
        return data
    match = random.choice(found)
    return data[: match.start()] + new.encode("utf-8", "surrogatepass") + data[match.end() :]


# --- JSON, XML, YAML, SQLite --------------------------------------------------------------------------------------


def wrong_value(random, data, others):
    """Up to three values of a JSON file, or of one of its lines, have another type."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        data = edited(
            random, data, lambda parent, key: parent.__setitem__(key, random.choice(VALUES))
        )
    return data


def renamed_entry(random, data, others):
    """An entry of an object has another name, or stands elsewhere too."""

    def rename(parent, key):
        if isinstance(parent, dict):
            value = parent[key] if random.random() < 0.3 else parent.pop(key)
            parent[random.choice(("", "name", "x" * 300, "²", f"{key}x", "-1", "../x"))] = value
        else:
            parent.extend([parent[key]] * random.choice((1, 2, 1000)))

    return edited(random, data, rename)


def deep(random, data, others):
    """A value is nested thousands of levels deep."""
    depth = random.choice((60, 300, 2_000, 100_000))
    opened, closed = random.choice(
        (("[", "]"), ('{"a":', "}"), ("<a>", "</a>"), ("- ", ""), ("{a: ", "}"))
    )
    middle = random.choice(("", "1", "null"))
    return _one(random, data, TOKEN, opened * depth + middle + closed * random.choice((depth, 0)))


JSON = (wrong_value, wrong_value, wrong_value, renamed_entry, deep)


def edited(random, data, edit):
    """Return JSON, or JSON lines, in which `edit(parent, key)` has changed one place; anything else as it is."""
    try:
        whole, lines, at = json.loads(data), None, 0
    except (ValueError, RecursionError):
        lines = data.splitlines()
        at = random.randrange(len(lines) or 1)
        try:
            whole = json.loads(lines[at])
        except (ValueError, IndexError, RecursionError):
            return data
    try:
        places = list(_places(whole))
        if not places:
            return json.dumps(random.choice(VALUES)).encode()
        edit(*random.choice(places))
        text = json.dumps(whole).encode("utf-8", "surrogatepass")
    except RecursionError:
        return data
    if len(text) > MOST_BYTES:
        return data
    return (
        text
        if lines is None
        else b"".join(line + b"\n" for line in [*lines[:at], text, *lines[at + 1 :]])
    )


def _places(value):
    """Yield (parent, key) of everything inside a JSON value."""
    for key in (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    ):
        yield value, key
        yield from _places(value[key])


def xml_part(random, data, others):
    """An attribute, an element or a declaration of XML is another one."""
    what = random.choice(("attribute", "attribute", "attribute", "attribute", "element", "entity"))
    if what == "entity":
        bomb = b'<!DOCTYPE a [<!ENTITY b "cccccccccc"><!ENTITY d "&b;&b;&b;&b;&b;&b;&b;&b;">]>'
        return bomb + data.replace(b'"', b'"&d;', 3)
    if what == "element":
        return _one(
            random,
            data,
            re.compile(rb"<\w+"),
            f"<{random.choice(('gpu', 'cpu', 'pci', 'nvlink', 'system', 'net'))}",
        )
    values = re.compile(rb'(?<==")[^"]*(?=")')
    known = values.findall(data) or [b""]
    new = random.choice(
        (*HUGE, *(one.decode("utf-8", "replace") for one in known[:40]), "0,0,0", "f" * 2000)
    )
    return _one(random, data, values, new)


def yaml_part(random, data, others):
    """A YAML file has aliases that grow, a tag, a rule of Hydra's, or a value of another kind."""
    levels = random.choice((3, 8, 30))
    bomb = "a0: &a0 [x, x]\n" + "".join(
        f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, levels)
    )
    new = random.choice((
        bomb, "x: &x [*x]\n", "<<: {study: y}\n", "a: &a {b: 1}\n<<: [*a, *a]\n", "seed: !!python/object/apply:os.getpid []\n",
        "seed: !!binary aGVsbG8=\n", "? [a, b]\n: 1\n", "? {a: b}\n: 1\n", "1: 2\n", "seed: ${seed}\n", "seed: ${oc.env:HOME}\n",
        "seed: ${a.${b}\n", "study: 2020-01-01\n", "seed: 0o17\n",
        "seed: 1:30:00\n", "---\na: 1\n---\nb: 2\n", "%YAML 9.9\n---\n",
        "seed: .inf\n", "gpus: !!set {a}\n", "hydra: {run: {dir: x}}\n",
        "defaults: [x]\n", "model: null\n", "nccl: [1]\n", "\t- a\n",
        "model:\n  _target_: os.getcwd\n", "seed: ???\n", "~: ~\n", "- a\n- b\n",
        "batch_size: 1e400\n", "labels: !!omap [a: 1]\n",
    ))  # fmt: skip
    at = random.choice((0, len(data), data.find(b"\n") + 1))
    return data[:at] + new.encode() + data[at:]


def sql(random, data, folder):
    """A table of an SQLite file has other types, fewer rows or columns, or another name. `folder` is for the work."""
    path = folder / "mutated.sqlite"
    path.write_bytes(data)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.text_factory = bytes
    try:
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("PRAGMA journal_mode=OFF")
        for _ in range(random.choice((1, 1, 2, 4))):
            _statement(random, connection)
    except (
        sqlite3.Error,
        UnicodeDecodeError,
    ):  # the second: Python cannot decode SQLite's own words
        pass  # damaged before
    finally:
        connection.close()
    return path.read_bytes()


def _statement(random, connection):
    """Change one thing in a database."""
    tables = [
        name.decode()
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    ]
    if not tables:
        return
    table = random.choice(tables)
    columns = [row[1].decode() for row in connection.execute(f'PRAGMA table_info("{table}")')]
    column = random.choice(columns or ["x"])
    what = random.random()
    if what < 0.7:
        value = random.choice((
            None, -1, 0, 1, 2**62, -(2**63), 2**63 - 1, 1.5, 1e308, float("inf"), "", "text", "²", "\0", b"\xff\xfe", b"",
            "x" * 5000,
        ))  # fmt: skip
        where = random.choice(("1", "rowid = (SELECT min(rowid) FROM t)", "rowid % 3 = 0")).replace(
            " t)", f' "{table}")'
        )
        connection.execute(f'UPDATE OR IGNORE "{table}" SET "{column}" = ? WHERE {where}', (value,))
    elif what < 0.8:
        connection.execute(f'DELETE FROM "{table}" WHERE rowid % {random.choice((1, 2, 5))} = 0')
    elif what < 0.85:
        connection.execute(f'DROP TABLE "{table}"')
    elif what < 0.9:
        connection.execute(
            f'ALTER TABLE "{table}" RENAME TO "{random.choice(("x", "NVTX_EVENTS", "StringIds"))}"'
        )
    elif what < 0.95:
        connection.execute(
            f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "{random.choice(("x", "start", "name", "id"))}"'
        )
    else:
        connection.execute(f'INSERT INTO "{table}" SELECT * FROM "{table}" LIMIT 200')
