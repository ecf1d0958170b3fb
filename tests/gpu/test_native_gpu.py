"""The native kernels on a GPU: the suite of all devices, and what only a GPU can show. Run by `make test-gpu` only."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from hf_compressopt import FusedAdam, kernels
from hf_compressopt.kernels import Average, Combination, Segment, SignFormat, library, native
from hf_compressopt.kernels.messages import block_rms
from tests.support import kernel_cases as cases
from tests.support.kernel_suite import CompactSuite, KernelSuite
from tests.support.launching import REPO_ROOT

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def device() -> torch.device:
    assert not library.why_not(CUDA), f"no native kernels: {library.why_not(CUDA)}"
    return CUDA


class TestKernels(KernelSuite):
    """The suite, on the GPU."""


class TestCompact(CompactSuite):
    """The suite, on the GPU."""


def test_the_wrappers_use_the_kernels(device: torch.device) -> None:
    assert kernels.implementation(device).startswith("native sm_")


def compressed(x: Tensor, world_size: int = 2, scale_block: int | None = 4096) -> tuple[Tensor, Tensor]:
    form, error = SignFormat(scale_block), torch.zeros_like(x)
    messages = torch.zeros(sum(form.chunk_nbytes(x.numel(), world_size)), dtype=torch.uint8, device=x.device)
    native.compress_(form, Combination.of(x), error, messages, world_size, error)
    return messages, error


@pytest.mark.parametrize("scale_block", [None, 128, 4096, 65_536])
def test_millions_of_elements_and_the_same_bits_every_time(device: torch.device, scale_block: int | None) -> None:
    cases.check_compress(device, SignFormat(scale_block), 5_000_011, 3, segments=50)
    x = torch.randn(5_000_011, device=device)
    first = compressed(x, 3, scale_block)
    for _ in range(3):
        for got, expected in zip(compressed(x, 3, scale_block), first, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.invariant(16)
def test_more_than_two_to_the_31_elements(device: torch.device) -> None:
    numel = 2**31 + 4196
    if torch.cuda.mem_get_info(device)[0] < 30e9:
        pytest.skip("needs 30 GB of free GPU memory")
    x = torch.ones(numel, device=device)
    x[-3:] = -2.0
    messages, error = compressed(x, 1)
    y = Average(numel, SignFormat(4096), messages, 1, messages.numel())
    native.decompress_(y, x)
    tail = numel % 4096
    scale = ((tail - 3 + 3 * 4.0) / tail) ** 0.5
    torch.testing.assert_close(x[-4:].cpu(), torch.tensor([scale, -scale, -scale, -scale]))
    torch.testing.assert_close(error[-4:].cpu(), torch.tensor([1 - scale, scale - 2, scale - 2, scale - 2]))
    assert [float(x[2**31 - 1]), float(x[0])] == [1.0, 1.0]
    assert native.sum_of_squares([error], device).isfinite()
    table = [Segment(error, 0, numel, 0)]
    native.combine_(Combination(numel, device, None, 1.0, table, 2.0), x)
    assert float(x[-1]) == 2 * float(error[-1])


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_fused_adam_has_the_numbers_of_torch(dtype: torch.dtype, adam_w_mode: bool) -> None:
    sizes = [(1,), (7,), (33, 65), (0,), (300_001,), (4096,)]
    ours = [torch.randn(size, device=CUDA, dtype=dtype, requires_grad=True) for size in sizes]
    theirs = [p.detach().float().requires_grad_() for p in ours]
    other = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    fused = FusedAdam(ours, lr=1e-2, weight_decay=0.1, adam_w_mode=adam_w_mode, master_weights=dtype != torch.float32)
    plain = other(theirs, lr=1e-2, weight_decay=0.1, fused=True)
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
        fused.step()
        plain.step()
    tolerance = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (8e-3, 1e-5), torch.float16: (1e-3, 1e-5)}[dtype]
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.float(), q, rtol=tolerance[0], atol=tolerance[1])


@pytest.mark.invariant(18)
def test_a_graph_of_fused_adam_replays_as_the_steps_themselves() -> None:
    def start() -> tuple[list[Tensor], FusedAdam, Tensor]:
        torch.manual_seed(0)
        params = [torch.randn(n, device=CUDA, requires_grad=True) for n in (5, 70_001, 64)]
        for p in params:
            p.grad = torch.randn_like(p)
        lr = torch.tensor(1e-2, device=CUDA)
        return params, FusedAdam(params, lr=lr, weight_decay=0.1, capturable=True), lr

    params, optimizer, lr = start()
    eager_params, eager, eager_lr = start()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which makes parameters and gradients
    with torch.cuda.stream(side):  # the first step makes the state
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    eager.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for rate in (1e-2, 5e-3, 1e-3):
        for scalar in (lr, eager_lr):
            scalar.fill_(rate)
        graph.replay()
        eager.step()
    assert [float(s["step"]) for s in optimizer.state.values()] == [4.0] * 3
    for p, q in zip(params, eager_params, strict=True):
        assert torch.equal(p, q)


def test_a_graph_of_compression_and_norms_replays() -> None:
    x = torch.randn(300_007, device=CUDA)
    form, error = SignFormat(4096), torch.zeros_like(x)
    messages = torch.zeros(sum(form.chunk_nbytes(x.numel(), 2)), dtype=torch.uint8, device=CUDA)
    compressed(x), native.sum_of_squares([x], CUDA)  # loads the kernels
    graph, norms = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        native.compress_(form, Combination.of(x), error, messages, 2, error)
        norms.append(native.sum_of_squares([x], CUDA))
    error.zero_()
    x.normal_()
    graph.replay()
    for got, expected in zip((messages, error), compressed(x), strict=True):
        assert torch.equal(got, expected)
    torch.testing.assert_close(norms[0], x.double().square().sum(), rtol=1e-13, atol=0)


def test_two_streams_do_not_disturb_each_other() -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    xs = [torch.randn(3_000_017, device=CUDA) for _ in streams]
    expected = [(native.sum_of_squares([x], CUDA), *compressed(x)) for x in xs]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for stream, x in zip(streams, xs, strict=True):
            with torch.cuda.stream(stream):
                results.append((native.sum_of_squares([x], CUDA), *compressed(x)))
    torch.cuda.synchronize()
    for k, result in enumerate(results):
        for got, wanted in zip(result, expected[k % 2], strict=True):
            assert torch.equal(got, wanted)


def test_work_follows_the_tensors_device_and_leaves_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    other = torch.device("cuda", 1)
    cases.check_compress(other, SignFormat(4096), 10_007, 2, segments=5)
    cases.check_adam(other, [5, 5000])
    cases.check_square_sums(other, [5, 5000])
    assert torch.cuda.current_device() == 0


def test_the_host_does_not_wait() -> None:
    x = torch.randn(2_000_003, device=CUDA)
    expected = block_rms(x.cpu(), x.numel())[0]
    compressed(x, 1, None)  # loads the kernels
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    messages, _ = compressed(x, 1, None)
    assert not torch.cuda.current_stream().query(), "the call returned when the GPU was done"
    torch.testing.assert_close(messages[:4].view(torch.float32)[0].cpu(), expected)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is not installed")
    script = (
        "import torch; from hf_compressopt.kernels import LambOptions\n"
        "from tests.support import kernel_cases as c\n"
        "d = torch.device('cuda', 0)\n"
        "for form in c.FORMATS:\n"
        "    c.check_compress(d, form, 9001, 3, segments=7); c.check_average_compress(d, form, 9001, 3)\n"
        "    c.check_compress(d, form, 9001, 3, segments=90, last=3, compact=True)\n"
        "c.check_apply_adam(d, 5003, 7, chunks=3)\n"
        "c.check_apply_adam(d, 5003, 7, chunks=3, log=True, with_m=False); c.check_adam(d, [1, 5000], shift=1)\n"
        "c.check_lamb(d, 9001, 6, chunks=3, options=LambOptions(0.9, 0.999, 1e-6, 0.1, False))\n"
        "c.check_square_sums(d, [1, 7, 9001])\n"
    )
    options = ["--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"]
    command = [program, *options, sys.executable, "-c", script]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(REPO_ROOT)}
    result = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
