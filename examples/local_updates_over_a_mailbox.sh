#!/usr/bin/env bash
# Two owners fine-tune one model by local updates. They share a folder or a bucket, and no port is
# open anywhere. Here one machine plays both, each in a folder of its own below the current one.
#
#   examples/local_updates_over_a_mailbox.sh MAILBOX [SETTING=VALUE ...]
#
# MAILBOX: an empty folder, or s3://BUCKET/PREFIX (pip install "xcloud[bucket]"), gs://, abfs://
set -euo pipefail
mailbox=${1:?give an empty folder or the address of a bucket}
shift
run=$(dirname "$0")/../run.py
case $mailbox in *://*) ;; *) mkdir -p "$mailbox" && mailbox=$(realpath "$mailbox") ;; esac

# Each owner makes a key, once, and sends the other the .pem.
mkdir -p owner_a owner_b
python -m xcloud keys new cloud_a --peer cloud_b --folder owner_a
python -m xcloud keys new cloud_b --peer cloud_a --folder owner_b
cp owner_a/cloud_a.pem owner_b
cp owner_b/cloud_b.pem owner_a

# One of them writes the experiment and sends it.
python "$run" +exp=lora_clm strategy=local_updates strategy.averaging.every=20 compression=int4 \
    training.max_steps=60 cluster/wan=mailbox "cluster.wan.url=$mailbox" \
    tracker=none cache_dir="$PWD/cache" "$@" \
    --cfg job --resolve > owner_a/experiment.yaml
cp owner_a/experiment.yaml owner_b

# Each allows the mailbox and a place for caches, reads what the experiment asks for, and approves it.
for owner in owner_a owner_b; do
    echo "addresses: ['$mailbox']" >> $owner/policy.yaml
    echo "write: ['$PWD/cache']" >> $owner/policy.yaml
    (cd $owner && XCLOUD_POLICY=policy.yaml python -m xcloud approve --yes experiment.yaml)
done

# Each starts their own cloud; the record of the first one has the scores.
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
(cd owner_b && XCLOUD_POLICY=policy.yaml exec python -m xcloud join experiment.yaml --cloud cloud_b > join.log 2>&1) &
(cd owner_a && XCLOUD_POLICY=policy.yaml exec python -m xcloud join experiment.yaml --cloud cloud_a)
wait $!
