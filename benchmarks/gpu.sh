#!/usr/bin/env bash
# Everything that needs a GPU, in ten minutes: the tests, compute-sanitizer on the compaction, the benchmarks of all ops.
#   benchmarks/gpu.sh            results go to $OUT, or to benchmarks/results/<gpu>
# Each part has its own time limit; a part that is skipped says why, one that fails does not stop the next. The exit code
# is 0 when no part failed, 1 when one did, 2 when nothing could run. Variables: OUT, PYTHON (python3).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
DEADLINE=$((SECONDS + 600))
failed=()

gpu=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")') || {
  echo "gpu.sh: torch cannot be imported by $PYTHON: set PYTHON, or run 'make setup'" >&2
  exit 2
}
if [ -z "$gpu" ]; then
  echo "gpu.sh: no GPU that torch can use; nothing was run, nothing was written" >&2
  exit 2
fi
slug=$(tr -c 'a-z0-9\n' '-' <<<"${gpu,,}" | tr -s -)
results=benchmarks/results/${slug%-}  # where the benchmarks save
OUT=${OUT:-$results}
mkdir -p "$OUT" "$results" || exit 2
echo "$gpu; results in $OUT"

# part NAME SECONDS COMMAND...: run it within its limit and the script's; keep its output in $OUT/NAME.log.
part() {
  local name=$1 limit=$2 left=$((DEADLINE - SECONDS)) start=$SECONDS status
  shift 2
  if ((left < 10)); then
    echo "== $name: skipped, the ten minutes are over"
    return
  fi
  timeout --kill-after=15 $((limit < left ? limit : left)) "$@" >"$OUT/$name.log" 2>&1
  status=$?
  case $status in
    0) echo "== $name: passed, $((SECONDS - start)) s" ;;
    124 | 137) echo "== $name: stopped after $((SECONDS - start)) s" && failed+=("$name") ;;
    *) echo "== $name: failed ($status), $((SECONDS - start)) s" && failed+=("$name") ;;
  esac
  tail -n 40 "$OUT/$name.log"
}

# The limits add up to the ten minutes. Most of the tests' time is compiling, so they share the cores where they can.
workers=()
"$PYTHON" -c 'import xdist' 2>/dev/null && workers=(-n 8)
part tests 180 "$PYTHON" -m pytest -q "${workers[@]}" -m gpu tests
if ! command -v compute-sanitizer >/dev/null; then
  echo "== sanitizer: skipped, there is no compute-sanitizer on the PATH"
else
  part sanitizer 60 compute-sanitizer --error-exitcode 1 "$PYTHON" -m pytest -q -m gpu tests/ops/test_kv_compact.py
fi
benches=(benchmarks/bench_*.py)
for file in "${benches[@]}"; do
  op=$(basename "${file#benchmarks/bench_}" .py)
  part "bench_$op" $((360 / ${#benches[@]})) "$PYTHON" -m specdec_kernels.cli bench "$op" --device cuda --seconds 0.05 --save
done
[ "$OUT" -ef "$results" ] || cp "$results"/* "$OUT"/

if ((${#failed[@]})); then
  echo "failed: ${failed[*]}"
  exit 1
fi
