"""Hostile versions of the files that the program reads: they keep the structure and change what it contains."""

from __future__ import annotations

import contextlib
import copy
import csv
import io
import json
import os
import struct
import zipfile
import zlib
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

TEXTS = (
    "",
    "x" * 100_000,
    "../../../../etc/passwd",
    "/etc/passwd",
    "/dev/zero",
    "file:///etc/passwd",
    "~/x",
    ".",
    "\x00",
    "a\x1b[2J\x1b]0;title\x07b",
    "\u202ehidden\u2066\u200f",
    "line\nline\r\nline",
    "<script>alert(1)</script>",
    "{{ 7 * 7 }} %s {0.__class__}",
    "=1+1",
    "\ud800",
    "9" * 5000,
    "nan",
    "🐈" * 50,
)
NUMBERS = (0, -1, 1, 2, 1.5, 255, 256, 2**31, 2**63 - 1, 2**63, 10**30, -(10**30), 1e308, -1e-308, float("nan"), float("inf"))
OTHERS = (None, True, False, [], {}, [[]], [None], {"": ""}, [1] * 10_000, {str(number): number for number in range(2000)})
NETWORKS = (
    {"kind": "wide_resnet", "filters": 4096, "scales": 6, "repeat": 64},
    {"kind": "wide_resnet", "filters": 512, "scales": 4, "repeat": 4},
    {"kind": "resnet18"},
    {"kind": "pretrained", "backbone": "hf:/etc"},
    {"kind": "pretrained", "backbone": "efficientnet-lite0"},
    {"kind": "own", "code": "/etc/passwd.py:run#12345678"},
    {"kind": "own", "code": "../mine.py:run#12345678"},
)
NASTY: dict[str, tuple[Any, ...]] = {
    "network": NETWORKS,
    "refiner": ({"prototypes": 10**9, "heads": 4}, {"prototypes": 5, "heads": 10**9}, {"prototypes": -1, "heads": 0}),
    "architecture": ({"width": 1e9, "depth": 1e9}, {"model_type": "vit", "hidden_size": 10**6}),
    "class_names": ([], ["a"], ["a"] * 3, [f"class {number}" for number in range(100_000)], [None, 1, []]),
    "folder": ("/", "/proc", "/dev", "/etc", "..", "relative/folder"),
    "labels_file": ("/dev/zero", "/dev/stdin", "/proc/self/mem", "/etc/passwd", "labels.csv", "/"),
    "setting": ("digits@4", "cifar10@4", "../stripes@2", "stripes@99999999", "stripes@0", "mine.py:data@4", "/"),
    "code": ("mine.py:run#12345678", "/etc/passwd.py:run#12345678", "os:system#0"),
    "image_size": (8, 9, 512, 513),
    "name": ("supervised", "mine.py:Method", "os.system", "unknown"),
    "steps": (1, 2**40),
    "confusion": ([[1]], [[1, 2], [3, 4]], [[10**9] * 3] * 3, [[0] * 3] * 3),
    "test_images": (0, 10**12),
}
"""Values that mean something under a key."""


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every container with each of its keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        found.append((value, key))
        _places(inner, found)
    return found


