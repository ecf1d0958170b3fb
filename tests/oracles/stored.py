"""The float32 values of the compact tensors of a checkpoint, in NumPy, from docs/dev/checkpoint_format.md alone."""

from collections.abc import Iterator
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


def in_float32(arrays: Arrays, index: dict[str, Any]) -> Arrays:
    """The tensors of a checkpoint by the names that float32 values have; compact ones are decoded."""
    header, found = index["header"], dict(arrays)
    for name in [name for name in arrays if name.startswith("exp_avg_sq_code/")]:
        group, place = place_of(name.removeprefix("exp_avg_sq_code/"), index)
        top = int(arrays[f"exp_avg_sq_top/group{group}"][place])
        codes = found.pop(name)
        values = np.array([point(top - int(code)) if code < 255 else 0.0 for code in range(256)], dtype=np.float32)
        found[name.replace("_code", "")] = values[codes]
    for name in [name for name in arrays if name.startswith("exp_avg_message/")]:
        group = int(name.removeprefix("exp_avg_message/group"))
        parameters = index["parameters"][group]
        flat = np.concatenate(list(sign_messages(found.pop(name), sizes(parameters), header)))
        for parameter, part in zip(parameters, np.split(flat, np.cumsum(sizes(parameters))[:-1]), strict=True):
            moving = found[f"exp_avg_sq/{parameter['name']}"].any()
            found[f"exp_avg/{parameter['name']}"] = (part if moving else 0 * part).reshape(parameter["shape"])
    for name in [n for n in arrays if n.startswith(("worker_error/", "server_error/")) and arrays[n].dtype == np.uint8]:
        parameters = index["parameters"][int(name.split("/")[1].removeprefix("group"))]
        found[name] = np.concatenate([*integer_messages(found[name], sizes(parameters), header), np.zeros(0, "f4")])
    return {name: array for name, array in found.items() if not name.startswith("exp_avg_sq_top/")}


def sizes(parameters: list[dict[str, Any]]) -> list[int]:
    return [int(np.prod(parameter["shape"], dtype=np.int64)) for parameter in parameters]


def place_of(name: str, index: dict[str, Any]) -> tuple[int, int]:
    for group, parameters in enumerate(index["parameters"]):
        for place, parameter in enumerate(parameters):
            if parameter["name"] == name:
                return group, place
    raise AssertionError(name)


def point(k: int) -> float:
    """float32(2^((k mod 8) / 8)) 2^floor(k / 8); 0 below the normal numbers, which no code means."""
    return float(np.float32(2.0 ** ((k % 8) / 8))) * 2.0 ** (k // 8) if k >= -126 * 8 else 0.0


def chunks(numels: list[int], header: dict[str, Any]) -> Iterator[list[int]]:
    """The elements of the chunks of each bucket."""
    size, ranks, numel = header["bucket_numel"], header["world_size"], sum(numels)
    for start in range(0, numel, size):
        count = min(size, numel - start)
        chunk = padded(-(-count // ranks), 8)
        yield [min((rank + 1) * chunk, count) - min(rank * chunk, count) for rank in range(ranks)]


def padded(nbytes: int, multiple: int = 16) -> int:
    return -(-nbytes // multiple) * multiple


def sign_messages(data: np.ndarray, numels: list[int], header: dict[str, Any]) -> Iterator[np.ndarray]:
    byte = 0
    for bucket in chunks(numels, header):
        block = header["scale_block"]
        blocks = [0 if not n else 1 if block is None else -(-n // block) for n in bucket]
        stride = padded(4 * blocks[0] + -(-bucket[0] // 8))
        for n, count in zip(bucket, blocks, strict=True):
            scales = data[byte : byte + 4 * count].view(np.float32).repeat(block or n)[:n]
            signs = np.unpackbits(data[byte + 4 * count : byte + stride], bitorder="little")[:n]
            yield np.where(signs == 1, -scales, scales)
            byte += stride
    assert byte == data.size


def integer_messages(data: np.ndarray, numels: list[int], header: dict[str, Any]) -> Iterator[np.ndarray]:
    byte = 0
    for bucket in chunks(numels, header):
        for n in bucket:
            integers, first, blocks = data[byte : byte + n].view(np.int8), byte + padded(n, 8), -(-n // 128)
            patterns = data[first : first + 2 * blocks].view(np.uint16).astype(np.uint32) << 16
            yield integers.astype(np.float32) * patterns.view(np.float32).repeat(128)[:n]
            byte += padded(padded(n, 8) + 2 * blocks)
    assert byte == data.size
