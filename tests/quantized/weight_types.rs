//! Every weight type: blocks decoded like PyPI's gguf, and files that have them.

use std::path::Path;
use std::process::Command;

use foretoken::checkpoint::convert::{Outtype, ToGgufOptions, to_gguf};
use foretoken::checkpoint::gguf::{Gguf, GgufWriter};
use foretoken::checkpoint::quantize::{Mix, QuantizeOptions, Rules, quantize};
use foretoken::checkpoint::{Checkpoint, LoadOptions};
use foretoken::gemma4::Target;
use foretoken::{ElementType, Isa, Model, OutputRows, WeightType};
use foretoken_kernels::quant::{dequantize_row, quantize_row};
use half::f16;

use crate::cases::{cache, pass, values};
use crate::skipped;

/// Random bytes (splitmix64).
fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    };
    (0..len).map(|_| next() as u8).collect()
}

/// PyPI's name.
fn name(of: WeightType) -> String {
    of.name().to_ascii_uppercase()
}

/// PyPI's `gguf`, if installed, gives random blocks the same values, bit for bit. There are enough
/// of them for every grid index.
#[test]
fn blocks_have_the_values_of_another_reader() {
    let python = |arguments: &[&std::ffi::OsStr]| Command::new("python3").args(arguments).output();
    if !python(&["-c".as_ref(), "import gguf".as_ref()]).is_ok_and(|output| output.status.success()) {
        return skipped::skipped("gguf in Python", "it is not installed (pip install gguf numpy)");
    }
    let directory = tempfile::tempdir().expect("a directory");
    let blocks = |of: WeightType| random_bytes(of.ggml_id().into(), 1024 * of.block_bytes());
    for of in WeightType::ALL {
        std::fs::write(directory.path().join(format!("{}.blocks", name(of))), blocks(of)).expect("written");
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/dequantize.py");
    let output = python(&[script.as_ref(), directory.path().as_ref()]).expect("python3");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for of in WeightType::ALL {
        let want = std::fs::read(directory.path().join(format!("{}.values", name(of)))).expect("written");
        let want: Vec<f32> = want.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let mut got = vec![0.0; 1024 * of.block_len()];
        dequantize_row(of, &blocks(of), &mut got);
        assert_eq!(got.len(), want.len(), "{of:?}");
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
            assert!(same, "{of:?}, block {}, weight {}: {got}, not {want}", i / of.block_len(), i % of.block_len());
        }
    }
}

/// Replaces the scale of a block of a load-only type.
fn set_scale(of: WeightType, block: &mut [u8], scale: f32) {
    use WeightType::*;
    let half = f16::from_f32(scale).to_bits();
    match of {
        // Small numbers: their five upper bits are zero.
        NVFP4 => block[..4].iter_mut().for_each(|byte| *byte &= 7),
        IQ1_M => (0..4).for_each(|k| block[49 + 2 * k] = block[49 + 2 * k] & 15 | (half >> (4 * k) << 4) as u8),
        TQ1_0 => block[52..].copy_from_slice(&half.to_le_bytes()),
        TQ2_0 => block[64..].copy_from_slice(&half.to_le_bytes()),
        _ => block[..2].copy_from_slice(&half.to_le_bytes()),
    }
}

fn root_mean_square(x: &[f32]) -> f32 {
    (x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32).sqrt()
}

/// Rows of a type: the weights, or random ones of their magnitude for load-only types.
fn blocks_like(of: WeightType, weights: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; of.row_bytes(weights.len()).expect("whole blocks")];
    if of.is_written() {
        quantize_row(Isa::best(), of, weights, &mut bytes);
        return bytes;
    }
    let mut values = vec![0.0; weights.len()];
    bytes = random_bytes(1, bytes.len());
    for scale in [1.0, root_mean_square(weights)] {
        let scale = if scale == 1.0 { 1.0 } else { scale / root_mean_square(&values) };
        bytes.chunks_exact_mut(of.block_bytes()).for_each(|block| set_scale(of, block, scale));
        dequantize_row(of, &bytes, &mut values);
    }
    bytes
}

/// Writes `source` with a tensor of each type; also its values if `plain`.
fn write(source: &Gguf, path: &Path, types: &[(String, WeightType)], plain: bool) {
    let mut file = GgufWriter::create(path).expect("a writer");
    for key in source.keys() {
        file.copy(key, source.metadata(key).expect("a value")).expect("a key");
    }
    let of = |name: &str| types.iter().find(|(other, _)| other == name).map(|(_, of)| *of);
    for info in source.tensors() {
        let id = of(info.name()).filter(|_| !plain).map_or(info.type_id(), WeightType::ggml_id);
        file.tensor(info.name(), id, info.shape()).expect("a tensor");
    }
    let mut file = file.begin().expect("the tensors");
    for info in source.tensors() {
        let tensor = source.tensor(info.name()).expect("readable").expect("there");
        let Some(of) = of(info.name()) else {
            file.write(info.name(), tensor.bytes.as_slice()).expect("written");
            continue;
        };
        let chunks = tensor.bytes.as_slice().as_chunks().0;
        let weights: Vec<f32> = chunks.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let blocks = blocks_like(of, &weights);
        if !plain {
            file.write(info.name(), &blocks).expect("written");
            continue;
        }
        let mut values = vec![0.0; weights.len()];
        dequantize_row(of, &blocks, &mut values);
        file.write(info.name(), &values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>()).expect("written");
    }
    file.finish().expect("a file");
}

