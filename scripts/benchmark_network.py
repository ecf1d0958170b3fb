"""Train over links of known speed, and compare what a step takes with every way to exchange gradients.

    sudo python scripts/benchmark_network.py --report docs/network.md      # a shaped link for every rank
    python scripts/benchmark_network.py --loopback                         # without the right to make networks

Every rank is a process in a network namespace of its own, joined by a bridge; `tc ... tbf` shapes what it sends and
what it receives. Each trains the same GPT-2-like model with transformers' Trainer, one method after the other, and that
several times over, so that a slow spell of the machine meets all methods. Times are those of whole steps in the stage
that a method spends most of a run in; bytes are the interface's own. The namespaces are removed at the end, also
after an error or Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).resolve().parents[1]
MODELS = {"10M": (6, 320, 8000), "30M": (8, 512, 8000), "tiny": (1, 32, 256)}  # layers, width, vocabulary
TOKENS = 128
RATES = {"unshaped": None, "10 Gbit/s": 10e9, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
SWITCH = 3  # steps before a compressed optimizer's last stage, in which DDP also settles its buckets
LONGEST_INTERVAL = 16  # 0/1 Adam: every window of this many steps has one sync
RESULT = "RESULT "


@dataclass(frozen=True)
class Method:
    """A way to exchange gradients.

    Attributes:
        title: Its name in tables.
        optim: Trainer's ``--optim``.
        optim_args: Trainer's ``--optim_args``.
        hook: DDP communication hook: "none" exchanges nothing at all, "fp16", "powersgd", or "" for DDP's own.
        bytes_per_parameter: What a rank sends in a step, by the formula; of W ranks.
    """

    title: str
    optim: str
    optim_args: str = ""
    hook: str = ""
    bytes_per_parameter: Callable[[int], float] | None = None


def ring(itemsize: float) -> Callable[[int], float]:
    """Bytes that a rank sends per parameter in an all-reduce of values of this size."""
    return lambda world_size: 2 * (world_size - 1) / world_size * itemsize


SIGN_BYTES = 1 / 8 + 4 / 4096  # a bit, and its share of a block's scale
METHODS = {
    "compute": Method("compute only", "adamw_torch", hook="none"),
    "ddp": Method("DDP fp32", "adamw_torch", bytes_per_parameter=ring(4)),
    "fp16": Method("DDP, 16-bit gradients", "adamw_torch", hook="fp16", bytes_per_parameter=ring(2)),
    "powersgd": Method("DDP, PowerSGD rank 1", "adamw_torch", hook="powersgd"),
    "zero2": Method("ZeRO-2", "zero2_adamw", bytes_per_parameter=ring(4)),
    "onebit_adam": Method("OnebitAdam", "onebit_adam", f"freeze_step={SWITCH}", bytes_per_parameter=ring(SIGN_BYTES)),
    "zero_one_adam": Method(
        "ZeroOneAdam",
        "zero_one_adam",
        f"var_freeze_step={SWITCH},local_step_scaler=1,local_step_clipper={LONGEST_INTERVAL}",
        bytes_per_parameter=lambda world_size: ring(SIGN_BYTES)(world_size) / LONGEST_INTERVAL,
    ),
    "onebit_lamb": Method("OnebitLamb", "onebit_lamb", f"freeze_step={SWITCH}", bytes_per_parameter=ring(SIGN_BYTES)),
}


# ------------------------------------------------------------------------------------------------- the network


def run(*words: object) -> None:
    """Run a command quietly.

    Raises:
        RuntimeError: If it fails, with what it said.
    """
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip() or done.returncode}")


class Network:
    """Namespaces, one for each rank, joined by a bridge in one more."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.prefix = f"co{os.getpid()}"
        self.hub = f"{self.prefix}-hub"

    def namespace(self, rank: int) -> str:
        return f"{self.prefix}-{rank}"

    def address(self, rank: int) -> str:
        return f"10.77.0.{rank + 1}"

    def build(self) -> None:
        run("ip", "netns", "add", self.hub)
        inside = ("ip", "-n", self.hub)
        run(*inside, "link", "add", "bridge", "type", "bridge")
        run(*inside, "link", "set", "bridge", "up")
        for rank in range(self.ranks):
            name = self.namespace(rank)
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run(*inside, "link", "add", f"port{rank}", "type", "veth", "peer", "name", "eth0", "netns", name)
            run(*inside, "link", "set", f"port{rank}", "master", "bridge", "up")
            run("ip", "-n", name, "address", "add", f"{self.address(rank)}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")

    def shape(self, rate: float | None) -> None:
        """Give every rank a link of ``rate`` bits per second, each way; None is as fast as the machine can."""
        burst = 2_000_000 if rate is None or rate > 2e9 else 256_000 if rate > 2e8 else 96_000
        for rank in range(self.ranks):
            for namespace, device in ((self.namespace(rank), "eth0"), (self.hub, f"port{rank}")):
                subprocess.run(("tc", "-n", namespace, "qdisc", "del", "dev", device, "root"), capture_output=True)
                if rate is not None:
                    shaped = ("rate", f"{rate:.0f}bit", "burst", burst, "latency", "20ms")
                    run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *shaped)

    def remove(self) -> None:
        for name in (self.hub, *map(self.namespace, range(self.ranks))):
            subprocess.run(("ip", "netns", "del", name), capture_output=True)


