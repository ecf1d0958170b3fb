"""The interval arithmetic of ZeRO, without tensors."""

import random

import pytest

from hf_compressopt.zero.parts import ALIGN, partition, slice_numel


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("rotate", [False, True])
def test_every_element_has_one_owner_and_every_cut_is_aligned(world_size: int, rotate: bool) -> None:
    rng = random.Random(world_size)
    for _ in range(40):
        sizes = [(number, rng.choice([0, 1, 63, 64, 65, 700, 5000])) for number in range(rng.randint(0, 12))]
        length = slice_numel(rng.choice([1, 100, 3000, 10**6]), world_size)
        assert length % (ALIGN * world_size) == 0
        seen = {number: [] for number, _ in sizes}
        for cut in partition(sizes, length, world_size, rotate=rotate):
            assert cut.numel <= length and cut.part_numel % ALIGN == 0 and len(cut.parts) == world_size
            used = []
            for owner, spans in enumerate(cut.parts):
                for span in spans:
                    assert span.start % ALIGN == span.offset % ALIGN == 0 and span.offset + span.numel <= cut.part_numel
                    seen[span.index].append((span.start, span.stop))
                    used.append((owner * cut.part_numel + span.offset, span))
            assert sorted(used, key=lambda row: row[0]) == sorted(
                (row for rows in cut.places.values() for row in rows), key=lambda row: row[0]
            )
            assert sum(span.numel for _, span in used) + sum(b - a for a, b in cut.gaps) == cut.numel
        for number, numel in sizes:
            assert [start for start, _ in sorted(seen[number])] == [0, *(b for _, b in sorted(seen[number]))][
                :-1
            ] or not numel
            assert sum(stop - start for start, stop in seen[number]) == numel


def test_parts_are_dealt_out_in_turn() -> None:
    for rotate, expected in ((False, [0, 0, 0, 0]), (True, [0, 1, 2, 0])):
        cuts = partition([(0, 4 * 192)], 192, 3, rotate=rotate)
        first = [
            next(r for r, spans in enumerate(cut.parts) if spans[0].start == 192 * i) for i, cut in enumerate(cuts)
        ]
        assert first == expected
