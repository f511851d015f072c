#!/bin/sh
# Every run of this study: experiments/one_way/run.sh DATA_DIR OUT_DIR, two quiet cores, some hours.
# DATA_DIR: wiki_paragraphs, tatoeba_es_en and xnli, as prepare_text.py and task.path name their files.
set -eu
data=$1 out=$2
export OMP_NUM_THREADS=1
mkdir -p "$out"
seeded='{_target_: xcloud.models.backbone.SeededBackbone, hidden: 128, num_layers: 2, num_heads: 4, feed_forward: 512, dropout: 0.1}'
demo="+exp=electra_multilingual tracker=none follow_up=[]"

# Throughput across clouds over one cloud, sides in turn; parts of fixed speed, then the demo's own.
python -m benchmarks.bench_one_way --steps 100 --rounds 3 --json "$out/paced.json" \
    model.work=0 model.rows=700 model.step_s=0.15 'model.batch_s={one: 0.1, two: 0.1}'
python -m benchmarks.bench_one_way --exp electra_multilingual --steps 100 --rounds 3 \
    --json "$out/electra.json"

# Loss curves of one cloud and three: equal in every digit.
python run.py -m +exp=electra_multilingual cluster=one_cloud,one_way seed=1,2,3 sweep=curves \
    training.max_steps=30 tracker=none

# More ranks of the discriminator: by simulation, and parts of fixed speed.
python -m benchmarks.one_way_scaling --inside-gbit 10 25 100
for ranks in 1 2 4; do
    python -m benchmarks.bench_one_way --mbit 100 --steps 40 --rounds 3 --json "$out/ranks_$ranks.json" \
        model.work=0 model.rows=700 model.step_s=0.3 'model.batch_s={one: 0.2, two: 0.2}' \
        cluster.clouds.consumer.num_ranks=$ranks cluster.clouds.one.num_ranks=$ranks \
        cluster.clouds.two.num_ranks=$ranks training.batches_per_step=$((2 * ranks))
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

# Real text, Spanish and English: a discriminator from drawn weights before and after pre-training,
# each fine-tuned on English pairs. From MiniLM: python -m xcloud reproduce xnli
python -m experiments.one_way.prepare_text "$data" "$out/text"
python -m xcloud train-tokenizer "$out/text" --languages en es --vocab-size 6000 \
    --out "$out/tokenizer.json"
real="$demo profile=files cluster=local model.text.source.path=$out/text model.text.max_length=64
    model.generators.cloud_a.pairs=[en-es] model.generators.cloud_a.mask_share=0.2
    model.generators.cloud_b.mask_share=0.2"
for steps in 1 1500; do
    python run.py $real model.text.tokenizer.path="$out/tokenizer.json" \
        model.generators.cloud_a.batch_size=64 model.generators.cloud_b.batch_size=64 \
        model.discriminator.backbone.hidden=128 model.discriminator.backbone.num_layers=2 \
        model.discriminator.backbone.feed_forward=512 \
        training.max_steps=$steps hydra.run.dir="$out/real_$steps"
done
xnli="+exp=xnli_zero_shot profile=files tracker=none task.path=$data/xnli task.languages=[en,es]
    task.max_length=64"
for seed in 1 2; do
    for from in real_1 real_1500; do
        python run.py $xnli seed=$seed training.max_steps=500 training.optimizer.warmup_steps=50 \
            task.tokenizer.name_or_path="$out/$from/model/discriminator" \
            hydra.run.dir="$out/xnli_${from}_$seed"
    done
done
