"""The check at the first use: what passes, what a flipped constant does to training, what is remembered."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_compressopt import FusedAdam, OnebitAdam, kernels
from hf_compressopt.kernels import library, selfcheck
from tests.support.launching import run
from tests.support.made_once import made_once

CPU = torch.device("cpu")
CSRC = Path(library.__file__).parent / "csrc"
FLIPPED = {  # of Adam's first moment, and of the scale of 4 bits
    "adam.h": ("static_cast<float>(1 - o.beta1)", "static_cast<float>(1.125 - o.beta1)"),
    "integer_block.h": ("kBits == 4 ? 49.0f : 127.0f", "kBits == 4 ? 48.0f : 126.0f"),
}


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been checked, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(selfcheck, "checked", {})
    monkeypatch.setattr(kernels, "_known", {})


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("family", selfcheck.FAMILIES)
def test_native_kernels_pass(family: str, device: torch.device) -> None:
    assert not selfcheck.difference(family, CPU)
    for numel in (1, 7, 33, 4097):
        for shift in (0, 3):
            assert not selfcheck.difference(family, device, numel, shift, numel)
    for count in selfcheck.MANY_TENSORS:
        assert not selfcheck.difference(family, CPU, count=count)


@pytest.fixture(scope="module")
def flipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a CPU library with two constants flipped."""
    if shutil.which("g++") is None:
        pytest.skip("the library is compiled with g++, not found here")
    return made_once(tmp_path_factory, "flipped", build)


def build(folder: Path) -> None:
    shutil.copytree(CSRC, folder / "csrc")
    for name, (right, wrong) in FLIPPED.items():
        source = folder / "csrc" / "cpu" / name
        text = source.read_text()
        assert text.count(right) == 1
        source.write_text(text.replace(right, wrong))
    sources = [str(folder / "csrc" / "cpu" / f"{name}.cpp") for name in ("api", "threads", "kernels_portable")]
    flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno"]
    command = ["g++", *flags, "-DCOMPRESSOPT_PORTABLE_ONLY", f"-I{folder}/csrc", *sources]
    run([*command, "-o", str(folder / "libcompressopt_cpu.so")])


@pytest.fixture
def with_flipped(flipped: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(library, "_DIRECTORY", flipped)
    monkeypatch.setattr(library, "_found", {})
    library.loaded.cache_clear()
    yield
    library.loaded.cache_clear()


def trained() -> list[torch.Tensor]:
    """Parameters after steps of FusedAdam, of OnebitAdam, and of 4-bit messages."""
    results = []
    for make in (
        lambda params: FusedAdam(params, lr=1e-2),
        lambda params: OnebitAdam(params, lr=1e-2, freeze_step=3),
    ):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Tanh(), torch.nn.Linear(65, 3))
        optimizer = make(model.parameters())
        for step in range(6):
            x = torch.randn(8, 33, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        results += [p.detach().clone() for p in model.parameters()]
    form, error = kernels.IntegerFormat(4), torch.zeros(1000)
    messages = torch.zeros(sum(form.chunk_nbytes(1000, 2)), dtype=torch.uint8)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    kernels.on(CPU).compress_(form, kernels.Combination.of(x), error, messages, 2, error)
    mean = kernels.Average(1000, form, messages, 2, len(messages) // 2)
    kernels.on(CPU).add_(mean, [kernels.Segment(x, 0, 1000, 0)], decay=1.0)
    return [*results, messages, error, x]


@pytest.mark.usefixtures("with_flipped")
def test_a_flipped_constant_is_caught_and_training_goes_on_in_the_bits_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    got = trained()
    assert selfcheck.failures(CPU) == {"adam", "average", "compress", "integers"}
    (record,) = [record for record in caplog.records if record.name == selfcheck.__name__]
    assert record.levelname == "WARNING"
    assert "native kernels differ from the reference on cpu" in record.message
    assert "adam: " in record.message and "integers: " in record.message
    assert "report this with the output of `hf-compressopt selftest`" in record.message
    assert kernels.implementation(CPU) == "native portable, reference for adam, average, compress, integers"
    assert not (selfcheck._place()).exists()
    monkeypatch.setenv(library.VARIABLE, "reference")
    for one, other in zip(got, trained(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("with_flipped")
def test_a_flipped_constant_is_an_error_where_native_kernels_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "native")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^HF_COMPRESSOPT_KERNELS=native, but native kernels differ .*adam: "):
            kernels.on(CPU)


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("before", [None, "damaged {", '["another library"]'])
def test_what_passed_is_remembered_for_later_processes(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    place = selfcheck._place()
    if before is not None:
        place.parent.mkdir(parents=True)
        place.write_text(before)
    assert selfcheck.failures(CPU) == frozenset()
    kept = json.loads(place.read_text())
    assert kept[-1] == selfcheck._key(CPU)
    assert kept[:-1] == (["another library"] if before and "another" in before else [])
    monkeypatch.setattr(selfcheck, "checked", {})  # a new process
    monkeypatch.setattr(selfcheck, "difference", lambda *_: pytest.fail("it checks again"))
    assert selfcheck.failures(CPU) == frozenset()


@pytest.mark.usefixtures("native_library")
def test_a_cache_that_cannot_be_written_hinders_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert selfcheck.failures(CPU) == frozenset()


@pytest.mark.usefixtures("native_library")
def test_the_check_runs_inside_what_a_user_has_switched_on() -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert selfcheck.failures(CPU) == frozenset()
