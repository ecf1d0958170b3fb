"""Prove on one GPU, in minutes and offline, that everything works there, and bring back the figures that docs lack.

    python scripts/gpu_proof.py --minutes 9 --out DIR          # on the GPU
    python scripts/gpu_proof.py --minutes 9 --out DIR --part C D
    python scripts/gpu_proof.py --device cpu --minutes 4       # a rehearsal: what a CPU can run, by the same code

    A  the environment; every family of kernels against the reference, at odd sizes, and with 100 and 800 tensors
    B  the tests of the kernels
    C  every path between ranks, on 2 and 4 processes over gloo that share the GPU (_paths.py); beside it NCCL with one
       rank, uneven and empty splits; and the tests of training: Trainer in bf16, torch.compile, CUDA graphs
    D  with nothing beside it: kernels against the memory's speed; steps of 124M and 355M parameters on 1 and 8 ranks in
       one process (_loopback.py), their waits for the device, kernels launched, and memory
    E  ncu on the kernels, where it is installed
    F  losses (converge_on_gpu.py) for the time that is left; beside it compute-sanitizer

Each part has a time limit and is a process of its own, so that a part that fails or hangs ends no other one. What is
found is a line of DIR/proof.jsonl at once, with "part" and "ok"; output is in DIR/A.log to DIR/F.log. The library for
the GPU and the tokens of part F must be there: `make gpu-proof` makes both, `make gpu-bundle` on a machine without GPU.
"""

from __future__ import annotations

import csv
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _common import REPOSITORY, parser_of

#: Parts that run side by side, the most seconds for them on a GPU, and in a rehearsal the most of all its time.
PLAN: list[tuple[tuple[str, ...], float, float]] = [
    (("A",), 60, 0.4),  # torch is read from the disk for the first time
    (("B",), 120, 0.25),
    (("C", "C nccl", "C training"), 130, 0.55),
    (("D",), 130, 0.25),
    (("E",), 40, 0.1),
    (("F", "F sanitizer"), 600, 0.25),
]
LEAST = 8.0  # seconds with which a part begins
AT_THE_END = 4.0  # seconds of a part in which it names what it leaves out
LARGEST_LOG = 2_000_000  # bytes that are kept, of the end


@dataclass
class Proof:
    """What a part is given."""

    part: str
    out: Path
    device: Any  # a torch.device
    end: float  # by time.time()

    @property
    def gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    def tell(self, ok: bool | None, **facts: Any) -> None:
        """Write a line; ok is None for what was not run."""
        line = json.dumps({"part": self.part, "ok": ok, **facts})
        with (self.out / "proof.jsonl").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)


# -- A ----------------------------------------------------------------------------------------------------------------


def part_a(proof: Proof) -> None:
    from hf_compressopt import environment, selftest
    from hf_compressopt.kernels import implementation, library, selfcheck

    facts = environment.collect()
    proof.tell(not facts["problems"], what="environment", environment=facts)
    missing = library.why_not(proof.device)
    proof.tell(not missing, what="native kernels", kernels=implementation(proof.device), missing=missing)
    for family in () if missing else selfcheck.FAMILIES:
        began = time.time()
        wrong = selftest.differences(family, proof.device)
        facts = {"family": family, "cases": len(selftest.CASES), "seconds": round(time.time() - began, 2)}
        proof.tell(not wrong, what="kernels against the reference", **facts, different=wrong[:20])


# -- B, and the tests of C and F --------------------------------------------------------------------------------------