def check_rights() -> None:
    """Exit where namespaces cannot be made, and say what to do."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        sys.exit(f"{' and '.join(missing)} not found: install iproute2, or use --loopback")
    if os.geteuid() != 0:
        sys.exit("making network namespaces needs root: run with sudo, or use --loopback")
    probe = f"co{os.getpid()}-probe"
    try:
        run("ip", "netns", "add", probe)
    except RuntimeError as error:
        sys.exit(f"network namespaces cannot be made here ({error}): use --loopback")
    finally:
        subprocess.run(("ip", "netns", "del", probe), capture_output=True)


# --------------------------------------------------------------------------------------------------- one rank


def serve(rank: int, ranks: int, threads: int, interface: str) -> None:
    """Take orders, one JSON object a line, and answer each with one; ends where its input does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends its ranks
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    answers, sys.stdout = sys.stdout, sys.stderr  # Trainer prints
    dist.init_process_group("gloo")
    for line in sys.stdin:
        order = json.loads(line)
        answer = train(METHODS[order["method"]], order["model"], order["steps"], interface)
        print(RESULT + json.dumps(answer), file=answers, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def train(method: Method, model_name: str, steps: int, interface: str) -> dict[str, Any]:
    """Train with one method. Returns seconds of each step, and bytes that left, of the last ``steps`` steps."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    import hf_compressopt.auto  # noqa: F401

    layers, width, vocabulary = MODELS[model_name]
    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_embd": width, "n_head": max(1, width // 64), "vocab_size": vocabulary}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_positions=TOKENS, use_cache=False, bos_token_id=0, eos_token_id=0, **sizes, **dropout)
    model = GPT2LMHeadModel(config)
    examples = [{"input_ids": row, "labels": row} for row in torch.randint(0, vocabulary, (64, TOKENS))]
    warmup = SWITCH + 5  # 0/1 Adam's intervals are at their longest then: a step at a multiple of it is a sync

    class Watch(TrainerCallback):  # type: ignore[misc]
        """Times of steps, between barriers; the interface's counter around the last ones."""

        def __init__(self) -> None:
            self.ends: list[float] = []
            self.sent: list[int] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            wrapped = trainer.model_wrapped
            if method.hook and isinstance(wrapped, DistributedDataParallel):
                register(wrapped)

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step in (warmup, warmup + steps):
                dist.barrier()
                self.sent.append(sent_bytes(interface))
            if state.global_step >= warmup:
                self.ends.append(time.perf_counter())

    def register(wrapped: DistributedDataParallel) -> None:
        if method.hook == "none":
            wrapped.register_comm_hook(None, nothing_hook)
        elif method.hook == "fp16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        else:
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            ddp_bucket_cap_mb=1000 if method.hook == "powersgd" else 25,  # it needs one bucket on gloo
            ddp_find_unused_parameters=False,
            optim=method.optim,
            optim_args=method.optim_args or None,
            per_device_train_batch_size=1,
            max_steps=warmup + steps,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=examples, callbacks=[watch])
        trainer.train()
    seconds = [after - before for before, after in zip(watch.ends, watch.ends[1:], strict=False)]
    numel = sum(p.numel() for p in model.parameters())
    return {"seconds": seconds, "sent": watch.sent[1] - watch.sent[0], "numel": numel}


