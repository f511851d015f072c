"""Run an experiment: python run.py +exp=abnet_iwslt

Several at once:    python run.py -m +exp=abnet_iwslt compression=none,int8 seed=1,2
Resume one:         python run.py resume=outputs/DATE/TIME [training.max_steps=N]
From Python:        xcloud.run("abnet_iwslt", "compression=int8")
"""

import sys

from xcloud.base.terminal import prepare_process
from xcloud.entry import main

if __name__ == "__main__":
    prepare_process()
    main(sys.argv[1:])
