#!/bin/sh
# Every run of this study: experiments/one_way/run.sh DATA_DIR OUT_DIR, two quiet cores, some hours.
# DATA_DIR: wiki_paragraphs/train.LANG.jsonl.gz (text) and xnli/{dev,test}.LANG.tsv.gz.
set -eu
data=$1 out=$2
export OMP_NUM_THREADS=1
mkdir -p "$out"
seeded='{_target_: xcloud.models.backbone.SeededBackbone, hidden: 128, num_layers: 2, num_heads: 4, feed_forward: 512, dropout: 0.1}'
demo="+exp=electra_multilingual tracker=none follow_up=[]"

# Throughput across clouds over one cloud, sides in turn; parts of fixed speed, then the demo's own.
python -m benchmarks.bench_feed --steps 100 --rounds 3 --json "$out/paced.json" \
    model.work=0 model.rows=700 model.step_s=0.15 'model.batch_s={one: 0.1, two: 0.1}'
python -m benchmarks.bench_feed --exp electra_multilingual --steps 100 --rounds 3 \
    --json "$out/electra.json"

# Loss curves of one cloud and three: equal in every digit.
python run.py -m +exp=electra_multilingual cluster=one_cloud,feed seed=1,2,3 sweep=curves \
    training.max_steps=30 tracker=none

# More ranks of the discriminator: by simulation; parts of fixed speed; and what this machine tells.
python -m benchmarks.feed_scaling --inside-gbit 10 25 100
for ranks in 1 2 4; do
    python -m benchmarks.bench_feed --mbit 100 --steps 40 --rounds 3 --json "$out/ranks_$ranks.json" \
        model.work=0 model.rows=700 model.step_s=0.3 'model.batch_s={one: 0.2, two: 0.2}' \
        cluster.clouds.consumer.num_ranks=$ranks cluster.clouds.one.num_ranks=$ranks \
        cluster.clouds.two.num_ranks=$ranks training.batches_per_step=$((2 * ranks))
    python run.py $demo cluster=one_cloud training.max_steps=60 training.batches_per_step=4 \
        cluster.clouds.discriminator.num_ranks=$ranks hydra.run.dir="$out/demo_ranks_$ranks"
done

# Two generators, one for each language, against one that has both.
python run.py $demo cluster=local hydra.run.dir="$out/two_generators"
python run.py $demo cluster=local '~cluster.clouds.cloud_b' '~model.generators.cloud_b' \
    'model.generators.cloud_a.languages=[es,en]' hydra.run.dir="$out/one_generator"

# English inference pairs, tested in both languages, from: drawn weights; the network that the demo
# starts from; the same pre-trained; drawn weights pre-trained.
python run.py $demo cluster=local training.max_steps=1 hydra.run.dir="$out/start"
for steps in 1 1500; do
    python run.py $demo cluster=local training.max_steps=$steps '~model.discriminator.backbone' \
        "+model.discriminator.backbone=$seeded" hydra.run.dir="$out/drawn_$steps"
done
for seed in 1 2 3; do
    for from in drawn_1 start two_generators one_generator drawn_1500; do
        python run.py +exp=xnli_zero_shot tracker=none seed=$seed \
            task.tokenizer.name_or_path="$out/$from/model/discriminator" \
            hydra.run.dir="$out/xnli_${from}_$seed"
    done
done

# Real text: a small encoder pre-trained on paragraphs of four languages, and the same after one
# step, each fine-tuned on English pairs.
python -m xcloud.train_tokenizer "$data/wiki_paragraphs" --languages en es de vi \
    --vocab-size 8000 --out "$out/tokenizer.json"
for steps in 1 1000; do
    python run.py +exp=electra_multilingual profile=files cluster=local tracker=none \
        model.text.source.path="$data/wiki_paragraphs" model.text.max_length=64 \
        model.text.tokenizer.path="$out/tokenizer.json" \
        'model.generators.cloud_a.languages=[es,vi]' 'model.generators.cloud_b.languages=[en,de]' \
        model.generators.cloud_a.mask_share=0.3 model.generators.cloud_b.mask_share=0.3 \
        model.discriminator.backbone.hidden=128 model.discriminator.backbone.feed_forward=512 \
        training.max_steps=$steps hydra.run.dir="$out/pretrained_$steps"
    python run.py +exp=xnli_zero_shot profile=files tracker=none training.max_steps=500 \
        task.tokenizer.name_or_path="$out/pretrained_$steps/model/discriminator" \
        task.path="$data/xnli" 'task.languages=[en,es,de,vi]' task.max_length=64 \
        hydra.run.dir="$out/xnli_real_$steps"
done
