#!/usr/bin/env bash
# Compare two compressors over two seeds, one job of Slurm a point; the table is printed at the end.
#
#   examples/sweep_on_slurm.sh [SETTING=VALUE[,VALUE] ...]
#
# Needs `pip install "xcloud[slurm]"` and a clone on a folder that all nodes share. Jobs outlive
# this command, and the same command follows them. Without a cluster add hydra.launcher.on=here.
set -euo pipefail
python "$(dirname "$0")/../run.py" -m +exp=abnet_iwslt compression=none,int8 seed=1,2 sweep=example \
    hydra.launcher.on=slurm hydra.launcher.parallel=4 'hydra.launcher.job={timeout_min: 60}' "$@"
