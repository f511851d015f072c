"""A quarter of an hour on one GPU: what a rank does there, beside a plain loop of transformers and
peft, and what a line takes from it.

    python -m benchmarks.gpu_quarter --json gpu.json [--parts tests lora cut …]
    python -m benchmarks.gpu_quarter --toy --json toy.json      # all parts but the tests, any CPU

Weights are drawn in the shapes of known models, so nothing is downloaded. Parts, in this order:
tests of the GPU; LoRA on three shapes, bf16 and nf4, here and in a plain loop of the same sitting
(tokens a second, share of the peak rate, peak memory); the smallest shape cut over two ranks, on a
free line and on 100 Mbit/s in INT4; attention over packed texts and the loss over a vocabulary, by
torch's kernels and ours; codecs; an update of AdamW, fused and not; a frame that leaves the GPU,
as today and on a stream of its own beside products: the figures that decision 0023 waits for. Each
figure is written as soon as it is known. A part that fails is written with its reason, the others
go on, and the command ends with exit code 1.

Bars, whose shares stand last in the file: LoRA here >= 0.8 of the plain loop; cut on a free line
>= 0.85 of one process; INT4 at 100 Mbit/s >= 0.9 of the free line.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.frozen_weights import SHAPES, whole_of, write_drawn
from benchmarks.machine import ran_on
from xcloud.comm.precision import BlockInt, Cast
from xcloud.models.causal_network import Lora, blocks_of, config_of, give_memory, laid_out, tie
from xcloud.models.causal_stage import CausalStage, chunked_cross_entropy
from xcloud.models.frozen_weights import FrozenMatrix, WeightFormat, keep_matrices
from xcloud.models.stages import LABEL, TEXT, TYPES
from xcloud.net.frame import Kind, MessageKey, TensorSpec, encode_frame
from xcloud.pipeline.settings import Optimizer, autocast_for

PARTS = ("tests", "lora", "cut", "kernels", "codecs", "adamw", "copies")
DENSE_BF16_FLOP_PER_S = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
FLOP_PER_WEIGHT = 4  # of a frozen weight and token: forward, and the gradient of its input
TRIALS = 5
KINDS: tuple[WeightFormat, ...] = ("bfloat16", "nf4")
QWEN3_4B: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}  # fmt: skip
TOY: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2000,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """What is measured, on a GPU or as a toy.

    shapes: configs by name, the smallest first.
    tokens: of an update, one packed sample. rows: of a codec's tensor. steps: of a run.
    """

    shapes: Mapping[str, Mapping[str, Any]]
    tokens: int
    rows: int
    features: int
    steps: int
    precision: str
    device: torch.device


def sizes_of(toy: bool) -> Sizes:
    if toy:
        shapes = {"toy": TOY}
        return Sizes(shapes, 64, 256, 64, 6, "fp32", torch.device("cpu"))
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; --toy runs the parts on a CPU")
    shapes = {
        "qwen2.5-0.5b": SHAPES["qwen2.5-0.5b"],
        "qwen3-4b": QWEN3_4B,
        "llama-3.1-8b": SHAPES["llama-3.1-8b"],
    }
    return Sizes(shapes, 4096, 8192, 4096, 40, "bf16", torch.device("cuda"))


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(action: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of some calls, after one that warms up."""
    action()
    found = []
    for _ in range(TRIALS):
        wait_for(device)
        began_at_s = time.perf_counter()
        action()
        wait_for(device)
        found.append(time.perf_counter() - began_at_s)
    return statistics.median(found)


def speed(update: Callable[[], object], num_weights: int, sizes: Sizes) -> dict[str, Any]:
    """Return tokens a second, share of the GPU's peak rate and peak memory of an update."""
    if sizes.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    tokens_per_s = sizes.tokens / median_s(update, sizes.device)
    found: dict[str, Any] = {"tokens_per_s": tokens_per_s, "mfu": None, "peak_bytes": None}
    if sizes.device.type == "cuda":
        name = torch.cuda.get_device_name()
        peaks = [rate for kind, rate in DENSE_BF16_FLOP_PER_S.items() if kind in name]
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        if peaks:
            found["mfu"] = FLOP_PER_WEIGHT * num_weights * tokens_per_s / peaks[0]
    return found


