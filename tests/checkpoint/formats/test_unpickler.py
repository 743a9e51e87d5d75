"""Crafted pickles in every unpickled file: nothing is executed, and the message names the file."""

from __future__ import annotations

import argparse
import collections
import copyreg
import io
import itertools
import pathlib
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from msrl.checkpoint.distributed.read import read_common, read_metadata
from msrl.checkpoint.distributed.sections import SectionFile
from msrl.checkpoint.hf.weight_files import open_torch
from msrl.checkpoint.mcore.files import read_rank_file
from msrl.checkpoint.torch_files import pickle_names, unpickler
from msrl.checkpoint.torch_files.pickle_names import CONSTRUCTORS, Foreign, Global, resolve
from msrl.checkpoint.torch_files.reader import read_torch_file
from msrl.errors import MsrlError
from support import mentions

# --- Files ---


def write_archive(path: Path, code: bytes, records: Mapping[str, bytes] | None = None) -> Path:
    """Write a file of torch.save with pickle `code` and a storage 0 of four floats."""
    contents = {
        "data.pkl": code,
        "byteorder": b"little",
        "data/0": struct.pack("<4f", 0, 1, 2, 3),
        **(records or {}),
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in contents.items():
            archive.writestr(f"archive/{name}", data)
    return path


def in_bin(folder: Path, code: bytes) -> tuple[Path, Callable[[], object]]:
    path = write_archive(folder / "pytorch_model.bin", code)
    return path, lambda: open_torch(path)


def in_rank_file(folder: Path, code: bytes) -> tuple[Path, Callable[[], object]]:
    path = write_archive(folder / "model_optim_rng.pt", code)
    return path, lambda: read_rank_file(path)


def in_common(folder: Path, code: bytes) -> tuple[Path, Callable[[], object]]:
    return write_archive(folder / "common.pt", code), lambda: read_common(folder)


def in_section(folder: Path, code: bytes) -> tuple[Path, Callable[[], object]]:
    path = write_archive(folder / "__0_0.distcp", code)
    return path, lambda: SectionFile(path).tensor(0, path.stat().st_size)


def in_metadata(folder: Path, code: bytes) -> tuple[Path, Callable[[], object]]:
    path = folder / ".metadata"
    path.write_bytes(code)
    return path, lambda: read_metadata(folder)


FILES = {
    "bin": in_bin,
    "rank": in_rank_file,
    "common": in_common,
    "section": in_section,
    "metadata": in_metadata,
}
UNREAD = "checkpoint file: |readable index|not a tensor"

# --- Opcodes ---


def dump(*opcodes: bytes) -> bytes:
    return pickle.PROTO + b"\4" + b"".join(opcodes) + pickle.STOP


def text(value: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    size = value.bit_length() // 8 + 1
    return pickle.LONG1 + bytes([size]) + value.to_bytes(size, "little", signed=True)


def find(name: str) -> bytes:
    module, _, name = name.partition(" ")
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def pickled_tuple(*items: bytes) -> bytes:
    return pickle.MARK + b"".join(items) + pickle.TUPLE


def pickled_dict(**items: bytes) -> bytes:
    return (
        pickle.EMPTY_DICT
        + pickle.MARK
        + b"".join(text(key) + value for key, value in items.items())
        + pickle.SETITEMS
    )


def call(name: str, *arguments: bytes) -> bytes:
    return find(name) + pickled_tuple(*arguments) + pickle.REDUCE


def storage(
    kind: str = "torch FloatStorage", key: bytes = text("0"), count: bytes = number(4)
) -> bytes:
    return pickled_tuple(text("storage"), find(kind), key, text("cpu"), count) + pickle.BINPERSID


def tensor(
    offset: int = 0,
    shape: tuple[int, ...] = (4,),
    strides: tuple[int, ...] = (1,),
    memory: bytes = storage(),
) -> bytes:
    sizes, steps = (pickled_tuple(*map(number, values)) for values in (shape, strides))
    hooks = call("collections OrderedDict")
    return call(
        "torch._utils _rebuild_tensor_v2",
        memory,
        number(offset),
        sizes,
        steps,
        pickle.NEWFALSE,
        hooks,
    )


PATH, FUNCTION = find("pathlib PurePosixPath"), find("torch._utils _rebuild_tensor_v2")
STATE = pickled_dict(
    _str=text("/dir"), __defaults__=pickled_tuple(text("/dir")), __code__=pickle.NONE
)
MKDIR = pickled_tuple(text("/nowhere/made-by-a-pickle"))
SYSTEM = find("posix mkdir")
EXTENSION = 240
DEEP = 100_000
ARRAY = call(
    "numpy.core.multiarray _reconstruct", find("numpy ndarray"), pickled_tuple(), text("b")
) + pickled_tuple(
    number(1),
    pickled_tuple(*(number(1 << 32),) * 2),
    call("numpy dtype", text("f8")),
    pickle.NEWFALSE,
    pickle.SHORT_BINBYTES + b"\0",
)
SELF_LIST = pickle.EMPTY_LIST + pickle.MEMOIZE + pickle.BINGET + b"\0" + pickle.APPEND
TREE_OF_LISTS = pickle.EMPTY_LIST + b"".join(
    pickle.BINPUT
    + bytes([level])
    + pickle.POP
    + pickle.EMPTY_LIST
    + (pickle.BINGET + bytes([level]) + pickle.APPEND) * 9
    for level in range(60)
)

CHANGES_OF_STATE = {
    "class": PATH + STATE + pickle.BUILD,
    "class by slots": PATH + pickle.NONE + STATE + pickle.TUPLE2 + pickle.BUILD,
    "class of the memo": PATH
    + pickle.BINPUT
    + b"\0"
    + pickle.POP
    + pickle.BINGET
    + b"\0"
    + STATE
    + pickle.BUILD,
    "class twice": PATH + pickle.DUP + STATE + pickle.BUILD,
    "class by its stack name": text("pathlib")
    + text("PurePosixPath")
    + pickle.STACK_GLOBAL
    + STATE
    + pickle.BUILD,
    "class in a list": pickle.EMPTY_LIST + PATH + STATE + pickle.BUILD + pickle.APPEND,
    "Namespace": find("argparse Namespace") + STATE + pickle.BUILD,
    "OrderedDict": find("collections OrderedDict") + STATE + pickle.BUILD,
    "defaultdict": find("collections defaultdict") + STATE + pickle.BUILD,
    "Size": find("torch Size") + STATE + pickle.BUILD,
    "device": find("torch device") + STATE + pickle.BUILD,
    "set": find("builtins set") + STATE + pickle.BUILD,
    "BytesIO": find("_io BytesIO") + STATE + pickle.BUILD,
    "ndarray": find("numpy ndarray") + STATE + pickle.BUILD,
    "dtype of numpy": find("numpy dtype") + STATE + pickle.BUILD,
    "numpy function": find("numpy.core.multiarray _reconstruct") + STATE + pickle.BUILD,
    "storage class": find("torch FloatStorage") + STATE + pickle.BUILD,
    "stand-in": find("megatron.core.enums ModelType") + STATE + pickle.BUILD,
    "stand-in of torch": find("torch.distributed.checkpoint.metadata Metadata")
    + STATE
    + pickle.BUILD,
    "function": FUNCTION + STATE + pickle.BUILD,
    "codec": find("_codecs encode") + STATE + pickle.BUILD,
    "element type": find("torch float32") + STATE + pickle.BUILD,
    "path": call("pathlib PurePosixPath", text("/a")) + STATE + pickle.BUILD,
    "tensor": tensor() + STATE + pickle.BUILD,
    "storage": storage() + STATE + pickle.BUILD,
    "None": pickle.NONE + STATE + pickle.BUILD,
    "dict": pickle.EMPTY_DICT + STATE + pickle.BUILD,
    "module": find("torch nn") + STATE + pickle.BUILD,
    "table": find("msrl.checkpoint.torch_files.pickle_names CONSTRUCTORS") + STATE + pickle.BUILD,
    "stand-in class": find("msrl.checkpoint.torch_files.pickle_names Foreign")
    + STATE
    + pickle.BUILD,
    "attribute by a dotted name": find("pathlib PurePosixPath.__dict__") + STATE + pickle.BUILD,
    "setstate in an instance": call("types SimpleNamespace")
    + pickled_dict(__setstate__=FUNCTION)
    + pickle.BUILD
    + STATE
    + pickle.BUILD,
    "namespace by numbers": call("argparse Namespace")
    + pickle.EMPTY_DICT
    + number(1)
    + pickle.NONE
    + pickle.SETITEM
    + pickle.BUILD,
    "array of objects": call("numpy dtype", text("O8")),
    "items of a class": PATH + text("_str") + text("/dir") + pickle.SETITEM,
    "marked items of a class": PATH + pickle.MARK + text("_str") + text("/dir") + pickle.SETITEMS,
    "items of a stand-in": call("megatron.core A") + text("_str") + text("/dir") + pickle.SETITEM,
    "appends to a class": PATH + text("_str") + pickle.APPEND,
    "marked appends to a stand-in": call("megatron.core A")
    + pickle.MARK
    + text("_str")
    + pickle.APPENDS,
    "members of a class": PATH + pickle.MARK + text("_str") + pickle.ADDITEMS,
}
CALLS = {
    "reduce": SYSTEM + MKDIR + pickle.REDUCE,
    "newobj": SYSTEM + MKDIR + pickle.NEWOBJ,
    "newobj_ex": SYSTEM + MKDIR + pickle.EMPTY_DICT + pickle.NEWOBJ_EX,
    "inst": pickle.MARK + text("/nowhere") + pickle.INST + b"posix\nmkdir\n",
    "obj": pickle.MARK + PATH + text("/nowhere") + pickle.OBJ,
    "keywords": find("builtins set")
    + pickled_tuple()
    + pickled_dict(a=pickle.NONE)
    + pickle.NEWOBJ_EX,
    "call of a value": text("posix.mkdir") + MKDIR + pickle.REDUCE,
    "call of an element type": find("torch float32") + pickled_tuple() + pickle.REDUCE,
    "call without a tuple": find("builtins set") + pickle.EMPTY_LIST + pickle.REDUCE,
    "stand-in of a function": call(
        "builtins getattr", find("builtins set"), text("__subclasses__")
    ),
    "function as a value": find("builtins getattr"),
    "ext1": pickle.EXT1 + bytes([EXTENSION]),
    "ext2": pickle.EXT2 + struct.pack("<H", EXTENSION),
    "ext4": pickle.EXT4 + struct.pack("<I", EXTENSION),
    "out-of-band buffer": pickle.NEXT_BUFFER,
    "name that is no text": number(1) + number(2) + pickle.STACK_GLOBAL,
    "defaultdict of list": call("collections defaultdict", find("builtins list"))
    + pickle.EMPTY_DICT
    + pickle.BUILD,
    "defaultdict of set": call("collections defaultdict", find("builtins set")),
    "defaultdict of a stand-in": call("collections defaultdict", find("megatron.core dict")),
    "codec of bytes": call("_codecs encode", text("a"), text("rot13")),
}
STORAGES = {
    "text": pickle.PERSID + b"0\n",
    "nothing": pickle.NONE + pickle.BINPERSID,
    "empty": pickled_tuple() + pickle.BINPERSID,
    "short": pickled_tuple(text("storage")) + pickle.BINPERSID,
    "list": pickle.EMPTY_LIST + pickle.BINPERSID,
    "other tag": pickled_tuple(text("module"), *(text("0"),) * 4) + pickle.BINPERSID,
    "class": storage("pathlib PurePosixPath"),
    "key outside": storage(key=text("../data/0")),
    "key that is a number": storage(key=number(0)),
    "unknown key": storage(key=text("9")),
    "negative count": storage(count=number(-4)),
    "count beyond": storage(count=number(5)),
    "huge count": storage(count=number(1 << 62)),
    "other type": storage("torch DoubleStorage"),
}
TENSORS = {
    "negative offset": tensor(offset=-1),
    "offset beyond": tensor(offset=1),
    "shape beyond": tensor(shape=(5,)),
    "negative shape": tensor(shape=(-4,)),
    "negative stride": tensor(strides=(-1,)),
    "stride beyond": tensor(strides=(2,)),
    "huge stride": tensor(strides=(1 << 62,)),
    "stride of too many bits": tensor(strides=(1 << 63,)),
    "shape that overflows": tensor(shape=(1 << 32, 1 << 32), strides=(0, 0)),
    "repeated without end": tensor(shape=(1 << 40,), strides=(0,)),
    "fewer strides": tensor(shape=(2, 2)),
    "too many axes": tensor(shape=(1,) * 65, strides=(1,) * 65),
    "no storage": tensor(memory=pickle.NONE),
    "stray storage": storage(),
}
SHAPES = {
    "deep tuples": pickle.EMPTY_TUPLE + pickle.TUPLE1 * DEEP,
    "deep lists": pickle.EMPTY_LIST * DEEP + pickle.APPEND * (DEEP - 1),
    "deep dicts": (pickle.EMPTY_DICT + pickle.NONE) * DEEP + pickle.NONE + pickle.SETITEM * DEEP,
    "deep marks": pickle.MARK * DEEP,
    "deep tuple as a key": pickle.EMPTY_DICT
    + pickle.EMPTY_TUPLE
    + pickle.TUPLE1 * DEEP
    + pickle.NONE
    + pickle.SETITEM,
    "deep tuple in a set": pickle.EMPTY_SET
    + pickle.MARK
    + pickle.EMPTY_TUPLE
    + pickle.TUPLE1 * DEEP
    + pickle.ADDITEMS,
    "list that contains itself": SELF_LIST,
    "lists that multiply": TREE_OF_LISTS,
    "list as a key": pickle.EMPTY_DICT + pickle.EMPTY_LIST + pickle.NONE + pickle.SETITEM,
    "list in a set": call("builtins set", pickle.EMPTY_LIST + pickle.EMPTY_LIST + pickle.APPEND),
    "text without end": pickle.BINUNICODE8 + struct.pack("<Q", 1 << 62),
    "bytes without end": pickle.BYTEARRAY8 + struct.pack("<Q", (1 << 64) - 1),
    "number without end": pickle.LONG4 + struct.pack("<i", 1 << 30),
    "no value": b"",
    "absent memo": pickle.BINGET + b"\1",
    "pop of nothing": pickle.POP,
    "missing value of a key": pickle.EMPTY_DICT + pickle.MARK + pickle.NONE + pickle.SETITEMS,
    "tuple of too little": pickle.NONE + pickle.TUPLE3,
    "keys of one hash": pickle.EMPTY_DICT
    + pickle.MARK
    + b"".join(number(n * sys.hash_info.modulus) + pickle.NONE for n in range(60_000))
    + pickle.SETITEMS,
    "members of one hash": call(
        "builtins set",
        pickle.EMPTY_LIST
        + pickle.MARK
        + b"".join(  # -1 and -2 have the same hash
            pickled_tuple(*members)
            for members in itertools.product((number(-1), number(-2)), repeat=14)
        )
        + pickle.APPENDS,
    ),
    "text of no characters": call(
        "numpy.core.multiarray scalar",
        call("numpy dtype", text("U1"), pickle.NEWFALSE, pickle.NEWTRUE),
        pickle.SHORT_BINBYTES + bytes([4]) + b"\xff" * 4,
    ),
    "later protocol": pickle.PROTO + b"\x09" + pickle.NONE,
    "array of too few bytes": ARRAY + pickle.BUILD,
}
ATTACKS = {
    f"{kind}: {name}": dump(code)
    for kind, table in {
        "state": CHANGES_OF_STATE,
        "call": CALLS,
        "storage": STORAGES,
        "tensor": TENSORS,
        "shape": SHAPES,
    }.items()
    for name, code in table.items()
}

# --- Attacks ---

WATCHED = (
    pathlib.PurePosixPath, pathlib.PosixPath, argparse.Namespace, collections.OrderedDict,
    collections.defaultdict, torch.Size,
    torch.device, torch.nn.Parameter, torch.Tensor, torch.FloatStorage, set, dict, io.BytesIO,
    np.ndarray, np.dtype, Foreign, Global,
    pickle_names.StorageRef, pickle_names.NumpyType, unpickler._Machine, torch.nn, pickle_names,
    unpickler,
)  # fmt: skip


def snapshot() -> dict[str, object]:
    """Return the attributes of everything that the attacks target."""
    functions = [torch._utils._rebuild_tensor_v2, *CONSTRUCTORS.values()]
    marks: dict[str, object] = {
        str(index): dict(vars(value)) for index, value in enumerate(WATCHED)
    }
    marks["functions"] = [
        (function.__code__, function.__defaults__, dict(vars(function))) for function in functions
    ]
    marks["tables"] = (
        dict(CONSTRUCTORS),
        dict(unpickler._HANDLERS),
        dir(torch.float32),
        dir(np.dtype("f8")),
    )
    return marks


@pytest.fixture
def registered() -> Any:
    """Register an extension code, which a pickle could use without `find_class`."""
    copyreg.add_extension("posix", "mkdir", EXTENSION)
    yield
    copyreg.remove_extension("posix", "mkdir", EXTENSION)


@pytest.mark.sample(60)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_crafted_pickle_changes_nothing_and_is_refused_by_file(
    tmp_path: Path, file: str, attack: str, registered: None
) -> None:
    path, read = FILES[file](tmp_path, ATTACKS[attack])
    before = snapshot()
    with pytest.raises(MsrlError, match=UNREAD) as error:
        read()
    assert snapshot() == before
    assert str(path) in str(error.value) and len(str(error.value)) < 1000


def test_a_path_keeps_its_text_after_a_file_that_sets_it(tmp_path: Path) -> None:
    """With Python's unpickler, every path became the folder of the file's author, and a save
    removed it.
    """
    path = write_archive(
        tmp_path / "file.pt", dump(PATH + pickle.NONE + STATE + pickle.TUPLE2 + pickle.BUILD)
    )
    with pytest.raises(MsrlError, match=r"file\.pt: .*pathlib\.PurePosixPath"):
        read_torch_file(path)
    assert str(tmp_path / "a") != "/dir" and str(pathlib.PurePosixPath("/b")) == "/b"


def everything_named() -> list[tuple[str, str]]:
    storages = [("torch", name) for name in pickle_names._STORAGES]
    types = [("torch", name) for name in pickle_names._TORCH_TYPES]
    return [
        *CONSTRUCTORS,
        *pickle_names._OPAQUE,
        *storages,
        *types,
        ("megatron.core.enums", "ModelType"),
        ("mindspeed_llm", "a.b"),
    ]


def test_every_name_refers_to_an_immutable_object() -> None:
    for module, name in everything_named():
        value = resolve(module, name)
        assert type(value) in (Global, torch.dtype)
        for attribute in ("name", "module", "__setstate__", "__class__", "other"):
            with pytest.raises((AttributeError, TypeError)):
                setattr(value, attribute, "changed")
        assert not hasattr(value, "__dict__") and hash(value) == hash(resolve(module, name))
        for state in (STATE, pickle.NONE + STATE + pickle.TUPLE2, pickle.NONE):
            with pytest.raises(pickle.UnpicklingError):
                unpickler.load(dump(find(f"{module} {name}"), state, pickle.BUILD))


def test_state_is_kept_as_data_even_if_it_has_the_name_of_a_method() -> None:
    state = pickled_dict(
        __setstate__=find("megatron.core f"), __class__=text("A"), __dict__=pickle.NONE
    )
    code = (
        call("argparse Namespace") + state + pickle.BUILD + pickled_dict(a=number(1)) + pickle.BUILD
    )
    value = unpickler.load(dump(code))
    assert type(value) is argparse.Namespace and vars(value)["__setstate__"] == Global(
        "megatron.core", "f"
    )
    assert vars(value)["__class__"] == "A" and value.a == 1


def test_marks_without_containers_are_refused_before_they_fill_the_memory() -> None:
    assert unpickler.load(dump(pickle.MARK * 90, pickle.TUPLE * 90)) is not None
    for code in (pickle.MARK * 101, pickle.MARK * 1_000_000):
        with pytest.raises(pickle.UnpicklingError, match=mentions("nested", 100)):
            unpickler.load(dump(code))


def test_a_memo_index_far_away_takes_no_memory() -> None:
    """Python's unpickler allocates memory for all smaller indices."""
    assert (
        unpickler.load(
            dump(
                number(7),
                pickle.LONG_BINPUT,
                b"\xff\xff\xff\xff",
                pickle.LONG_BINGET,
                b"\xff\xff\xff\xff",
            )
        )
        == 7
    )


@pytest.mark.parametrize(
    ("limit", "size"), [("MAX_BYTES", 1000), ("MAX_OPCODES", 900), ("MAX_VALUES", 900)]
)
def test_a_pickle_beyond_a_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, size: int
) -> None:
    monkeypatch.setattr(unpickler, limit, size)
    for name, write_file in FILES.items():
        folder = tmp_path / name
        folder.mkdir()
        path, read = write_file(
            folder, dump(pickle.EMPTY_LIST, pickle.MARK, pickle.NONE * 1000, pickle.APPENDS)
        )
        with pytest.raises(MsrlError, match=f"more than (the limit of )?{size}") as error:
            read()
        assert str(path) in str(error.value)


@pytest.mark.parametrize("name", ["", "..", ".", "../x", "/x", "a/b", "a\0b"])
def test_a_file_of_tensors_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    def pickled_object(kind: str, **state: bytes) -> bytes:
        return (
            find(f"torch.distributed.checkpoint.{kind}")
            + pickle.EMPTY_TUPLE
            + pickle.NEWOBJ
            + pickled_dict(**state)
            + pickle.BUILD
        )

    index = pickled_object("metadata MetadataIndex", fqn=text("a"), offset=pickle.NONE)
    where = pickled_object(
        "filesystem _StorageInfo", relative_path=text(name), offset=number(0), length=number(9)
    )
    storage_data = pickle.EMPTY_DICT + index + where + pickle.SETITEM
    path, read = in_metadata(
        tmp_path,
        dump(
            pickled_object(
                "metadata Metadata",
                state_dict_metadata=pickle.EMPTY_DICT,
                storage_data=storage_data,
            )
        ),
    )
    with pytest.raises(MsrlError, match=r"names .*, which") as error:
        read()
    assert str(path) in str(error.value)


# --- Archives ---


@pytest.mark.parametrize(("field", "size"), [(24, 1 << 31), (42, 1 << 31)])
def test_sizes_and_offsets_outside_of_the_file_are_refused(
    tmp_path: Path, field: int, size: int
) -> None:
    """Alter size and position of each record in the archive's directory."""
    whole = write_archive(tmp_path / "file.pt", dump(pickled_dict(a=tensor()))).read_bytes()
    headers = [at for at in range(len(whole)) if whole[at : at + 4] == b"PK\1\2"]
    for at in headers:
        path = tmp_path / "changed.pt"
        path.write_bytes(whole[: at + field] + struct.pack("<I", size) + whole[at + field + 4 :])
        with pytest.raises(MsrlError) as error:
            read_torch_file(path)
        assert str(path) in str(error.value)


def test_records_of_one_name_and_of_another_byte_order_are_refused(tmp_path: Path) -> None:
    path = write_archive(
        tmp_path / "file.pt", dump(pickled_dict(a=tensor())), {"byteorder": b"big"}
    )
    with pytest.raises(MsrlError, match=r"file\.pt: .*big-endian"):
        read_torch_file(path)
    path = write_archive(tmp_path / "twice.pt", dump(pickled_dict(a=tensor())))
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("archive/data/0", bytes(16))
    with pytest.raises(MsrlError, match=r"twice\.pt: .*duplicate"):
        read_torch_file(path)


def test_a_tensor_of_an_archive_that_is_not_aligned_is_read(tmp_path: Path) -> None:
    for padding in range(8):
        path = write_archive(
            tmp_path / f"{padding}.pt",
            dump(pickled_dict(a=tensor(offset=1, shape=(2,), strides=(2,)))),
            {"pad": bytes(padding)},
        )
        assert read_torch_file(path)["a"].tolist() == [1, 3]


# --- What is read ---


@pytest.mark.parametrize("file", ["bin", "rank", "common"])
def test_a_defaultdict_of_dict_is_read_as_a_dict(tmp_path: Path, file: str) -> None:
    """MindSpeed-LLM's converters save `model` as a defaultdict."""
    model = (
        call("collections defaultdict", find("builtins dict"))
        + text("weight")
        + tensor()
        + pickle.SETITEM
    )
    args = call("argparse Namespace") + pickled_dict(num_layers=number(2)) + pickle.BUILD
    _, read = FILES[file](
        tmp_path, dump(model if file == "bin" else pickled_dict(args=args, model=model))
    )
    contents: Any = read()
    if file == "bin":
        assert contents["weight"].read().tolist() == [0, 1, 2, 3]
    else:
        assert type(contents["model"]) is dict and contents["model"]["weight"].tolist() == [
            0,
            1,
            2,
            3,
        ]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("mapped", [True, False])
def test_files_of_torch_are_read_as_torch_reads_them(
    tmp_path: Path, protocol: int, mapped: bool
) -> None:
    matrix = torch.arange(12.0).view(3, 4)
    values = {
        "tied": [matrix, matrix, matrix.t(), matrix[1:, ::2]],
        "parameter": torch.nn.Parameter(matrix.clone()),
        "types": [torch.tensor([1, 0]).to(dtype) for dtype in set(pickle_names._STORAGES.values())],
        "empty": [torch.zeros(0, 3), torch.tensor(5)],
        "plain": [
            None,
            True,
            False,
            -1,
            255,
            65536,
            -(1 << 40),
            1 << 100,
            1.5,
            "tèxt",
            "x" * 300,
            b"",
            b"a\xff",
            b"b" * 300,
            (1, (2, 3)),
            2j,
        ],
        "sets": [
            {1, "a"},
            frozenset({2}),
            slice(1, 2, None),
            range(3),
            torch.Size([1, 2]),
            torch.bfloat16,
        ],
        "path": pathlib.PurePosixPath("/a/b"),
        "ordered": collections.OrderedDict(a=1),
        "default": collections.defaultdict(dict, a=1),
        "numbers": [np.float64(1.5), np.int32(-3), np.bool_(True)],
    }
    values["ordered"]._metadata = {"": {"version": 1}}
    arrays = [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.ones((2, 3))),
        np.array(["a", "bc"]),
        np.zeros((0, 2)),
    ]
    if protocol < 5:
        values["arrays"] = arrays  # protocol 5 names another function of NumPy's
    torch.save(
        {**values, "opaque": [io.BytesIO(b"a"), torch.device("cpu")]},
        tmp_path / "file.pt",
        pickle_protocol=protocol,
    )
    contents = read_torch_file(tmp_path / "file.pt", mmap=mapped)
    assert all(isinstance(value, Foreign) for value in contents.pop("opaque"))
    for mine, theirs in zip(contents.pop("arrays", []), arrays, strict=protocol < 5):
        assert mine.dtype == theirs.dtype.newbyteorder("=") and np.array_equal(mine, theirs)
    tied = contents["tied"]
    assert len({value.untyped_storage().data_ptr() for value in tied}) == 1
    for name in ("tied", "types", "empty"):
        pairs = zip(contents.pop(name), values.pop(name), strict=True)
        assert all(
            mine.dtype == theirs.dtype
            and mine.stride() == theirs.stride()
            and torch.equal(mine, theirs)
            for mine, theirs in pairs
        )
    mine, theirs = contents.pop("parameter"), values.pop("parameter")
    assert type(mine) is torch.nn.Parameter and mine.requires_grad and torch.equal(mine, theirs)
    assert contents == {key: value for key, value in values.items() if key != "arrays"}


def test_a_tensor_that_is_written_into_does_not_change_its_file(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(4)}, tmp_path / "file.pt")
    before = (tmp_path / "file.pt").read_bytes()
    read_torch_file(tmp_path / "file.pt")["a"].fill_(1)
    assert (tmp_path / "file.pt").read_bytes() == before


def test_an_enumeration_is_read_in_the_form_of_every_python() -> None:
    """Python 3.11.0 to 3.11.3 pickled a call of getattr."""
    for code in (
        call("megatron.core.enums ModelType", number(1)),
        call("builtins getattr", find("megatron.core.enums ModelType"), text("encoder")),
    ):
        value = unpickler.load(dump(code))
        assert isinstance(value, Foreign) and value.name == "megatron.core.enums.ModelType"
