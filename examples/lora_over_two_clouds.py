"""Fine-tune a causal language model with LoRA, its lower blocks in one cloud, its upper ones in
another, in 8 bits each way over a line of 100 Mbit/s. Then make one folder of it for transformers.

    python examples/lora_over_two_clouds.py [SETTING=VALUE ...]

With a model and texts of your own:
    profile=files model.checkpoint=DIR task.data.path=DIR
"""

import subprocess
import sys

import xcloud

result = xcloud.run(
    "lora_clm",
    "compression=int8",
    "model.lora.r=8",
    "cluster/wan=office_100m",
    *sys.argv[1:],
)
print(f"perplexity {result.scores['perplexity']:.2f}, {result.bytes_per_step:,} bytes a step")

merged = f"{result.folder}/merged"
subprocess.run(
    [sys.executable, "-m", "xcloud", "export", str(result.folder), "--merge", "--out", merged],
    check=True,
)
