#!/usr/bin/env bash
# Tatoeba es->en: ABNet-Local, ABNet-Cloud uncompressed, ABNet-Cloud INT8 both ways.
# usage: experiments/real_text/run.sh CORPUS_DIR OUT_DIR [seed]     (CORPUS_DIR holds train.tsv.gz ...)
set -euo pipefail
cd "$(dirname "$0")/../.."
corpus=$1 out=$2 seed=${3:-1}
common=(+exp=abnet_iwslt profile=files "task.path=$corpus" task.source=es task.target=en "seed=$seed"
        task.source_tokenizer.vocab_size=4000 task.target_tokenizer.vocab_size=4000
        model.encoder.hidden=128 model.decoder.hidden=128
        model.encoder.feed_forward=512 model.decoder.feed_forward=512
        model.encoder.pretraining.steps=1500 model.decoder.pretraining.steps=1500
        model.encoder.pretraining.batch_tokens=1024 model.decoder.pretraining.batch_tokens=1024
        model.dropout=0.0 training.max_steps=1500 training.optimizer.learning_rate=4e-3 training.precision=fp32)
export OMP_NUM_THREADS=1   # the same arithmetic order in one process as in two
run() { .venv/bin/python run.py "${common[@]}" "hydra.run.dir=$out/$1-s$seed" "${@:2}" > "$out/$1-s$seed.log" 2>&1; }
mkdir -p "$out"
run none   cluster=two_clouds compression=none
run local  cluster=local      compression=none
run int8   cluster=two_clouds compression=int8