def own_stage(shape: Mapping[str, Any], kind: WeightFormat, device: torch.device) -> CausalStage:
    """Return a whole model whose blocks are frozen as `kind`. All blocks get the weights drawn for
    the first one, which are packed once."""
    config = config_of(shape)
    part = whole_of(config)
    network = laid_out(config, part=part)
    Lora().add_to(network, part=part)
    first: nn.Module | None = None
    for _, block in blocks_of(network):
        keep_matrices(block, kind_of=lambda name: kind)
        give_memory(network, module=block)
        block.to(device)
        if first is None:
            first = block
            draw(block)
        else:
            block.load_state_dict(first.state_dict())
    give_memory(network, module=network)
    tie(network)
    network.to(device)
    with torch.no_grad():
        network.get_input_embeddings().weight.normal_(std=0.02)
        network.get_output_embeddings().weight.normal_(std=0.02)
        network.base_model.norm.weight.fill_(1.0)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return CausalStage(network=network, part=part, chunk=8192, architecture={"lora": True})


def draw(block: nn.Module) -> None:
    """Draw a block's weights where they lie."""
    with torch.no_grad():
        for module in block.modules():
            if isinstance(module, FrozenMatrix):
                device = module.weight.device
                module.fill(torch.randn(module.stored_shape, device=device) * 0.02)
                if module.bias is not None:
                    module.bias.zero_()
            elif not isinstance(module, FrozenMatrix):
                for name, parameter in module.named_parameters(recurse=False):
                    if parameter.ndim == 1:
                        parameter.fill_(1.0 if name == "weight" else 0.0)
                    else:
                        parameter.normal_(std=0.02)


def num_weights_of(shape: Mapping[str, Any]) -> int:
    """Return how many weights a token passes through, head included."""
    network = laid_out(config_of(shape), part=whole_of(config_of(shape)))
    inside = sum(p.numel() for _, block in blocks_of(network) for p in block.parameters())
    return inside + int(shape["hidden_size"]) * int(shape["vocab_size"])


