"""Ranks that train over links of known speed: each a process in a network namespace of its own, joined by a bridge.

A namespace may also hold several ranks, as a node does: these reach each other without its link.
`tc ... tbf` shapes the traffic that a namespace sends and receives. The namespaces are removed at the end, also after
an error or Ctrl-C.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from _common import REPOSITORY

RATES = {"unshaped": None, "10 Gbit/s": 10e9, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}  # bits per second
RESULT = "RESULT "


# -- the network ------------------------------------------------------------------------------------------------------


def run(*words: object) -> None:
    """Run a command quietly; a RuntimeError has what it said if it fails."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip() or done.returncode}")


class Network:
    """Namespaces, one for each node, joined by a bridge in one more."""

    def __init__(self, ranks: int, per_node: int = 1) -> None:
        self.ranks, self.per_node, self.nodes = ranks, per_node, ranks // per_node
        self.prefix = f"co{os.getpid()}"
        self.hub = f"{self.prefix}-hub"

    def namespace(self, node: int) -> str:
        return f"{self.prefix}-{node}"

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def build(self) -> None:
        run("ip", "netns", "add", self.hub)
        inside = ("ip", "-n", self.hub)
        run(*inside, "link", "add", "bridge", "type", "bridge")
        run(*inside, "link", "set", "bridge", "up")
        for node in range(self.nodes):
            name = self.namespace(node)
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run(*inside, "link", "add", f"port{node}", "type", "veth", "peer", "name", "eth0", "netns", name)
            run(*inside, "link", "set", f"port{node}", "master", "bridge", "up")
            run("ip", "-n", name, "address", "add", f"{self.address(node)}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")

    def shape(self, rate: float | None) -> None:
        """Give every node a link of ``rate`` bits per second, each way; None is as fast as the machine can."""
        burst = 2_000_000 if rate is None or rate > 2e9 else 256_000 if rate > 2e8 else 96_000
        for node in range(self.nodes):
            for namespace, device in ((self.namespace(node), "eth0"), (self.hub, f"port{node}")):
                subprocess.run(("tc", "-n", namespace, "qdisc", "del", "dev", device, "root"), capture_output=True)
                if rate is not None:
                    shaped = ("rate", f"{rate:.0f}bit", "burst", burst, "latency", "20ms")
                    run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *shaped)

    def remove(self) -> None:
        for name in (self.hub, *map(self.namespace, range(self.nodes))):
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


# -- the ranks --------------------------------------------------------------------------------------------------------


class Ranks:
    """Processes that run `script --serve INTERFACE`, and take one order after the other, together."""

    def __init__(self, network: Network | None, ranks: int, threads: int, script: str) -> None:
        self.processes: list[Any] = []
        self.folder = tempfile.mkdtemp(prefix="ranks-")  # they meet in a file: a port that is free now may not be soon
        interface, per_node = "lo" if network is None else "eth0", 1 if network is None else network.per_node
        local = per_node if per_node > 1 else ranks
        for rank in range(ranks):
            prefix = [] if network is None else ["ip", "netns", "exec", network.namespace(rank // per_node)]
            words = [*prefix, sys.executable, str(Path(script).resolve()), "--serve", interface]
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % local),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(local),
                "MASTER_ADDR": "127.0.0.1" if network is None else network.address(0),
                "STORE": f"{self.folder}/store",
                "GLOO_SOCKET_IFNAME": interface,
                "OMP_NUM_THREADS": str(threads),
                "ACCELERATE_USE_CPU": "true",
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])),
            }
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.processes.append(subprocess.Popen(words, env=environment, cwd=REPOSITORY, **pipes))

    def order(self, **what: Any) -> list[dict[str, Any]]:
        """Have all ranks do it. Returns their answers; RuntimeError if a rank died."""
        for process in self.processes:
            try:
                process.stdin.write(json.dumps(what) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise RuntimeError(f"a rank died before {what}; see its error above") from None
        return [self._answer(process, what) for process in self.processes]

    def _answer(self, process: Any, what: dict[str, Any]) -> dict[str, Any]:
        for line in process.stdout:
            if line.startswith(RESULT):
                return dict(json.loads(line.removeprefix(RESULT)))
        raise RuntimeError(f"a rank died in {what}; see its error above")

    def close(self) -> None:
        """Let the ranks end by themselves; :meth:`kill` follows."""
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def sent_bytes(interface: str) -> int:
    """Bytes that left the interface so far, as the kernel counts them in this process's network namespace."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/net/dev").read_text().splitlines() if ":" in line)
    return int({name.strip(): row for name, row in rows.items()}[interface].split()[8])


def trainer_of(
    model: Any, examples: Any, folder: str, watch: Any, *, hook: str, data: Any = None, **options: Any
) -> Any:
    """A Trainer on CPUs that logs and saves nothing; hook "none" exchanges nothing, "fp16" half, "" is DDP's own."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    import hf_compressopt.auto  # noqa: F401
    from hf_compressopt.collectives.sender import as_it_is

    class Hook(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if hook and isinstance(trainer.model_wrapped, DistributedDataParallel):
                nothing: Any = lambda _, bucket: as_it_is(bucket.buffer())  # noqa: E731
                trainer.model_wrapped.register_comm_hook(None, nothing if hook == "none" else fp16_compress_hook)

    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=examples, callbacks=[Hook(), watch], **data or {})
    trainer.remove_callback(PrinterCallback)
    return trainer


def serve(do: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Take orders on a rank, one JSON object a line, and answer each with one, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends its ranks
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    answers, sys.stdout = sys.stdout, sys.stderr  # Trainer prints
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["STORE"], world_size)
    for number, line in enumerate(sys.stdin):
        # the threads of a group wake up a hundred times a second: none is left from one order to the next
        dist.init_process_group("gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=world_size)
        print(RESULT + json.dumps(do(json.loads(line))), file=answers, flush=True)
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()


@contextmanager
def ranks_on_links(
    ranks: int, threads: int, script: str, *, loopback: bool, per_node: int = 1
) -> Iterator[tuple[Network | None, Ranks]]:
    """The network, None over loopback, and its ranks, ``per_node`` behind each link; both are gone afterwards."""
    network = None if loopback else Network(ranks, per_node)
    try:
        if network is not None:
            network.build()
        processes = Ranks(network, ranks, threads, script)
        try:
            yield network, processes
            processes.close()
        finally:
            processes.kill()
    finally:
        if network is not None:
            network.remove()
