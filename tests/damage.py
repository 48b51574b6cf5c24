"""Damage to a file: what a full disk, a torn copy, an edit or a hostile sender may make of it.

A mutation takes (random, data, siblings) and returns bytes; `siblings` are files of the same kind.
"""

import gzip
import json
import re
import sqlite3
import tempfile
from pathlib import Path

HUGE = (
    "9" * 19, "9" * 400, "9" * 5000, "18446744073709551616", "2147483648", "1e308", "1e309",
    "1e-400", "1000000000", "0", "-1", "-0", "-9223372036854775809", "nan", "NaN", "inf",
    "Infinity", "-Infinity", "0x10", "1_000", "٣", "²", "½", "1.2.3", "",
)  # fmt: skip
WORDS = (
    "null", "true", "\0", "\x1b[2J", "\ufeff", "\u202e", "é" * 5, "..", "/", "-", "A" * 5000,
    "${x}", "%s", "{", "]", '"', "\\",
)  # fmt: skip
VALUES = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 1e308, -1e308, 1e-320, float("nan"),
    float("inf"), float("-inf"), 0.5, "", "0", "nan", "inf", "²", "text", "\0", "\ud800",
    "../../x", "x" * 3000, [], [[]], {}, [None], [1, "a"], {"": None}, {"name": 1}, [{}],
    "9" * 5000,
)  # fmt: skip
DIGITS = ("٠١٢٣٤٥٦٧٨٩", "⁰¹²³⁴⁵⁶⁷⁸⁹", "０１２３４５６７８９", "①②③④⑤⑥⑦⑧⑨⑩")
YAML_LINES = (
    "x: &x [*x]\n", "<<: {study: y}\n", "a: &a {b: 1}\n<<: [*a, *a]\n",
    "seed: !!python/object/apply:os.getpid []\n", "seed: !!binary aGVsbG8=\n", "? [a, b]\n: 1\n",
    "? {a: b}\n: 1\n", "1: 2\n", "seed: ${seed}\n", "seed: ${oc.env:HOME}\n", "seed: ${a.${b}\n",
    "study: 2020-01-01\n", "seed: 0o17\n", "seed: 1:30:00\n", "---\na: 1\n---\nb: 2\n",
    "%YAML 9.9\n---\n", "seed: .inf\n", "gpus: !!set {a}\n", "hydra: {run: {dir: x}}\n",
    "defaults: [x]\n", "model: null\n", "nccl: [1]\n", "\t- a\n",
    "model:\n  _target_: os.getcwd\n", "seed: ???\n", "~: ~\n", "- a\n- b\n",
    "batch_size: 1e400\n", "labels: !!omap [a: 1]\n",
)  # fmt: skip
SQL_VALUES = (
    None, -1, 0, 1, 2**62, -(2**63), 2**63 - 1, 1.5, 1e308, float("inf"), "", "text", "²", "\0",
    b"\xff\xfe", b"", "x" * 5000,
)  # fmt: skip
NUMBER = re.compile(rb"\d+(?:\.\d+)?")
TOKEN = re.compile(rb"[^\s,:;=\[\]{}()\"<>]+")
ATTRIBUTE = re.compile(rb'(?<==")[^"]*(?=")')
MOST_BYTES = 1 << 20


def cut(random, data, siblings):
    """Lose the end: a full disk, a copy that broke off."""
    return data[: random.randrange(len(data) + 1)]


def cut_gzip(random, data, siblings):
    return cut(random, gzip.compress(data, 1, mtime=0), siblings)


def lose_line(random, data, siblings):
    lines = data.splitlines(keepends=True) or [b""]
    del lines[random.randrange(len(lines))]
    return b"".join(lines)


def lose_lines(random, data, siblings):
    lines = data.splitlines(keepends=True)
    for _ in range(random.choice((1, 1, 2, 3))):
        start = random.randrange(len(lines) + 1)
        del lines[start : start + random.choice((1, 1, 1, 2, 5, 20))]
    return b"".join(lines)


def lose_entry(random, data, siblings):
    def delete(parent, key):
        del parent[key]

    return edit_json(random, data, delete)


def splice(random, data, siblings):
    """Join the beginning of one file and the end of another."""
    tail = random.choice(siblings)
    return data[: random.randrange(len(data) + 1)] + tail[random.randrange(len(tail) + 1) :]


def flip_bits(random, data, siblings):
    changed = bytearray(data)
    if changed:
        for _ in range(random.choice((1, 1, 2, 5, 20))):
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def replace_bytes(random, data, siblings):
    """Put rubbish, or zeros as after a crash, in place of a run of bytes."""
    start = random.randrange(len(data) + 1)
    length = random.choice((1, 1, 4, 64, 512))
    run = random.randbytes(length)
    if random.random() < 0.3:
        run = bytes(length)
    return data[:start] + run + data[start + random.choice((0, length)) :]


