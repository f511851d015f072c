"""Teach a model by DPO which of two answers to prefer, over two clouds.

    python examples/dpo.py [SETTING=VALUE ...]

With a model and pairs of your own, in the form that TRL reads:
    profile=files model.checkpoint=DIR task.data.path=DIR
"""

import sys

import xcloud

result = xcloud.run("dpo_reviews", "task.beta=0.1", *sys.argv[1:])

for name, score in result.scores.items():
    print(f"{name}: {score:.3f}")
print(f'Try it: python -m xcloud generate {result.folder} "the first half"')
