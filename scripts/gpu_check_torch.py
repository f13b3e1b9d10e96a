#!/usr/bin/env python3
"""PyTorch's side of scripts/gpu_check.sh: training steps of Hugging Face's Qwen3 by FSDP2 on one
device, layers compiled, f32 weights and moments, bf16 in between, on tokens made up: what
`qshard bench step` does. Prints one JSON document.
Usage: gpu_check_torch.py CONFIG.json --batch 4 --seq 2048 --repeats 10 [--device cpu]
       [--no-compile]
"""
import argparse
import json
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

WARM_UP = 3


def make_model(args, fields):
    model = Qwen3ForCausalLM(Qwen3Config(**fields, attn_implementation="sdpa")).to(args.device)
    options = {"mesh": init_device_mesh(args.device, (1,)),
               "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16,
                                                 reduce_dtype=torch.float32)}
    for layer in model.model.layers:
        if args.compile:
            layer.compile()
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def time_steps(args, fields):
    """Seconds of each step after the warm-up."""
    model = make_model(args, fields)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=True)
    loss_of = torch.nn.functional.cross_entropy
    if args.compile:
        loss_of = torch.compile(loss_of)
    tokens = torch.randint(fields["vocab_size"], (args.batch, args.seq + 1), device=args.device)
    seconds = []
    for _ in range(WARM_UP + args.repeats):
        begin = time.perf_counter()
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = loss_of(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        if args.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds[WARM_UP:]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_check_torch: PyTorch sees no GPU: use --device cpu")
    with open(args.config) as file:
        fields = json.load(file)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo", rank=0, world_size=1,
                                init_method=f"file://{folder}/meet")
        seconds = time_steps(args, fields)
        memory = torch.cuda.max_memory_allocated() if args.device == "cuda" else None
        dist.destroy_process_group()
    median = statistics.median(seconds)
    print(json.dumps({"torch": torch.__version__, "compiled": args.compile,
                      "step_ms": median * 1e3, "tokens_per_s": args.batch * args.seq / median,
                      "lowest_ms": min(seconds) * 1e3, "highest_ms": max(seconds) * 1e3,
                      "memory_peak_bytes": memory}, indent=1))


if __name__ == "__main__":
    main()
