#!/bin/sh
# Every run of this study: experiments/one_way/run.sh DATA_DIR OUT_DIR, two quiet cores, some hours.
# DATA_DIR: wiki_paragraphs/train.LANG.jsonl.gz (text) and xnli/{dev,test}.LANG.tsv.gz.
set -eu
data=$1 out=$2
export OMP_NUM_THREADS=1
mkdir -p "$out"

# Throughput across clouds over one cloud, sides in turn; parts of fixed speed, then the demo's own.
python -m benchmarks.bench_feed --steps 100 --rounds 3 --json "$out/paced.json" \
    model.work=0 model.rows=700 model.step_s=0.15 'model.batch_s={one: 0.1, two: 0.1}'
python -m benchmarks.bench_feed --exp electra_multilingual --steps 100 --rounds 3 \
    --json "$out/electra.json"

# Loss curves of one cloud and three: equal in every digit.
python run.py -m +exp=electra_multilingual cluster=one_cloud,feed seed=1,2,3 sweep=curves \
    training.max_steps=30 tracker=none

# Two generators, one for each language, against one that has both.
python run.py +exp=electra_multilingual cluster=local tracker=none training.max_steps=600 \
    hydra.run.dir="$out/two_generators"
python run.py +exp=electra_multilingual cluster=local tracker=none training.max_steps=600 \
    '~cluster.clouds.cloud_b' '~model.generators.cloud_b' \
    'model.generators.cloud_a.languages=[es,en]' hydra.run.dir="$out/one_generator"

# More ranks of the discriminator: by simulation, and as far as this machine tells.
python -m benchmarks.feed_scaling --inside-gbit 10 25 100
for ranks in 1 2; do
    python run.py +exp=electra_multilingual cluster=one_cloud tracker=none training.max_steps=60 \
        cluster.clouds.discriminator.num_ranks=$ranks hydra.run.dir="$out/ranks_$ranks"
done

# Real text: a small encoder pre-trained on paragraphs of four languages, and the same after one
# step, each fine-tuned on English pairs.
python -m xcloud.train_tokenizer "$data/wiki_paragraphs" --languages en es de fr \
    --vocab-size 8000 --out "$out/tokenizer.json"
for steps in 1 4000; do
    python run.py +exp=electra_multilingual profile=files cluster=local tracker=none \
        model.text.source.path="$data/wiki_paragraphs" \
        model.text.tokenizer.path="$out/tokenizer.json" \
        'model.generators.cloud_a.languages=[es,fr]' 'model.generators.cloud_b.languages=[en,de]' \
        model.discriminator.backbone.hidden=128 model.discriminator.backbone.feed_forward=512 \
        training.max_steps=$steps hydra.run.dir="$out/pretrained_$steps"
    python run.py +exp=xnli_zero_shot profile=files tracker=none training.max_steps=1000 \
        task.tokenizer.name_or_path="$out/pretrained_$steps/model/discriminator" \
        task.path="$data/xnli" 'task.languages=[en,es,de,fr]' hydra.run.dir="$out/xnli_$steps"
done
