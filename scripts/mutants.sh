#!/bin/sh
# Mutation testing: applies ten mutants, one at a time, and runs the test that must fail on each.
#
#     scripts/mutants.sh                    # every patch in scripts/mutants/
#     scripts/mutants.sh 04 10              # those whose names start with these prefixes
#
# The header of a patch gives the defect, the test (arguments of cargo test, the last one its name) and, on a line `Needs`,
# the processor feature without which the test does not run the code. The mutants are applied in a clone of HEAD under
# target/mutants, with its own target directory, which the first run fills: the working tree is not touched, and
# uncommitted changes are not tested. If interrupted, it leaves a mutant in the clone, which the next run resets.
# The package under test is compiled incrementally and with few optimizations, so a mutant takes seconds instead of minutes.
#
# Fails if a test fails without the mutant, or if a mutant does not apply, does not compile or survives.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
tree=$root/target/mutants/tree log=$root/target/mutants/log
export CARGO_TARGET_DIR="$root/target/mutants/target"

patches=
for prefix in "${@:-}"; do
    found=$(find "$root/scripts/mutants" -name "$prefix*.patch" | sort)
    [ -n "$found" ] || { echo "mutants.sh: no patch in scripts/mutants starts with $prefix" >&2; exit 2; }
    patches="$patches $found"
done

mkdir -p "$root/target/mutants"
[ -d "$tree/.git" ] || git clone --quiet --shared --no-checkout "$root" "$tree"
git -C "$tree" fetch --quiet "$root" HEAD
git -C "$tree" checkout --quiet --force --detach FETCH_HEAD
git -C "$root" diff --quiet HEAD || echo "mutants.sh: uncommitted changes are not tested" >&2
cd "$tree"

field() {
    sed -n "s/^$1: //p" "$2"
}

# Runs a test, given as in the header of a patch, and prints `passed`, `failed`, `does not compile` or `does not run`.
outcome() {
    name=${1##* } target=${1% *}
    profile=${target#-p } && profile=profile.release.package.${profile%% *}
    set -- test --release --config "$profile.opt-level=1" --config "$profile.incremental=true"
    # shellcheck disable=SC2086  # the words of $target are arguments
    if ! cargo "$@" $target --no-run >"$log" 2>&1; then
        echo "does not compile"
    elif cargo "$@" $target -- --exact "$name" >"$log" 2>&1 && grep -q "^test $name \.\.\. ok" "$log"; then
        echo passed
    elif grep -q "^test $name \.\.\. FAILED" "$log"; then
        echo failed
    else
        echo "does not run"
    fi
}

# shellcheck disable=SC2086  # paths under the repository, one per word
sed -n 's/^Test: //p' $patches | sort -u >"$log.tests"
while read -r test; do
    result=$(outcome "$test" </dev/null)
    if [ "$result" != passed ]; then
        tail -n 40 "$log" >&2
        echo "mutants.sh: without a mutant, \`cargo test --release $test\` $result" >&2
        exit 1
    fi
done <"$log.tests"

survivors=0
printf '%-20s %-16s %7s  %-26s %-66s %s\n' patch outcome seconds file test defect
for patch in $patches; do
    name=$(basename "$patch" .patch) test=$(field Test "$patch") needs=$(field Needs "$patch")
    if [ -n "$needs" ] && ! grep -qw "$needs" /proc/cpuinfo 2>/dev/null; then
        echo "skipped: $name: this processor has no $needs"
        continue
    fi
    start=$(date +%s)
    if git apply "$patch" 2>"$log"; then
        result=$(outcome "$test")
    else
        result="does not apply"
    fi
    git checkout --quiet --force -- .
    case $result in
        failed) result=caught ;;
        passed) result=SURVIVED ;;
    esac
    [ "$result" = caught ] || { survivors=$((survivors + 1)); tail -n 20 "$log" >&2; }
    file=$(sed -n 's#^+++ b/##p' "$patch")
    printf '%-20s %-16s %7d  %-26s %-66s %s\n' \
        "$name" "$result" $(($(date +%s) - start)) "$file" "${test#*--test }" "$(field Defect "$patch")"
done
[ "$survivors" -eq 0 ] || { echo "mutants.sh: $survivors mutants survived" >&2; exit 1; }