def move_lines(random, data, siblings):
    """Swap two lines, or repeat one."""
    lines = data.splitlines(keepends=True) or [b""]
    first = random.randrange(len(lines))
    second = random.randrange(len(lines))
    if random.random() < 0.5:
        lines[first], lines[second] = lines[second], lines[first]
    else:
        most = 1 + (4 << 20) // (len(lines[second]) + 1)
        lines[first:first] = [lines[second]] * min(random.choice((1, 1, 2, 50)), most)
    return b"".join(lines)


def insert_line(random, data, siblings):
    lines = data.splitlines(keepends=True)
    foreign = random.choice(siblings).splitlines(keepends=True) or [b"\n"]
    lines.insert(random.randrange(len(lines) + 1), random.choice(foreign))
    return b"".join(lines)


def lengthen_line(random, data, siblings):
    """Repeat one byte, or one piece of the file, very often in a line."""
    start = random.randrange(len(data) + 1)
    piece = data[start : start + random.choice((1, 3, 10, 40))] or b"x"
    piece = random.choice((b"0", b" ", b"[", b"\t", b",", b"a", piece)).replace(b"\n", b" ")
    times = random.choice((2_000, 20_000, 100_000)) // len(piece)
    return data[:start] + piece * times + data[start:]


def change_number(random, data, siblings):
    return replace_match(random, data, NUMBER, random.choice(HUGE))


def change_word(random, data, siblings):
    return replace_match(random, data, TOKEN, random.choice(HUGE + WORDS))


def change_digits(random, data, siblings):
    """Write digits of another script, which Python's isdigit() takes for digits."""
    digits = str.maketrans("0123456789", random.choice(DIGITS))
    matches = list(NUMBER.finditer(data))
    for match in random.sample(matches, min(len(matches), random.choice((1, 1, 3)))):
        data = data.replace(match[0], match[0].decode().translate(digits).encode(), 1)
    return data


def encode_otherwise(random, data, siblings):
    """Pack the file as gzip, whole or damaged, or write it in another encoding."""
    coding = random.choice(("gzip", "gzip", "utf-16", "utf-8-sig", "crlf"))
    if coding == "crlf":
        return data.replace(b"\n", b"\r\n")
    if coding != "gzip":
        return data.decode("utf-8", "replace").encode(coding)
    packed = gzip.compress(data, 1, mtime=0)
    flipped = flip_bits(random, packed, siblings)
    return random.choice((packed, packed, flipped, packed + packed, packed + b"x"))


def change_value(random, data, siblings):
    """Give up to three values of a JSON file, or of one of its lines, another type."""

    def replace(parent, key):
        parent[key] = random.choice(VALUES)

    for _ in range(random.choice((1, 1, 1, 2, 3))):
        data = edit_json(random, data, replace)
    return data


def rename_entry(random, data, siblings):
    """Give an entry of an object another name; repeat an element of a list."""

    def rename(parent, key):
        if isinstance(parent, list):
            parent.extend([parent[key]] * random.choice((1, 2, 1000)))
            return
        value = parent[key]
        if random.random() >= 0.3:
            del parent[key]
        names = ("", "name", "x" * 300, "²", f"{key}x", "-1", "../x")
        parent[random.choice(names)] = value

    return edit_json(random, data, rename)


def nest(random, data, siblings):
    depth = random.choice((60, 300, 2_000, 100_000))
    brackets = (("[", "]"), ('{"a":', "}"), ("<a>", "</a>"), ("- ", ""), ("{a: ", "}"))
    opening, closing = random.choice(brackets)
    middle = random.choice(("", "1", "null"))
    nested = opening * depth + middle + closing * random.choice((depth, 0))
    return replace_match(random, data, TOKEN, nested)


def change_xml(random, data, siblings):
    kind = random.choice(("attribute", "attribute", "attribute", "attribute", "element", "entity"))
    if kind == "entity":
        bomb = b'<!DOCTYPE a [<!ENTITY b "cccccccccc"><!ENTITY d "&b;&b;&b;&b;&b;&b;&b;&b;">]>'
        return bomb + data.replace(b'"', b'"&d;', 3)
    if kind == "element":
        name = random.choice(("gpu", "cpu", "pci", "nvlink", "system", "net"))
        return replace_match(random, data, re.compile(rb"<\w+"), f"<{name}")
    values = [value.decode("utf-8", "replace") for value in ATTRIBUTE.findall(data)[:40]]
    return replace_match(
        random, data, ATTRIBUTE, random.choice((*HUGE, *values, "0,0", "f" * 2000))
    )


