#!/bin/bash
# One conversion by many tasks of a Slurm array, each of which runs `wherry work`. The first one commits.
#   wherry split SOURCE TARGET --to dcp
#   sbatch --array=0-15 infra/units/slurm.sh TARGET
# All nodes need the same WHERRY_KEY: sbatch passes it on from the shell, or they share WHERRY_HOME. A task that is
# preempted is queued again, and its unit is made by another one meanwhile.
#SBATCH --job-name=wherry-work
#SBATCH --cpus-per-task=4
#SBATCH --mem=2G
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@30
set -euo pipefail
target=${1:?usage: sbatch --array=0-15 slurm.sh TARGET}
ending=0 code=0
wherry work "$target" &
# The signal comes to this shell, which does not pass it on by itself; the worker then gives its unit back.
trap 'ending=1; kill -TERM $!' TERM
wait $! || code=$?
if [ "$ending" = 1 ]; then code=0; wait $! || code=$?; exit "$code"; fi
trap - TERM
if [ "$code" = 3 ]; then exec wherry verify "$target" --level structure; fi # committed meanwhile
if [ "$code" != 0 ]; then exit "$code"; fi
if [ "${SLURM_ARRAY_TASK_ID:-0}" = "${SLURM_ARRAY_TASK_MIN:-0}" ]; then exec wherry commit "$target"; fi