def own_update(shape: Mapping[str, Any], kind: WeightFormat, sizes: Sizes) -> Callable[[], object]:
    stage = own_stage(shape, kind, sizes.device)
    optimizer = Optimizer().build(stage)
    autocast = autocast_for(sizes.precision, device=sizes.device)
    text = torch.randint(int(shape["vocab_size"]), (1, sizes.tokens))
    batch = {TEXT: text, TYPES: torch.zeros_like(text), LABEL: text}

    def update() -> None:
        with autocast():
            loss = stage(None, batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def plain_update(
    shape: Mapping[str, Any], kind: WeightFormat, sizes: Sizes
) -> Callable[[], object]:
    """Return an update of the loop that most people would write. Packed weights are those of
    bitsandbytes; raises ImportError without it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if sizes.precision == "fp32" else torch.bfloat16
    with sizes.device:
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config_of(shape), dtype=dtype
        )
    if kind == "nf4":
        pack(model, dtype)
    model.config.use_cache = False
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM"))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    text = torch.randint(int(shape["vocab_size"]), (1, sizes.tokens), device=sizes.device)

    def update() -> None:
        model(input_ids=text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def pack(model: Any, dtype: torch.dtype) -> None:
    """Put bitsandbytes' 4-bit layers in place of the matrices of blocks."""
    import bitsandbytes as bnb  # type: ignore[import-not-found, import-untyped, unused-ignore]

    for name, module in list(model.base_model.layers.named_modules()):
        if isinstance(module, nn.Linear):
            packed = bnb.nn.Linear4bit(
                module.in_features, module.out_features, bias=module.bias is not None,
                compute_dtype=dtype, quant_type="nf4",
            )  # fmt: skip
            weight = bnb.nn.Params4bit(module.weight.data.cpu(), quant_type="nf4")
            packed.weight = weight.to(module.weight.device)
            packed.bias = module.bias
            model.base_model.layers.set_submodule(name, packed)
    model.is_loaded_in_4bit = True  # else peft takes its plain layer


def lora(sizes: Sizes) -> Iterator[tuple[str, Any]]:
    for name, shape in sizes.shapes.items():
        num_weights = num_weights_of(shape)
        for kind in KINDS:
            for loop, make in (("own", own_update), ("plain", plain_update)):
                key = f"{name} {kind} {loop}"
                try:
                    update = make(shape, kind, sizes)
                    yield key, speed(update, num_weights, sizes)
                    del update
                except ImportError as error:
                    yield key, {"left_out": str(error)}
                gc.collect()
                if sizes.device.type == "cuda":
                    torch.cuda.empty_cache()


LINES = {
    "one process": ["cluster=local", "compression=none"],
    "cut, free line": ["cluster=two_clouds", "cluster/wan=free", "compression=none"],
    "cut, 100 Mbit/s, INT4": [
        "cluster=two_clouds", "cluster/wan=office_100m", "compression=int4"
    ],
}  # fmt: skip


def cut(sizes: Sizes) -> Iterator[tuple[str, Any]]:
    name, shape = next(iter(sizes.shapes.items()))
    SHAPES.setdefault(name, dict(shape))
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder, "drawn")
        write_drawn(drawn, name, None)
        for number, (line, words) in enumerate(LINES.items()):
            run_dir = Path(folder, f"line{number}")
            command = [
                sys.executable, "run.py", "+exp=lora_clm", "tracker=none", *words,
                "model.own=null", f"model.checkpoint={drawn}", "model.weights=bfloat16",
                f"training.precision={sizes.precision}", "training.batch_size=32",
                f"training.max_steps={sizes.steps}", "training.optimizer.warmup_steps=1",
                "+task.num_dev=8", "+task.num_test=8", f"hydra.run.dir={run_dir}",
                f"cache_dir={folder}/cache",
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{line}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
            summary = json.loads((run_dir / "summary.json").read_text())
            yield (
                line,
                {key: summary[key] for key in ("tokens_per_s", "step_time_s", "bubble_ratio")},
            )


def kernels(sizes: Sizes) -> Iterator[tuple[str, Any]]:
    """Yield seconds, forward and backward, of torch's kernels and ours."""
    device = sizes.device
    dtype = torch.float32 if sizes.precision == "fp32" else torch.bfloat16
    shape = next(iter(sizes.shapes.values()))
    width = int(shape["hidden_size"])
    vocabulary = int(shape["vocab_size"])
    rows = torch.randn(sizes.tokens, width, device=device, dtype=dtype, requires_grad=True)
    words = torch.randn(vocabulary, width, device=device, dtype=dtype)
    labels = torch.randint(vocabulary, (sizes.tokens,), device=device)

    def own_loss() -> None:
        chunked_cross_entropy(rows, words, labels, chunk=8192).mean().backward()

    def dense_loss() -> None:
        F.cross_entropy(F.linear(rows, words).float(), labels).backward()

    losses = {"loss, ours": own_loss, "loss, all logits at once": dense_loss}
    if hasattr(F, "linear_cross_entropy"):

        def torch_loss() -> None:
            F.linear_cross_entropy(rows, words, labels).backward()

        losses["loss, linear_cross_entropy"] = torch_loss
    for name, loss in losses.items():
        yield name, {"s": median_s(loss, device)}

    heads = int(shape["num_attention_heads"])
    features = width // heads
    num_documents = 8
    length = sizes.tokens // num_documents
    q, k, v = (
        torch.randn(sizes.tokens, heads, features, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )

    def grouped() -> None:
        parts = (x.view(num_documents, length, heads, features).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*parts, is_causal=True)
        out.sum().backward()  # type: ignore[no-untyped-call]

    yield "attention, in groups of equal length", {"s": median_s(grouped, device)}
    if device.type != "cuda":
        yield "attention, varlen_attn", {"left_out": "it needs a GPU"}
        return
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.arange(0, sizes.tokens + 1, length, device=device, dtype=torch.int32)

    def varlen() -> None:
        out = varlen_attn(q, k, v, ends, ends, length, length, window_size=(-1, 0))
        cast(Tensor, out).sum().backward()  # type: ignore[no-untyped-call]

    yield "attention, varlen_attn", {"s": median_s(varlen, device)}


def codecs(sizes: Sizes) -> Iterator[tuple[str, Any]]:
    """Yield GB of a bf16 tensor a second, packed and unpacked."""
    given = torch.randn(sizes.rows, sizes.features, device=sizes.device).bfloat16()
    num_gb = given.numel() * given.element_size() / 1e9
    spec = TensorSpec.of(given)
    for codec in (Cast("bfloat16"), BlockInt(8), BlockInt(4)):
        parts = codec.compress(given)
        pack_s = median_s(lambda codec=codec: codec.compress(given), sizes.device)  # type: ignore[misc]
        unpack_s = median_s(
            lambda codec=codec, parts=parts: codec.decompress(parts, spec),  # type: ignore[misc]
            sizes.device,
        )
        yield codec.label, {"pack_gb_per_s": num_gb / pack_s, "unpack_gb_per_s": num_gb / unpack_s}


def adamw(sizes: Sizes) -> Iterator[tuple[str, Any]]:
    """Yield seconds of an update of the smallest shape's LoRA, fused as it is built, and not."""
    stage = own_stage(next(iter(sizes.shapes.values())), "bfloat16", sizes.device)
    trained = [p for p in stage.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.randn_like(parameter)
    built = Optimizer().build(stage)
    plain = torch.optim.AdamW(trained, lr=1e-4, fused=False, foreach=False)
    for name, optimizer in (("as built", built), ("a tensor at a time", plain)):
        figure = {"s": median_s(optimizer.step, sizes.device)}
        yield f"AdamW, {name}", {**figure, "fused": bool(optimizer.defaults["fused"])}


def copies(sizes: Sizes) -> Iterator[tuple[str, Any]]:
    """Yield seconds of a frame that leaves the device, as it does today, and through pinned memory
    on a stream of its own; and of both beside products that take about as long."""
    device = sizes.device
    rows = torch.randn(sizes.rows, sizes.features, device=device)
    key = MessageKey(Kind.ACTIVATION, step=1, micro_batch=0)
    frame_s = median_s(lambda: encode_frame(key, parts=(rows,), sequence=1), device)
    num_gb = rows.numel() * rows.element_size() / 1e9
    yield "a frame, as today", {"s": frame_s, "gb_per_s": num_gb / frame_s}
    if device.type != "cuda":
        yield "a frame, pinned, on a stream of its own", {"left_out": "it needs a GPU"}
        return
    pinned = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    stream = torch.cuda.Stream()

    def copy() -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            pinned.copy_(rows, non_blocking=True)
        rows.record_stream(stream)

    pinned_s = median_s(copy, device)
    yield "a frame, pinned, on a stream of its own", {"s": pinned_s, "gb_per_s": num_gb / pinned_s}
    square = torch.randn(sizes.features, sizes.features, device=device)
    product_s = median_s(lambda: rows @ square, device)
    num_products = max(1, round(frame_s / product_s))

    def compute() -> None:
        for _ in range(num_products):
            rows @ square

    def beside(leave: Callable[[], object]) -> Callable[[], None]:
        def both() -> None:
            leave()
            compute()

        return both

    computing_s = median_s(compute, device)
    today_s = median_s(beside(lambda: encode_frame(key, parts=(rows,), sequence=1)), device)
    apart_s = median_s(beside(copy), device)
    yield "products alone", {"s": computing_s}
    for name, both_s, alone_s in (("today", today_s, frame_s), ("pinned", apart_s, pinned_s)):
        hidden = (computing_s + alone_s - both_s) / alone_s
        yield f"products and a frame, {name}", {"s": both_s, "share_hidden": hidden}


def tests(sizes: Sizes) -> Iterator[tuple[str, Any]]:
    if sizes.device.type != "cuda":
        yield "pytest -m gpu", {"left_out": "they need a GPU"}
        return
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    yield "pytest -m gpu", {"exit": done.returncode, "said": done.stdout.strip().splitlines()[-3:]}
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:])


def bars(table: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each bar with the share that was reached, as far as both of its figures are there."""
    lora = table.get("lora", {})
    cut = table.get("cut", {})
    own = {f"{key} / plain": (lora[key], lora.get(f"{key[:-4]} plain"), 0.8)
           for key in lora if key.endswith(" own")}  # fmt: skip
    one, free, slow = (cut.get(line) for line in LINES)
    wanted = {**own, "cut / one process": (free, one, 0.85), "INT4 / free": (slow, free, 0.9)}
    for name, (figure, beside, at_least) in wanted.items():
        if figure and beside and "tokens_per_s" in figure and "tokens_per_s" in beside:
            share = figure["tokens_per_s"] / beside["tokens_per_s"]
            yield name, {"share": share, "at_least": at_least, "holds": share >= at_least}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="write all figures here")
    parser.add_argument("--toy", action="store_true", help="toy shapes, on a CPU")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS)
    given = parser.parse_args()
    sizes = sizes_of(given.toy)
    torch.manual_seed(0)
    table: dict[str, Any] = {**ran_on(), "is_toy": given.toy, "tokens": sizes.tokens}
    if sizes.device.type == "cuda":
        table["gpu"] = torch.cuda.get_device_name()
    failed = []
    parts = dict(zip(PARTS, (tests, lora, cut, kernels, codecs, adamw, copies), strict=True))
    for name in given.parts:
        began_at_s = time.perf_counter()
        figures = table[name] = dict[str, Any]()
        try:
            for key, figure in parts[name](sizes):
                figures[key] = figure
                print(f"{name}: {key}: {json.dumps(figure)}", flush=True)
                given.json.write_text(json.dumps(table, indent=1) + "\n")
        except Exception as error:  # the other parts are worth their minutes
            failed.append(name)
            figures["failed"] = f"{type(error).__name__}: {error}"
            print(f"{name}: {figures['failed']}", flush=True)
        figures["took_s"] = time.perf_counter() - began_at_s
        given.json.write_text(json.dumps(table, indent=1) + "\n")
    table["bars"] = dict(bars(table))
    for name, bar in table["bars"].items():
        print(f"bar: {name}: {json.dumps(bar)}", flush=True)
    given.json.write_text(json.dumps(table, indent=1) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
