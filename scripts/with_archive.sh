#!/bin/sh
# Runs a command in a checkout with the libraries of an archive of pack_cuda.py, on a machine where nothing is built:
#   scripts/with_archive.sh spark.tar.xz python3 -m pytest tests/cuda
# Unpacks into $SPARK_UNPACKED (default: a folder in /tmp) unless that has been done.
set -eu
archive=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
unpacked=${SPARK_UNPACKED:-/tmp/spark-unpacked}
if [ ! -e "$unpacked/.done-$(cksum <"$archive" | cut -d' ' -f1)" ]; then
    rm -rf "$unpacked"
    mkdir -p "$unpacked"
    xz -dc -T0 "$archive" | tar -x -C "$unpacked"
    touch "$unpacked/.done-$(cksum <"$archive" | cut -d' ' -f1)"
fi
ln -sfn "$unpacked/spark/pyspark_moe/lib" "$root/pyspark_moe/lib"
export PYTHONPATH="$root:$unpacked/spark/site${PYTHONPATH:+:$PYTHONPATH}"
cuda=$(python3 -c 'import glob, sysconfig; print(":".join(glob.glob(sysconfig.get_path("purelib") + "/nvidia/c*/lib")))')
export LD_LIBRARY_PATH="${cuda:+$cuda:}${LD_LIBRARY_PATH:-}"
exec "$@"