def run_tests(proof: Proof, words: Iterable[str], workers: int = 0) -> None:
    """Run pytest, and tell how many tests passed, and which failed, with the end of what they said."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "tests.xml")
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", f"--junitxml={report}", *words]
        command += ["-o", "addopts=-ra"]  # without pytest-timeout its mark is no reason to run nothing
        if workers and find_spec("xdist"):
            command += ["-n", str(workers), "--dist", "worksteal"]
        try:
            code = subprocess.run(command, cwd=REPOSITORY, timeout=proof.end - AT_THE_END - time.time()).returncode
        except subprocess.TimeoutExpired:  # on a GPU they may hang; in a rehearsal the machine has other work
            ok = False if proof.gpu else None
            return proof.tell(ok, what="tests", words=list(words), because="no time is left")
        if not report.exists():
            return proof.tell(False, what="tests", error=f"pytest ended with {code} and no report")
        counts: Counter[str] = Counter()
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
            found = next((child for child in case if child.tag in kinds), None)
            kind = "passed" if found is None else kinds[found.tag]
            counts[kind] += 1
            if found is not None and kind == "failed":
                proof.tell(False, what="test", test=f"{case.get('classname')}::{case.get('name')}",
                           error=f"{found.get('message')}"[:500], output=f"{found.text}"[-1500:])  # fmt: skip
        proof.tell(code == 0 and counts["passed"] > 0, what="tests", words=list(words), **counts)


def part_b(proof: Proof) -> None:
    if proof.gpu:
        run_tests(proof, ["tests/gpu/test_native_gpu.py", "-k", "not sanitizer"], workers=8)
    else:
        run_tests(proof, ["tests/kernels/test_native_kernels.py", "-k", "test_adam or sketch or square"])


def part_c_training(proof: Proof) -> None:
    files = ["tests/gpu/test_training_gpu.py", "tests/gpu/test_zero_gpu.py"]
    run_tests(
        proof,
        [*(files if proof.gpu else ["tests/integrations/test_device_suite.py"]), "-k", "not self_test and not ranks"],
    )


def part_f_sanitizer(proof: Proof) -> None:
    os.environ["PATH"] += ":/opt/nvidia/compute-sanitizer:/usr/local/cuda/compute-sanitizer"
    if not proof.gpu or not shutil.which("compute-sanitizer"):
        return proof.tell(None, what="compute-sanitizer", because="it is not installed, or there is no GPU")
    run_tests(proof, ["tests/gpu/test_native_gpu.py", "-k", "sanitizer"])


# -- C ----------------------------------------------------------------------------------------------------------------


def part_c(proof: Proof) -> None:
    from _paths import run_paths

    for world_size in (2, 4):
        run_paths(world_size, proof.device, lambda row: proof.tell(**row), end=proof.end - AT_THE_END)


def part_c_nccl(proof: Proof) -> None:
    """The calls of TorchCommunicator, as NCCL takes them from one rank; on a CPU gloo."""
    import torch
    import torch.distributed as dist

    from hf_compressopt.collectives.torch_dist import TorchCommunicator

    backend = "nccl" if proof.gpu else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        ranks = TorchCommunicator(device=proof.device)
        for dtype in (torch.uint8, torch.float32, torch.bfloat16, torch.int64):
            for numel in (0, 1, 4097, 1_000_003):
                sent = torch.arange(numel, device=proof.device).to(dtype)
                received, gathered = torch.zeros_like(sent), torch.zeros_like(sent)
                ranks.all_to_all(received, sent, output_splits=[numel], input_splits=[numel]).wait()
                ranks.all_gather(gathered, sent).wait()
                summed = sent.clone()
                dist.all_reduce(summed)
                ranks.broadcast(summed)
                ok = all(torch.equal(sent, other) for other in (received, gathered, summed))
                proof.tell(ok, what=f"{backend}, one rank", dtype=str(dtype), numel=numel)
        proof.tell(ranks.all_gather_object({"rank": 0}) == [{"rank": 0}], what=f"{backend}, objects")
        dist.destroy_process_group()


# -- D ----------------------------------------------------------------------------------------------------------------


def part_d(proof: Proof) -> None:
    import benchmark_kernels as speed
    import torch

    if not proof.gpu:
        torch.set_num_threads(1)
    for dtype in (torch.bfloat16, torch.float32):
        tell_kernels(proof, dtype)
    sizes = {"124M": speed.gpt2(), "355M": speed.gpt2(1024, 24)} if proof.gpu else {"tiny": speed.gpt2(32, 2, 512)}
    for ranks in (1, 8) if proof.gpu else (1, 2):
        for title, numels in sizes.items():
            for name in STEPS if ranks > 1 else ["AdamW, fused", *STEPS]:
                for bucket_mb in bucket_sizes(proof, name):
                    tell_step(proof, title, name, numels, ranks, bucket_mb)


def tell_kernels(proof: Proof, dtype: Any) -> None:
    """Measure the kernels on a bucket whose parameters and gradients have this dtype."""
    import benchmark_kernels as speed
    import torch

    torch.manual_seed(0)
    numel, rounds = (100_000_000, 10) if proof.gpu else (300_000, 3)
    cases = [*speed.sign_cases(numel, proof.device, dtype), *speed.integer_cases(numel, proof.device)]
    for row in speed.measure_kernels(numel, cases, rounds=rounds, slow=0, device=proof.device):
        proof.tell(True, what="kernel", numel=numel, parameters=str(dtype), **row)


def bucket_sizes(proof: Proof, name: str) -> list[float]:
    """MiB of buckets with which a step is measured."""
    if not proof.gpu:
        return [0.1]
    return [25.0, 100.0] if name in LARGE_BUCKETS else [25.0]


def tell_step(proof: Proof, title: str, name: str, numels: list[int], ranks: int, bucket_mb: float) -> None:
    """Measure a step, or tell why not: the next one may work."""
    import torch

    if time.time() > proof.end - AT_THE_END:
        return proof.tell(None, what="step", model=title, step=name, ranks=ranks, because="no time is left")
    try:
        row = measure_step(name, numels, ranks, bucket_mb, proof.device)
    except torch.OutOfMemoryError as error:
        proof.tell(None, what="step", model=title, step=name, ranks=ranks, because=f"{error}"[:200])
    except Exception as error:
        proof.tell(False, what="step", model=title, step=name, ranks=ranks, error=f"{error!r}"[:1000])
    else:
        proof.tell(row["waits"] <= WAITS.get(name, 1), what="step", model=title, **row)


#: Of each step, its name in benchmark_host.py, and options.
STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4, fused AdamW": ("int4", {}),
    "OnebitAdam": ("OnebitAdam", {"freeze_step": 3}),
    "OnebitAdam, warmup": ("OnebitAdam", {"freeze_step": 1000}),
    "ZeroOneAdam, sync": ("ZeroOneAdam", {"freeze_step": 3, "local_step_clipper": 1}),
    "ZeroOneAdam, variance": ("ZeroOneAdam", {"freeze_step": 1000, "var_update_scaler": 1000}),
    "OnebitLamb": ("OnebitLamb", {"freeze_step": 3}),
    "Lamb": ("Lamb", {}),
    "ZeRO-2": ("ZeRO-2", {}),
}
LARGE_BUCKETS = ("int4, fused AdamW", "OnebitAdam")
#: How often a step may wait for the device, where it is not once. average_gradients() waits twice, since it leaves
#: gradients where there are any on some rank. ZeroOptimizer looks at gradients that no backward pass has given it.
WAITS = {"AdamW, fused": 0, "OnebitAdam, warmup": 3, "ZeroOneAdam, variance": 3, "ZeRO-2": 8}


def measure_step(name: str, numels: list[int], ranks: int, bucket_mb: float, device: Any) -> dict[str, Any]:
    """Times of a step of ranks in one process, per rank: of the GPU, of a rank's host thread, and by the clock."""
    import benchmark_host as host
    import torch
    from _loopback import World
    from benchmark_kernels import parameters
    from torch.profiler import ProfilerActivity, profile

    gpu = device.type == "cuda"
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    world, counts = World(ranks, device), Counter[str]()
    copies = host.HostCopies(counts)
    kind, options = STEPS.get(name, ("AdamW", {}))
    makers: dict[str, Callable[[host.Given], host.Step]] = {"int4": host.int4, "ZeRO-2": host.zero}
    makers |= {"AdamW": host.Given.update, "Lamb": lamb}
    steps, ranks_of = [], []
    with copies:
        for communicator in world.communicators():
            torch.manual_seed(0)
            given = host.Given(shaped(parameters(numels, device), numels[-1]), bucket_mb, communicator)
            ranks_of.append(communicator)
            torch._foreach_mul_([param.grad for param in given.params], 1.0 + communicator.rank)
            make = makers.get(kind, lambda given: host.compressed(kind, given, **options))
            steps.append(make(given))
    seconds: list[float] = [0.0] * ranks

    def step(rank: int) -> None:
        with ExitStack() as stack:
            if not gpu:
                stack.enter_context(copies)
                stack.enter_context(host.WaitingCalls(counts, copies.in_host_memory))
            began = time.thread_time()
            steps[rank]()
            seconds[rank] = time.thread_time() - began

    for _ in range(5):
        world.run(step)
    counts.clear()
    began = time.perf_counter()
    with host.counted_waits(device, counts):
        world.run(step)
    kinds = dict(+counts)
    waits = sum(kinds.values())
    rounds = max(2, min(10, int(1.5 / (time.perf_counter() - began))))
    launched = 0
    if gpu:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            world.run(step)
            torch.cuda.synchronize()
        launched = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiled.events())
    before = ranks_of[0].traffic.total_bytes
    began, host_seconds = time.perf_counter(), 0.0
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if gpu else []
    for event in events[:1]:
        event.record()
    for _ in range(rounds):
        world.run(step)
        host_seconds += seconds[0]
    for event in events[1:]:
        event.record()
    if gpu:
        torch.cuda.synchronize()
    clock = time.perf_counter() - began
    row = {"step": name, "ranks": ranks, "bucket_mb": bucket_mb, "parameters": sum(numels), "waits": waits / ranks}
    row |= {
        "kinds": kinds,
        "ms": 1e3 * clock / rounds / ranks,
        "host_ms": 1e3 * host_seconds / rounds,
        "launched": launched / ranks,
        "bytes": (ranks_of[0].traffic.total_bytes - before) / rounds,
    }
    if gpu:
        row["gpu_ms"] = events[0].elapsed_time(events[1]) / rounds / ranks
        row["bytes_per_parameter"] = torch.cuda.max_memory_allocated() / ranks / sum(numels)
        row["reserved"] = torch.cuda.memory_reserved()
    return row


