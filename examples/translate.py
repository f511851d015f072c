"""Train a translator over two clouds: one reads Spanish text, the other writes English.

python examples/translate.py [SETTING=VALUE ...]
"""

import sys

import xcloud

result = xcloud.run("abnet_iwslt", "compression=int8", *sys.argv[1:])

print(f"BLEU {result.scores['bleu']:.2f}, in a step of {result.step_s:.3f} s")
print(f"{result.bytes_per_step:,} bytes a step, {result.compression_ratio:.2f} times fewer")
print(f'Try it: python -m xcloud translate {result.folder} "El gato duerme."')
