"""What surrounds the kernels: the smallest call, a chain of them in a graph, the sampler and rejection over the vocabulary, all-reduce."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from microbench.plan import Point
from microbench.timing import Device, Work


def launch_work(p: Point, device: Device) -> Work:
    """An operation on 16 numbers: time is dispatch on a CPU and one node of a graph on a GPU. `chain`: five that wait for each other."""
    torch = import_module("torch")
    x = device.tensor((16,), "fp32", 0).clone()
    if p.text("kind") == "tiny":
        return Work(lambda i: torch.add(x, 1.0))

    def chain(i: int) -> Any:
        y = x
        for _ in range(5):
            y = torch.add(y, 1.0)
        return y

    return Work(chain)


def sampler_work(p: Point, device: Device) -> Work:
    """Rejection sampling over the vocabulary: softmax of the target, ratio with the draft, the residual distribution and its sample."""
    torch = import_module("torch")
    rows, vocab = p.num("rows"), p.num("vocab")
    copies = device.copies(2 * 4 * rows * vocab)
    logits = [device.tensor((rows, vocab), "fp32", 2 * i) for i in range(copies)]
    draft = torch.softmax(device.tensor((rows, vocab), "fp32", 1), dim=-1)
    token = torch.zeros((rows, 1), device=draft.device, dtype=torch.int64)
    noise = torch.rand(rows, vocab, device=draft.device).add_(1e-3).log_().neg_()

    def launch(i: int) -> Any:
        target = torch.softmax(logits[i % copies], dim=-1)
        ratio = target.gather(1, token) / draft.gather(1, token)
        residual = (target - draft).clamp_(min=0)
        return ratio, (residual / noise).argmax(dim=-1)

    return Work(launch, copies)


#: Message sizes in bytes: engines change algorithm between 16 KiB and 2 MiB.
MESSAGE_BYTES = tuple(2**p for p in range(10, 25, 2))


def all_reduce_records() -> list[dict[str, Any]]:
    """All-reduce by message size over the ranks of this torchrun, in the fields of a raw record; the same list on every rank."""
    torch, environ = import_module("torch"), import_module("os").environ
    torch.cuda.set_device(int(environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    try:
        ranks = torch.distributed.get_world_size()
        return [
            {"key": f"allreduce num_ranks={ranks} size_bytes={size}", "op": "allreduce", "args": {"num_ranks": ranks, "size_bytes": size},
             "held_out": False, "index": 0, "stopped": "count", "wall_s": 0.0, "samples_s": all_reduce_samples(size)}
            for size in MESSAGE_BYTES
        ]  # fmt: skip
    finally:
        torch.distributed.destroy_process_group()


def all_reduce_samples(size_bytes: int, repeats: int = 30) -> list[float]:
    """Seconds of one bf16 all-reduce over all GPUs of a torch.distributed group that is already up (`torchrun -m microbench`)."""
    torch = import_module("torch")
    distributed = torch.distributed
    x = torch.randn(max(size_bytes // 2, 1), device="cuda", dtype=torch.bfloat16)
    for _ in range(5):
        distributed.all_reduce(x)
    graph = torch.cuda.CUDAGraph()
    launches = 20
    with torch.cuda.graph(graph):
        for _ in range(launches):
            distributed.all_reduce(x)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples = []
    for _ in range(repeats):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(float(begin.elapsed_time(end)) * 1e-3 / launches)
    return samples
