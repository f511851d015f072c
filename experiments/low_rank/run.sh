#!/bin/sh
# The runs of this study: experiments/low_rank/run.sh CORPORA_DIR DATA_DIR, some hours on two cores.
# CORPORA_DIR: sst2/, qnli/ and squad_v1/ with train and dev.
set -eu
corpora=$1 data=$2
export OMP_NUM_THREADS=1
python experiments/low_rank/prepare.py "$corpora" "$data"

common="profile=files training.precision=bf16 training.max_steps=250 training.evaluate_every=250
    training.optimizer.warmup_steps=25 training.eval_batch_size=250 schedule.num_micro_batches=1
    cluster/wan=free hydra.launcher.parallel=2"
few="model.split.method=pca compression=low_rank_few_bits_u_shape hydra.launcher.also=null"
rate=compression.default.backward.toprows.rate

sweep() { # task longest-text layers ranks head-rank scored
    task="+exp=bert_split_$1 task.path=$data/$1 task.max_length=$2 training.eval_samples=$6 $common"
    python run.py -m $task model.split.layer=$3 model.split.rank=$4 seed=1,2,3 sweep=$1
    python run.py -m $task model.split.layer=$3 model.split.rank=96 $few $rate=0.5 seed=1,2,3 sweep=$1_96
    python run.py -m $task model.split.layer=4 model.split.rank=16 model.split.head_rank=$5 \
        $few $rate=0.3 seed=1,2,3 sweep=$1_high
    python -m xcloud report $1 $1_96
}
sweep sst2 40 0,1,2,3,4,5 8,16,32 8 null
python run.py -m +exp=bert_split_sst2 task.path=$data/sst2 task.max_length=40 $common \
    model.split.layer=0,2,4 model.split.rank=112 $few $rate=0.19 seed=1,2,3 sweep=sst2_112
sweep qnli 80 0,2,4 8 32 4000

squad="+exp=bert_split_squad profile=files task.path=$corpora/squad_v1 task.max_length=192
    task.stride=64 task.max_question=32 task.max_eval_samples=600 training.precision=bf16
    training.max_steps=300 training.batch_size=16 training.evaluate_every=0
    training.eval_batch_size=64 training.optimizer.warmup_steps=30
    training.optimizer.learning_rate=2e-4 schedule.num_micro_batches=1 seed=1"
python run.py $squad cluster=local model.split.layer=null
python run.py $squad cluster/wan=free model.split.layer=4 model.split.rank=8
python run.py $squad cluster/wan=free model.split.layer=4 model.split.rank=96 \
    model.split.method=pca model.split.head_rank=96 compression=low_rank_few_bits
python run.py $squad cluster/wan=free model.split.layer=4 model.split.rank=96 \
    model.split.method=pca model.split.head_rank=32 compression=low_rank_few_bits_u_shape