def nothing_hook(_, bucket):  # DDP compares annotations with its own types
    """Exchange nothing: each rank trains by itself."""
    import torch

    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def sent_bytes(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


# ----------------------------------------------------------------------------------------------------- all ranks


class Ranks:
    """The processes, which take one order after the other, together."""

    def __init__(self, network: Network | None, ranks: int, threads: int) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        interface = "lo" if network is None else "eth0"
        for rank in range(ranks):
            prefix = [] if network is None else ["ip", "netns", "exec", network.namespace(rank)]
            worker = [sys.executable, str(Path(__file__).resolve()), "--serve", str(rank), "--interface", interface]
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1" if network is None else network.address(0),
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": interface,
                "OMP_NUM_THREADS": str(threads),
                "ACCELERATE_USE_CPU": "true",
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])),
            }
            words = [*prefix, *worker, "--ranks", str(ranks), "--threads", str(threads)]
            self.processes.append(
                subprocess.Popen(
                    words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=REPOSITORY
                )
            )

    def order(self, **what: Any) -> list[dict[str, Any]]:
        """Have all ranks do it. Returns their answers.

        Raises:
            RuntimeError: If a rank died.
        """
        for process in self.processes:
            try:
                pipe(process.stdin).write(json.dumps(what) + "\n")
                pipe(process.stdin).flush()
            except BrokenPipeError:
                raise RuntimeError(f"a rank died before {what}; see its error above") from None
        return [self._answer(process, what) for process in self.processes]

    def _answer(self, process: subprocess.Popen[str], what: dict[str, Any]) -> dict[str, Any]:
        for line in pipe(process.stdout):
            if line.startswith(RESULT):
                answer: dict[str, Any] = json.loads(line.removeprefix(RESULT))
                return answer
        raise RuntimeError(f"a rank died in {what}; see its error above")

    def close(self) -> None:
        for process in self.processes:
            pipe(process.stdin).close()
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


PORT = 29577


def pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ------------------------------------------------------------------------------------------------------ measuring


@dataclass
class Row:
    """What one method took on one link.

    Attributes:
        model: Name of the model.
        link: Name of the link.
        method: Key of METHODS.
        numel: Parameters.
        seconds: Of a step: the mean of each window of steps, one window per round.
        sent: Bytes that one rank sent per step, the mean over ranks and rounds.
    """

    model: str
    link: str
    method: str
    numel: int
    seconds: list[float]
    sent: float


def steps_for(link: str, arguments: argparse.Namespace) -> int:
    """Steps of a window: 0/1 Adam's longest interval, or fewer on links where a step takes many seconds."""
    rate = RATES[link]
    return int(arguments.slow_steps if rate is not None and rate < 2e8 else arguments.steps)


def measure(arguments: argparse.Namespace, network: Network | None, ranks: Ranks) -> Iterator[Row]:
    """Every model on every link; on each the methods take turns."""
    for model in arguments.models:
        for link in ["unshaped"] if network is None else arguments.links:
            if network is not None:
                network.shape(RATES[link])
            rows = {name: Row(model, link, name, 0, [], 0.0) for name in arguments.methods}
            names = list(arguments.methods)
            for number in range(arguments.rounds):
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    steps = LONGEST_INTERVAL if name == "zero_one_adam" else steps_for(link, arguments)
                    answers = ranks.order(method=name, model=model, steps=steps)
                    mean = statistics.fmean(statistics.fmean(answer["seconds"]) for answer in answers)
                    sent = statistics.fmean(answer["sent"] for answer in answers) / steps
                    row = rows[name]
                    row.numel, row.sent = answers[0]["numel"], row.sent + sent / arguments.rounds
                    row.seconds.append(mean)
                    print(
                        f"{model}, {link}, round {number + 1}: {METHODS[name].title}: {mean * 1e3:.0f} ms", flush=True
                    )
            if network is None:
                for row in rows.values():
                    row.sent /= len(ranks.processes)  # one interface for all ranks
            yield from rows.values()