def shaped(params: list[Any], width: int) -> list[Any]:
    """Parameters as a model has them: matrices but for vectors, which travel in full precision beside low bits."""
    from torch import nn

    found = []
    for param in params:
        if param.numel() > 4 * width:
            matrix = nn.Parameter(param.detach().view(-1, width))
            matrix.grad = param.grad.view(-1, width)
            param = matrix
        found.append(param)
    return found


def lamb(given: Any) -> Callable[[], object]:
    """LAMB, which sends nothing."""
    import torch

    from hf_compressopt import Lamb

    optimizer = Lamb(given.params, lr=1e-4)

    def clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(given.params, 1.0)
        optimizer.step()

    return clip_and_step


# -- E, F -------------------------------------------------------------------------------------------------------------

METRICS = (
    "dram__bytes.sum,gpu__time_duration.sum,sm__warps_active.avg.pct_of_peak_sustained_active,"
    "launch__registers_per_thread"
)


def part_e(proof: Proof) -> None:
    """Bytes, time, occupancy and registers of some launches of each kernel, by ncu."""
    ncu = shutil.which("ncu") or next(iter(glob("/opt/nvidia/nsight-compute/*/ncu")), None)
    if not proof.gpu or ncu is None:
        return proof.tell(None, what="ncu", because="it is not installed, or there is no GPU")
    kernels = "regex:compress_tiles|compress_blocks|over_runs|find_nan|sketch_spans|step_tensors|square_items"
    options = ["--clock-control", "none", "--csv", "--metrics", METRICS, "-k", kernels, "--launch-count", "30"]
    script = [sys.executable, str(REPOSITORY / "scripts" / "benchmark_kernels.py"), "--device", "cuda"]
    script += ["--numel", "25000000", "--rounds", "1"]
    done = subprocess.run([ncu, *options, *script], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    begin = next((k for k, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        return proof.tell(False, what="ncu", error=(done.stdout + done.stderr)[-1000:])
    launches: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(lines[begin:]):
        launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"][:120]})
        launch[row["Metric Name"]] = f"{row['Metric Value']} {row['Metric Unit']}".strip()
    for launch in launches.values():
        proof.tell(True, what="ncu", **launch)


def part_f(proof: Proof) -> None:
    """Losses, as many runs as there is time for: the most important ones first."""
    tokens = REPOSITORY / "build" / "tokens"
    if not (tokens / "train.bin").exists():
        return proof.tell(None, what="losses", because=f"{tokens} is missing: python scripts/make_tokens.py")
    runs = ["--models", "10M", "--seeds", "0", "1"] if proof.gpu else ["--models", "tiny", "--steps", "12"]
    ranks = "8" if proof.gpu else "2"
    words = ["--device", str(proof.device), "--world-sizes", ranks, "--out", str(proof.out), *runs]
    words += ["--seconds", f"{proof.end - time.time() - 3:.0f}"]
    done = subprocess.run([sys.executable, str(REPOSITORY / "scripts" / "converge_on_gpu.py"), *words])
    file = proof.out / "convergence.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for row in rows:
        keys = ("model", "name", "world_size", "seed", "steps", "eval_loss", "bytes", "seconds", "graphs")
        proof.tell(row["eval_loss"] is not None, what="loss", **{key: row[key] for key in keys})
    proof.tell(done.returncode == 0 and bool(rows), what="losses", runs=len(rows))


PARTS: dict[str, Callable[[Proof], None]] = {
    "A": part_a,
    "B": part_b,
    "C": part_c,
    "C nccl": part_c_nccl,
    "C training": part_c_training,
    "D": part_d,
    "E": part_e,
    "F": part_f,
    "F sanitizer": part_f_sanitizer,
}

# -- all parts --------------------------------------------------------------------------------------------------------


def run_part(part: str, out: Path, device: str, end: float) -> None:
    """Run one part in this process."""
    import torch

    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", place.index or 0)
        torch.cuda.set_device(place)
    proof = Proof(part, out, place, end)
    try:
        PARTS[part](proof)
    except Exception as error:
        proof.tell(False, what="part", error=f"{type(error).__name__}: {error}"[:2000])
        raise


def environment() -> dict[str, str]:
    """The variables of all parts: nothing is fetched, and processes talk over the loopback interface."""
    found = {**os.environ, "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    found |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    found["PATH"] = f"/usr/local/cuda/bin:{os.environ.get('PATH', '')}"
    return found


def run_side_by_side(parts: Iterable[str], seconds: float, out: Path, device: str) -> None:
    """Run parts, each in a process and a session of its own, until all have ended or their time is over."""
    end = time.time() + seconds
    running = {}
    for part in parts:
        words = ["--run", part, "--out", str(out), "--device", device, "--end", str(end)]
        with (out / f"{part[0]}.log").open("ab") as log:
            running[part] = subprocess.Popen(
                [sys.executable, __file__, *words], stdout=log, stderr=log, env=environment(), start_new_session=True
            )
    began = time.time()
    while running:
        time.sleep(0.1)
        for part, process in list(running.items()):
            code = process.poll()
            if code is None and time.time() < end:
                continue
            error = "" if code == 0 else f"it ended with {code}" if code else f"it was stopped after {seconds:.0f} s"
            try:
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started
            except ProcessLookupError:
                pass
            process.wait()
            Proof(part, out, None, end).tell(not error, what="end", seconds=round(time.time() - began, 1), error=error)
            del running[part]
    log = out / f"{part[0]}.log"
    if log.stat().st_size > LARGEST_LOG:
        log.write_bytes(log.read_bytes()[-LARGEST_LOG:])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--part", nargs="+", choices=[parts[0] for parts, *_ in PLAN], help="(all)")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything (%(default)s)")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "gpu-proof", help="(%(default)s)")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a rehearsal (%(default)s)")
    parser.add_argument("--run", choices=PARTS, help="run a part in this process")
    parser.add_argument("--end", type=float, default=0.0, help="when its time is over, by time.time()")
    arguments = parser.parse_args()
    if arguments.run:
        return run_part(arguments.run, arguments.out, arguments.device, arguments.end)
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for file in [out / "proof.jsonl", *out.glob("?.log")]:
        file.unlink(missing_ok=True)
    end = time.time() + 60 * arguments.minutes
    for parts, on_gpu, share in PLAN:
        if arguments.part and parts[0] not in arguments.part:
            continue
        most = 60 * arguments.minutes * share if arguments.device == "cpu" else on_gpu
        seconds = min(most, end - time.time())
        if seconds < LEAST:
            for part in parts:
                Proof(part, out, None, end).tell(None, what="part", because="no time is left")
            continue
        run_side_by_side(parts, seconds, out, arguments.device)
    sys.exit(int(summarize(out / "proof.jsonl")))


def summarize(file: Path) -> bool:
    """Print what each part found, and all failures. Returns whether there are any."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for part in PARTS:
        mine = [line for line in lines if line["part"] == part]
        ends = [f"{line['seconds']:.0f} s" for line in mine if line.get("what") == "end"]
        counts = Counter({True: "well", False: "FAILED", None: "not run"}[line["ok"]] for line in mine)
        if mine:
            print(f"{part:12} {' '.join(ends):>6}  " + ", ".join(f"{count} {word}" for word, count in counts.items()))
    failed = [line for line in lines if line["ok"] is False]
    for line in failed:
        print(f"FAILED: {json.dumps(line)[:600]}")
    return bool(failed)


if __name__ == "__main__":
    main()