def mutate_values(values: Any, source: Random) -> Any:
    """JSON values with one to three changes."""
    values = copy.deepcopy(values)
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        places = _places(values, [])
        if not places:
            return source.choice((*OTHERS, *NUMBERS))
        container, key = source.choice(places)
        kind = source.randrange(8)
        if kind == 0 and isinstance(container, dict):
            del container[key]
        elif kind == 1 and isinstance(container, dict):
            container[source.choice(TEXTS)] = copy.deepcopy(source.choice(OTHERS))
        elif kind == 2:
            other, place = source.choice(places)
            container[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(container[key])
        elif kind == 3 and isinstance(container[key], int | float):
            container[key] = container[key] * source.choice((-1, 0.5, 1000, 10**6, 10**12)) + source.choice((0, 1))
        elif kind >= 5 and (meant := [place for place in places if place[1] in NASTY]):
            container, key = source.choice(meant)
            container[key] = copy.deepcopy(source.choice(NASTY[key]))
        else:
            container[key] = copy.deepcopy(source.choice(source.choice((TEXTS, NUMBERS, OTHERS))))
    return values


def mutate_bytes(content: bytes, source: Random) -> bytes:
    """Cut off, flipped or inserted bytes, or a deep nesting."""
    place = source.randrange(len(content) or 1)
    kind = source.randrange(5)
    if kind == 0:
        return content[:place]
    if kind == 1:
        return content[:place] + bytes([source.randrange(256)]) + content[place + 1 :]
    if kind == 2:
        return content[:place] + source.randbytes(source.randint(1, 8)) + content[place:]
    if kind == 3:
        return source.choice((b"[", b'{"a":')) * source.choice((100, 100_000)) + content
    return source.choice((b"", b"null", b"[]", b"{}", b"\xff\xfe", b'"text"', b"-Infinity", content * 2))


def mutate_json(content: bytes, source: Random) -> bytes:
    if source.randrange(5) == 0:
        return mutate_bytes(content, source)
    return json.dumps(mutate_values(json.loads(content), source)).encode("utf-8", "surrogatepass")


def mutate_lines(content: bytes, source: Random) -> bytes:
    """Lines of JSON."""
    lines = content.splitlines()
    for _ in range(source.randint(1, 3)):
        place = source.randrange(len(lines))
        kind = source.randrange(6)
        if kind == 0:
            del lines[place]
            lines = lines or [b""]
        elif kind == 1:
            lines.insert(place, lines[source.randrange(len(lines))])
        elif kind == 2:
            lines = lines[:place] + [lines[place]] * 1000 + lines[place:]
        elif kind == 3:
            lines[place] = b'{"step": %d}' % source.choice((-1, 0, 10**30))
        else:
            lines[place] = (mutate_bytes if kind == 4 else mutate_json)(content.splitlines()[0], source).replace(b"\n", b" ")
    return b"\n".join(lines) + source.choice((b"\n", b""))


def mutate_safetensors(content: bytes, source: Random) -> bytes:
    """Another header, or other numbers."""
    length = int.from_bytes(content[:8], "little")
    header, numbers = json.loads(content[8 : 8 + length]), content[8 + length :]
    kind = source.randrange(7)
    if kind == 0:
        return mutate_bytes(content, source)
    if kind == 1:
        return source.choice((2**63 - 1, 2**32, length + 1, length - 1, 0)).to_bytes(8, "little") + content[8:]
    if kind == 2:
        floats = np.frombuffer(numbers, np.float32).copy()
        floats[:: source.choice((1, 2, 7))] = source.choice((np.nan, np.inf, 3e38, 0, -1))
        numbers = floats.tobytes()
    elif kind == 3:
        header = mutate_values(header, source)
    else:
        name = source.choice(list(header))
        tensor = header[name]
        if kind == 4 and "shape" in tensor:
            others = ([2**40, 2**40], [0], [], [-1], [10**9], tensor["shape"][::-1], [1, *tensor["shape"]])
            tensor["shape"] = source.choice(others)
        elif kind == 5 and "dtype" in tensor:
            tensor["dtype"] = source.choice(("F64", "F16", "BF16", "I8", "BOOL", "U64", "X", "F8_E4M3"))
        else:
            header[source.choice(TEXTS[:8])] = header.pop(name)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + numbers


def mutate_checkpoint(content: bytes, source: Random) -> bytes:
    """Other values in the header, or what can be wrong with every safetensors file."""
    if source.randrange(2):
        return mutate_safetensors(content, source)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    about = header["__metadata__"]
    values = mutate_values({"step": about["step"], "values": json.loads(about["values"])}, source)
    for key in about if isinstance(values, dict) else ():
        text = values.get(key)
        about[key] = text if isinstance(text, str) else json.dumps(text)
    if source.randrange(20) == 0:
        about["values"] = "[" * 100_000
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def mutate_xml(content: bytes, source: Random) -> bytes:
    """Other texts, missing or repeated elements, entities that expand or name files."""
    if source.randrange(5) == 0:
        return mutate_bytes(content, source)
    lines = content.decode().splitlines()
    for _ in range(source.randint(1, 3)):
        place, kind = source.randrange(len(lines)), source.randrange(6)
        if kind == 0:
            del lines[place]
            lines = lines or [""]
        elif kind == 1:
            lines[place] = (lines[place] * source.choice((2, 1000)))[:100_000_000]
        elif kind == 2:
            lines = ["<a>" * source.choice((100, 100_000)), *lines]
        elif kind == 3:
            entity = source.choice(('"' + "&b;" * 50 + '"', 'SYSTEM "file:///etc/passwd"', 'SYSTEM "/dev/zero"'))
            lines = [f'<!DOCTYPE a [<!ENTITY b "{"x" * 1000}"><!ENTITY c {entity}>]>', *lines]
            lines[-2] = lines[-2].replace("across", "&c;")
        else:
            attribute = source.choice(("0.png", "across", "name", "label"))
            lines[place] = lines[place].replace(attribute, source.choice(TEXTS))
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def mutate_csv(content: bytes, source: Random) -> bytes:
    """Lines of `path,label`."""
    if source.randrange(6) == 0:
        return mutate_bytes(content, source)
    rows = list(csv.reader(io.StringIO(content.decode())))
    paths = ("0", "1", "../0.png", "/etc/passwd", "unlabeled/../unlabeled/0.png", ".\\unlabeled\\1.png", "99999999999999999999")
    for _ in range(source.randint(1, 4)):
        place = source.randrange(len(rows))
        kind = source.randrange(6)
        if kind == 0:
            rows[place] = []
        elif kind == 1:
            rows.insert(place, [source.choice((*paths, *TEXTS)), source.choice(("across", "down", "stripe 1", *TEXTS))])
        elif kind == 2:
            rows[place] = (rows[place] * source.choice((2, 1000)))[:5000]
        elif kind == 3:
            rows = rows + [rows[place]] * min(5000, 50_000_000 // (1 + sum(map(len, rows[place]))))  # at most 50 MB more
        elif rows[place]:
            rows[place][source.randrange(len(rows[place]))] = source.choice((*paths, *TEXTS))
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=source.choice(",,,;\t"), escapechar="\\").writerows(rows)
    return source.choice((b"", b"", b"\xef\xbb\xbf")) + text.getvalue().encode("utf-8", "surrogatepass")


def _member(description: dict[str, Any], content: bytes) -> bytes:
    header = repr(description).encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def mutate_npz(content: bytes, source: Random) -> bytes:
    """Arrays of other types, shapes and values; headers that lie; archives that expand or overlap."""
    if source.randrange(6) == 0:
        return mutate_bytes(content, source)
    arrays = dict(np.load(io.BytesIO(content)))
    members: dict[str, bytes] = {}
    for _ in range(source.randint(1, 2)):
        key = source.choice(list(arrays))
        array, kind = arrays[key], source.randrange(10)
        if kind == 0:
            kinds = (
                ("int8", "uint64", "float32", "complex64", "U3", "S2", "bool", "M8[s]") if array.dtype.kind != "U" else ("S",)
            )
            with contextlib.suppress(RuntimeError, ValueError):  # not every type can be converted
                arrays[key] = array.astype(source.choice(kinds))
        elif kind == 1:
            with contextlib.suppress(ValueError):  # of an empty array
                arrays[key] = array.reshape(source.choice(((-1,), (1, -1), (*array.shape, 1), (len(array), -1))))
        elif kind == 2:
            arrays[key] = array[source.choice((slice(0), slice(1), slice(None, None, -1), slice(3)))]
        elif kind == 3 and array.dtype.kind in "iu" and array.size:
            arrays[key] = array.astype(np.int64)
            arrays[key].flat[source.randrange(array.size)] = source.choice((-1, -2, 2**40, 2**62, 10**9, 7))
        elif kind == 4:
            shape = source.choice(((2**62,), (10**9, 32, 32, 3), (-1,), (0, 2**60), (2**31, 2**31, 2**31), array.shape))
            descr = source.choice((array.dtype.str, "|O", "<U1000000000", "|V8", [("a", "<i4")], "<f8"))
            described = {"descr": descr, "fortran_order": source.choice((True, False)), "shape": shape}
            members[key] = _member(described, array.tobytes())
        elif kind == 5:
            members[key] = _member({"descr": "|u1", "fortran_order": False, "shape": (10**8 // 64, 8, 8, 1)}, bytes(10**8))
        elif kind == 6:
            members[key] = b"\x93NUMPY\x01\x00" + struct.pack("<H", 60_000) + b"(" * 60_000
        elif kind == 7:
            names = np.array([source.choice(TEXTS[1:16]) for _ in range(3)])
            arrays["class_names"] = names
        elif kind == 8:
            shape = (3, *source.choice(((1, 1, 1), (7, 8, 1), (8, 8, 2), (8, 8, 3), (9, 16, 1), (8, 8, 0))))
            arrays[source.choice(("unlabeled_images", "train_images", "test_images"))] = np.zeros(shape, np.uint8)
        else:
            del arrays[key]
            if not arrays:
                break
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", source.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for key, array in arrays.items():
            if key not in members:
                member = io.BytesIO()
                np.save(member, array)
                members[key] = member.getvalue()
        for key, member_content in members.items():
            kind = zipfile.ZIP_DEFLATED if len(member_content) > 10**7 else archive.compression
            archive.writestr(source.choice(("", "", "", "", "../", "/")) + f"{key}.npy", member_content, kind)
    return file.getvalue()


def mutate_folder(folder: Path, source: Random) -> None:
    """Add one to three strange things to a folder of pictures."""
    for number in range(source.randint(1, 3)):
        place = folder / source.choice(("labeled/across", "labeled", "unlabeled", "test/down", "."))
        name = source.choice(
            (f"{number}.png", f"\x1b[2J{number}.jpg", "line\nbreak.gif", "\udcff.png", "x" * 251 + ".png", "-rf.bmp")
        )
        kind = source.randrange(8)
        if os.path.lexists(place / name):
            continue
        if kind == 0:
            goals = ("/dev/zero", "/etc/passwd", "/nowhere", "..", "../labeled", name, "/proc/self/fd", folder)
            (place / name).symlink_to(source.choice(goals))
        elif kind == 1:
            os.mkfifo(place / name)
        elif kind == 2:
            (place / "/".join(["deep"] * source.choice((50, 400)))).mkdir(parents=True, exist_ok=True)
        elif kind == 3:
            (place / f"class {name[:60]}").mkdir(exist_ok=True)
        elif kind == 4:  # a picture whose header promises 2**31 times 2**31 pixels
            header = struct.pack(">II5B", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)
            chunk = struct.pack(">I", len(header)) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
            (place / name).write_bytes(b"\x89PNG\r\n\x1a\n" + chunk)
        elif kind == 5:
            (place / name).write_bytes(source.choice((b"", b"GIF89a", source.randbytes(1000), b"II*\x00" + b"\xff" * 100)))
        elif kind == 6 and (found := sorted((folder / "unlabeled").glob("*.jpg"))):
            chosen = source.choice(found)
            chosen.write_bytes(mutate_bytes(chosen.read_bytes(), source))
        else:
            for file in sorted((folder / source.choice(("test/down", "labeled/down", "unlabeled"))).iterdir()):
                if not file.is_dir():
                    file.unlink()