fn demo_in_f32(path: &Path) -> Gguf {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
    let source = Checkpoint::open(&demo).expect("the demo");
    to_gguf(&source, path, &ToGgufOptions { outtype: Outtype::F32, ..ToGgufOptions::default() }).expect("a file");
    Gguf::open(path).expect("a file")
}

fn logits(path: &Path) -> Vec<f32> {
    let checkpoint = Checkpoint::open(path).expect("a checkpoint");
    let target = Target::load(&checkpoint, LoadOptions::from(Isa::best())).expect("a target");
    let ids: Vec<u32> = (0..24).map(|i| 300 + i * 37 % 3000).collect();
    values(&pass(&target, &mut cache(&target, ElementType::F32, Isa::best()), &ids, OutputRows::All).logits)
}

/// A file with a matrix of every type is the model of their values, up to rounding inputs to 8 bits. The bytes read per
/// step, including matrices that grow when packed, are known from sizes.
#[test]
fn files_of_every_type_load() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let source = demo_in_f32(&at("f32.gguf"));
    let places = ["ffn_gate", "ffn_up", "attn_q"].iter().flat_map(|matrix| (0..10).map(move |i| (matrix, i)));
    let places = places.map(|(matrix, i)| format!("blk.{i}.{matrix}.weight"));
    let types: Vec<(String, WeightType)> = places.zip(WeightType::ALL).collect();
    assert_eq!(types.len(), WeightType::ALL.len());
    write(&source, &at("mixed.gguf"), &types, false);
    write(&source, &at("plain.gguf"), &types, true);
    let (mixed, plain) = (logits(&at("mixed.gguf")), logits(&at("plain.gguf")));
    let off: Vec<f32> = mixed.iter().zip(&plain).map(|(a, b)| a - b).collect();
    let error = root_mean_square(&off) / root_mean_square(&plain);
    println!("logits off by {error:.4}");
    assert!(error > 0.0 && error < 0.1, "{error}");
    let checkpoint = Checkpoint::open(at("mixed.gguf")).expect("a checkpoint");
    let target = Target::load(&checkpoint, LoadOptions::from(Isa::best())).expect("a target");
    let said = checkpoint.target_step_bytes(&checkpoint.target_config().expect("a configuration")).expect("a target");
    assert_eq!(said, target.step_cost().bytes as u64);
    assert!(checkpoint.loaded_bytes() > checkpoint.bytes());
}

/// The output of `quantize` in every supported type, as whole matrices, is read again; a mix of experts needs
/// experts, and names of load-only types are rejected.
#[test]
fn files_of_new_mixes_are_read_again() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    demo_in_f32(&at("f32.gguf"));
    let source = Checkpoint::open(at("f32.gguf")).expect("a file");
    let want = logits(&at("f32.gguf"));
    for (mix, bound) in [(Mix::IQ4_XS, 0.3), (Mix::MXFP4_MOE, 0.5)] {
        let options = QuantizeOptions { rules: Rules::Pure, ..QuantizeOptions::new(mix) };
        let report = quantize(&source, at("quantized.gguf"), &options).expect("a file");
        let count = report.iter().filter(|tensor| tensor.to == name(mix.weight_type())).count();
        assert!(count > 20, "{mix:?}: {count} tensors");
        let got = logits(&at("quantized.gguf"));
        let off: Vec<f32> = got.iter().zip(&want).map(|(a, b)| a - b).collect();
        let error = root_mean_square(&off) / root_mean_square(&want);
        println!("{}: logits off by {error:.4}", mix.name());
        assert!(error < bound, "{}: {error}", mix.name());
    }
    let mixed = quantize(&source, at("mixed.gguf"), &QuantizeOptions::new(Mix::MXFP4_MOE));
    assert!(mixed.expect_err("no experts").to_string().contains("the file has none"));
    let checkpoint = Checkpoint::open(at("f32.gguf")).expect("a checkpoint");
    let options = LoadOptions { quantize: Some(WeightType::IQ3_S), ..LoadOptions::from(Isa::best()) };
    let refused = Target::load(&checkpoint, options).map(drop).expect_err("read only").to_string();
    assert!(refused.contains("iq3_s is load-only"), "{refused}");
}
