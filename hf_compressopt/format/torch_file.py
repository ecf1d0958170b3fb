"""Files for torch.load, written piece by piece; weights_only=True and mmap=True work too.

Such a file is a zip archive whose entries are not compressed: a pickle that refers to storages by number, and the bytes
of each storage. (PyTorch's notes on serialization describe it.)
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from contextlib import suppress
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from hf_compressopt.format.writer import publish, temporary_name

#: Storages begin at multiples of this, as those of torch.save do.
_ALIGNMENT = 64
_ROOT = "archive"
#: The class by which torch.save names the dtype of a storage.
_STORAGES = {
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
}


class PendingTensor:
    """A tensor of a pickle whose bytes are written later.

    Attributes:
        dtype: Its dtype, a floating-point one of 16 bits or more.
        shape: Its shape.
    """

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Take the description."""
        self.dtype, self.shape = dtype, shape

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a tensor of torch's: a view of a storage."""
        stride = [1]
        for size in reversed(self.shape[1:]):
            stride.append(stride[-1] * max(size, 1))
        strides = tuple(reversed(stride)) if self.shape else ()
        arguments: tuple[Any, ...] = (_Storage(self), 0, self.shape, strides, False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments


class _Storage:
    def __init__(self, tensor: PendingTensor) -> None:
        self.tensor = tensor


class _Pickler(pickle.Pickler):
    """A pickler of protocol 2, which torch.load(weights_only=True) reads."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[PendingTensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        self.tensors.append(obj.tensor)
        tensor = obj.tensor
        return "storage", _STORAGES[tensor.dtype], str(len(self.tensors) - 1), "cpu", prod(tensor.shape)


class TorchFile:
    """A file for torch.load that is being written; a context manager.

    It has a temporary name until :meth:`finish`, and is removed if the context ends without that call.

    Attributes:
        path: The final name of the file.
        tensors: The pending tensors, in the order in which their bytes must come.
    """

    def __init__(self, path: Path, contents: Any) -> None:
        """Pickle the contents; nothing is written before the context is entered.

        Args:
            path: The file's name.
            contents: Dicts, lists and primitives, with a :class:`PendingTensor` for each tensor.
        """
        self.path, self._temporary = path, temporary_name(path)
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        pickler.dump(contents)
        self._pickle = buffer.getvalue()
        self.tensors = tuple(pickler.tensors)
        self._number = self._left = 0  # the tensor that is due, and how many of its bytes

    def __enter__(self) -> TorchFile:
        """Begin the file.

        Raises:
            OSError: If it cannot be written.
        """
        self._file = open(self._temporary, "xb")
        try:
            self._archive = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED)
            for name, data in (("data.pkl", self._pickle), ("byteorder", sys.byteorder.encode())):
                self._begin(name, len(data))
                self._record.write(data)
                self._record.close()
            self._begin_tensor()
        except BaseException:
            self._discard()
            raise
        return self

    def write(self, data: memoryview) -> None:
        """Write the next bytes of the tensor that is due, all of them or a part.

        Raises:
            ValueError: If they are too many.
            OSError: If they cannot be written.
        """
        rest = self._left - len(data)
        if rest < 0:
            raise ValueError(f"{self.path}: {len(data)} bytes were given, but {self._left} are due")
        self._record.write(data)
        self._left = rest
        if rest == 0:
            self._record.close()
            self._number += 1
            self._begin_tensor()

    def finish(self) -> None:
        """Make the file durable, and give it its final name.

        Raises:
            ValueError: If bytes are missing.
            OSError: If the file cannot be made durable.
        """
        if self._number < len(self.tensors):
            raise ValueError(f"{self.path}: {self._left} bytes of tensor {self._number} are missing")
        self._begin("version", 2)
        self._record.write(b"3\n")
        self._record.close()
        self._archive.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        publish(self._temporary, self.path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the file if it was not finished."""
        self._discard()

    def _discard(self) -> None:
        self._archive.fp = None  # there is nothing to complete: the file is removed
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):  # the error that led here is the one to tell
            self._temporary.unlink(missing_ok=True)

    def _begin_tensor(self) -> None:
        """Begin the record of the next tensor that has bytes; tensors without bytes have empty records."""
        while self._number < len(self.tensors):
            self._left = self.tensors[self._number].nbytes
            self._begin(f"data/{self._number}", self._left)
            if self._left:
                return
            self._record.close()
            self._number += 1
        self._left = 0

    def _begin(self, name: str, nbytes: int) -> None:
        """Begin a record. An extra field in its header makes the bytes begin at a multiple of the alignment."""
        info = zipfile.ZipInfo(f"{_ROOT}/{name}")
        info.file_size = nbytes
        zip64 = nbytes * 1.05 > zipfile.ZIP64_LIMIT  # as zipfile decides
        fixed = self._file.tell() + 30 + len(info.filename) + (20 if zip64 else 0) + 4
        padding = -fixed % _ALIGNMENT
        info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        self._record = self._archive.open(info, "w")