# ------------------------------------------------------------------------------------------------------ the report


def median(row: Row) -> float:
    return statistics.median(row.seconds)


def crossover(rows: Sequence[Row], mine: str, other: str) -> str:
    """Bandwidth below which ``mine`` is faster: between links that were measured, by interpolation in 1/rate."""
    points = []
    for link, rate in RATES.items():
        times = {row.method: median(row) for row in rows if row.link == link}
        if mine in times and other in times:
            points.append((0.0 if rate is None else 1 / rate, times[mine] - times[other]))
    points.sort()
    if not points:
        return ""
    if points[0][1] < 0:
        return "faster on every link"
    for (a, gain_a), (b, gain_b) in zip(points, points[1:], strict=False):
        if gain_b < 0:
            place = a + (b - a) * gain_a / (gain_a - gain_b)
            return f"faster below {1 / place / 1e9:.2g} Gbit/s" if place > 0 else "faster on every link"
    return "slower on every link"


def report(rows: Sequence[Row], arguments: argparse.Namespace) -> str:
    """Tables in Markdown."""
    lines = [
        "# Training over links of known speed",
        "",
        f"By `scripts/benchmark_network.py`: transformers' Trainer, {arguments.ranks} ranks of {arguments.threads} "
        f"thread(s) on {os.cpu_count()} CPU cores, 1 example of {TOKENS} tokens per rank and step. Milliseconds per "
        "step: the median over rounds of the mean over a window of steps, in brackets the least and the most, and how "
        "many times the step that exchanges nothing. Bytes are those that left a rank's network interface.",
        "",
    ]
    if not arguments.loopback and arguments.report is not None:
        lines += [f"![ms per step over bandwidth]({arguments.report.stem}.png)", ""]
    for model in arguments.models:
        mine = [row for row in rows if row.model == model]
        links = list(dict.fromkeys(row.link for row in mine))
        lines += [f"**{model}: {mine[0].numel:,} parameters, {arguments.ranks} ranks**", ""]
        lines += ["| | " + " | ".join(f"{link}, ms" for link in links) + " | MB sent per step | of the formula |"]
        lines += ["|---|" + "---:|" * (len(links) + 2)]
        compute = {row.link: median(row) for row in mine if row.method == "compute"}
        for name in arguments.methods:
            its = {row.link: row for row in mine if row.method == name}
            cells = []
            for link in links:
                row = its[link]
                spread = f"{min(row.seconds) * 1e3:.0f} to {max(row.seconds) * 1e3:.0f}"
                share = f", {median(row) / compute[link]:.2f}x" if link in compute else ""
                cells.append(f"{median(row) * 1e3:.0f} ({spread}){share}")
            sent = statistics.fmean(row.sent for row in its.values())
            formula = METHODS[name].bytes_per_parameter
            ideal = formula(arguments.ranks) * mine[0].numel if formula else 0.0
            share = f"{sent / ideal:.3f}" if ideal else ""
            lines.append(f"| {METHODS[name].title} | " + " | ".join(cells) + f" | {sent / 1e6:.3f} | {share} |")
        limit = limits(mine, arguments.ranks)
        if limit:
            cells = [f"{limit[link] * 1e3:.0f}" if link in limit else "" for link in links]
            lines.append("| limit of OnebitAdam: compute only + its bytes / rate | " + " | ".join(cells) + " | | |")
        lines.append("")
        for name in ("onebit_adam", "zero_one_adam", "onebit_lamb"):
            for other in ("ddp", "fp16"):
                if found := crossover(mine, name, other):
                    lines.append(f"- {METHODS[name].title} against {METHODS[other].title}: {found}")
        lines.append("")
    return "\n".join(lines)


