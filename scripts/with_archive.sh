#!/bin/sh
# Runs a command in a checkout with the libraries of an archive of pack_cuda.py, on a machine where nothing is built:
#   scripts/with_archive.sh spark.tar.xz python3 -m pytest tests/cuda
# Unpacks into a folder in /tmp unless that has been done.
set -eu
archive=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
unpacked=/tmp/spark-unpacked
done=$unpacked/.done-$(cksum <"$archive" | cut -d' ' -f1)
if [ ! -e "$done" ]; then
    rm -rf "$unpacked"
    mkdir -p "$unpacked"
    xz -dc -T0 "$archive" | tar -x -C "$unpacked"
    touch "$done"
fi
ln -sfn "$unpacked/spark/pyspark_moe/lib" "$root/pyspark_moe/lib"
export PYTHONPATH="$root:$unpacked/spark/site${PYTHONPATH:+:$PYTHONPATH}"
cuda=$(python3 -c 'import glob, sysconfig; print(":".join(glob.glob(sysconfig.get_path("purelib") + "/nvidia/c*/lib")))')
export LD_LIBRARY_PATH="${cuda:+$cuda:}${LD_LIBRARY_PATH:-}"
exec "$@"
