#!/usr/bin/env bash
# Packages the published crates, and checks that they compile from the packaged files alone, with the features that docs.rs builds.
# `cargo publish --dry-run --workspace` would verify this by building the kernels again, which takes minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
rm -rf "$target/package"
cargo publish --quiet --locked --dry-run --workspace --no-verify --allow-dirty

unpacked=$target/package/unpacked
mkdir "$unpacked"
printf '[workspace]\nmembers = ["*"]\nresolver = "3"\n' >"$unpacked/Cargo.toml"
# The workspace's profiles, so that dependencies which its lints compiled are used again.
sed -n '/^\[profile\.dev/,/^$/p' Cargo.toml >>"$unpacked/Cargo.toml"
echo '[patch.crates-io]' >>"$unpacked/Cargo.toml"
cp Cargo.lock "$unpacked"
for crate in "$target"/package/tmp-crate/*.crate; do
    # -m: packaged files have one fixed time, at which cargo would take another version's build for this one's.
    tar -xmf "$crate" -C "$unpacked"
    name=$(basename "$crate" .crate)
    # A link that was checked out or committed as a file has the path instead of the text.
    for licence in LICENSE-*; do
        cmp "$licence" "$unpacked/$name/$licence" || { echo "$name: $licence is not the licence's text; make it a link to ../$licence" >&2; exit 1; }
    done
    echo "${name%-*} = { path = \"$name\" }" >>"$unpacked/Cargo.toml"
    du -h "$crate"
done
cargo check --offline --manifest-path "$unpacked/Cargo.toml" --target-dir "$target" -p foretoken -p foretoken-server --features foretoken/constraint,foretoken/hub,foretoken/stream,foretoken/cuda-prebuilt,foretoken/metal