def limits(rows: Sequence[Row], ranks: int) -> dict[str, float]:
    """Seconds that a step of OnebitAdam cannot go below on each link."""
    found = {}
    for row in rows:
        rate = RATES[row.link]
        if row.method == "compute":
            wire = 0.0 if rate is None else ring(SIGN_BYTES)(ranks) * row.numel * 8 / rate
            found[row.link] = median(row) + wire
    return found


def plot(path: Path, rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    """Milliseconds per step over bandwidth, both logarithmic; the limit is dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, len(arguments.models), figsize=(7.5 * len(arguments.models), 5.5), layout="constrained", squeeze=False
    )
    for model, panel in zip(arguments.models, panels[0], strict=True):
        mine = [row for row in rows if row.model == model and RATES[row.link] is not None]
        for name in arguments.methods:
            points = sorted((float(RATES[row.link] or math.inf), row) for row in mine if row.method == name)
            rates = [rate / 1e9 for rate, _ in points]
            panel.plot(rates, [median(row) * 1e3 for _, row in points], marker="o", label=METHODS[name].title)
        limit = sorted(
            (float(RATES[link] or math.inf), seconds) for link, seconds in limits(mine, arguments.ranks).items()
        )
        if limit:
            panel.plot(
                [rate / 1e9 for rate, _ in limit], [s * 1e3 for _, s in limit], "k--", label="limit of OnebitAdam"
            )
        panel.set(xscale="log", yscale="log", xlabel="link of each rank, Gbit/s", ylabel="ms per step")
        panel.set_title(f"{model} parameters, {arguments.ranks} ranks")
        panel.grid(True, which="both", alpha=0.2)
        panel.legend()
    figure.savefig(path, dpi=110)


# ----------------------------------------------------------------------------------------------------------- main


@contextmanager
def network_of(arguments: argparse.Namespace) -> Iterator[Network | None]:
    """The network, which is gone afterwards."""
    if arguments.loopback:
        yield None
        return
    check_rights()
    network = Network(arguments.ranks)
    try:
        network.build()
        yield network
    finally:
        network.remove()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank (%(default)s)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["10M", "30M"])
    parser.add_argument("--links", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=3, help="how often the methods take turns (%(default)s)")
    parser.add_argument("--steps", type=int, default=LONGEST_INTERVAL, help="measured in each turn (%(default)s)")
    parser.add_argument("--slow-steps", type=int, default=4, help="the same at 100 Mbit/s (%(default)s)")
    parser.add_argument("--loopback", action="store_true", help="no namespaces, no shaping")
    parser.add_argument("--report", type=Path, help="Markdown file; a picture and the rows as JSON go beside it")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--interface", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name, least in {"ranks": 2, "threads": 1, "rounds": 1, "steps": 2, "slow_steps": 2}.items():
        if getattr(arguments, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be >= {least}, got {getattr(arguments, name)}")
    return arguments


def main() -> None:
    global PORT
    arguments = parse_arguments()
    if arguments.serve is not None:
        return serve(arguments.serve, arguments.ranks, arguments.threads, arguments.interface)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if arguments.loopback:
        PORT = free_port()
    rows: list[Row] = []
    try:
        with ExitStack() as stack:
            network = stack.enter_context(network_of(arguments))
            ranks = Ranks(network, arguments.ranks, arguments.threads)
            stack.callback(ranks.kill)
            rows += measure(arguments, network, ranks)
            ranks.close()
    except KeyboardInterrupt:
        sys.exit("interrupted; nothing is left behind")
    text = report(rows, arguments)
    print(f"\n{text}")
    if arguments.report is not None:
        arguments.report.write_text(text)
        entries = ",\n".join(json.dumps(asdict(row)) for row in rows)
        arguments.report.with_suffix(".json").write_text(f"[\n{entries}\n]\n")
        if not arguments.loopback:
            plot(arguments.report.with_suffix(".png"), rows, arguments)


if __name__ == "__main__":
    main()