def change_yaml(random, data, siblings):
    """Insert aliases that grow, a tag, a rule of Hydra's, or a value of another kind."""
    bomb = ["a0: &a0 [x, x]\n"]
    for level in range(1, random.choice((3, 8, 30))):
        bomb.append(f"a{level}: &a{level} [*a{level - 1}, *a{level - 1}, *a{level - 1}]\n")
    lines = random.choice(("".join(bomb), *YAML_LINES))
    start = random.choice((0, len(data), data.find(b"\n") + 1))
    return data[:start] + lines.encode() + data[start:]


def change_sql(random, data, siblings):
    """Give a table of an SQLite file other types, fewer rows or columns, or another name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.sqlite"
        path.write_bytes(data)
        connection = sqlite3.connect(path, isolation_level=None)
        connection.text_factory = bytes
        try:
            for _ in range(random.choice((1, 1, 2, 4))):
                change_table(random, connection)
        except (sqlite3.Error, UnicodeDecodeError):
            pass  # damaged before; the second: Python cannot decode SQLite's own words
        finally:
            connection.close()
        return path.read_bytes()


def change_table(random, connection):
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    if not names:
        return
    table = random.choice(names)[0].decode()
    columns = connection.execute(f'PRAGMA table_info("{table}")').fetchall()
    column = "x"
    if columns:
        column = random.choice(columns)[1].decode()
    first = f'rowid = (SELECT min(rowid) FROM "{table}")'
    where = random.choice(("1", first, "rowid % 3 = 0"))
    other_column = random.choice(("x", "start", "id"))
    statements = (
        f'DELETE FROM "{table}" WHERE rowid % {random.choice((1, 2, 5))} = 0',
        f'DROP TABLE "{table}"',
        f'ALTER TABLE "{table}" RENAME TO "{random.choice(("x", "NVTX_EVENTS", "StringIds"))}"',
        f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "{other_column}"',
        f'INSERT INTO "{table}" SELECT * FROM "{table}" LIMIT 200',
    )
    if random.random() < 0.7:
        change = f'UPDATE OR IGNORE "{table}" SET "{column}" = ? WHERE {where}'
        connection.execute(change, (random.choice(SQL_VALUES),))
    else:
        connection.execute(random.choice(statements))


def replace_match(random, data, pattern, text):
    matches = list(pattern.finditer(data))
    if not matches:
        return data
    match = random.choice(matches)
    return data[: match.start()] + text.encode("utf-8", "surrogatepass") + data[match.end() :]


def edit_json(random, data, edit):
    """Return JSON, or JSON lines, in which `edit(parent, key)` changed one place; else the data."""
    lines = data.splitlines() or [b""]
    line = random.randrange(len(lines))
    try:
        document = json.loads(data)
        lines = None
    except (ValueError, RecursionError):
        try:
            document = json.loads(lines[line])
        except (ValueError, RecursionError):
            return data
    try:
        places = list(places_of(document))
        if not places:
            return json.dumps(random.choice(VALUES)).encode()
        edit(*random.choice(places))
        text = json.dumps(document).encode("utf-8", "surrogatepass")
    except RecursionError:
        return data
    if len(text) > MOST_BYTES:
        return data
    if lines is None:
        return text
    lines[line] = text
    return b"\n".join(lines) + b"\n"


def places_of(value):
    """Yield (parent, key) of everything inside a JSON value."""
    keys = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = range(len(value))
    for key in keys:
        yield value, key
        yield from places_of(value[key])


LOSSES = (cut, cut_gzip)  # what only takes away: a reader must notice, or return less
TEXT = (
    splice, flip_bits, replace_bytes, move_lines, insert_line, lengthen_line, change_number,
    change_word, change_digits, encode_otherwise,
)  # fmt: skip
JSON = (change_value, change_value, change_value, rename_entry, nest)

# What a reader says about the damage, and where it lies.
NOTES = (".*/notes", "/truncated", "/lost", ".*/file", ".*/line")


def differences(part, whole, follows=(), path=""):
    """Yield the paths of what a part has otherwise than the whole. Lists may be shorter."""
    if part is None or any(re.fullmatch(pattern, path) for pattern in (*NOTES, *follows)):
        return
    if isinstance(part, dict) and isinstance(whole, dict):
        for key, value in part.items():
            yield from differences(value, whole.get(key), follows, f"{path}/{key}")
    elif isinstance(part, list) and isinstance(whole, list):
        rest = iter(whole)
        for element in part:
            if not any(
                not list(differences(element, other, follows, f"{path}/*")) for other in rest
            ):
                yield f"{path}/*: {element!r:.100} is new"
                return
    elif part != whole or isinstance(part, bool) is not isinstance(whole, bool):
        yield f"{path}: {part!r:.100} instead of {whole!r:.100}"
