//! The map of shapes by layer, `per_layer_config`.

use super::*;

fn copy_layer(tensors: &mut Tensors, from: usize, to: usize) {
    tensors.retain(|name, _| !name.contains(&format!(".layers.{to}.")));
    let copies: Vec<_> = (tensors.iter())
        .filter(|(name, _)| name.contains(&format!(".layers.{from}.")))
        .map(|(name, tensor)| (name.replace(&format!(".layers.{from}."), &format!(".layers.{to}.")), tensor.clone()))
        .collect();
    tensors.extend(copies);
}

/// Twelve layers, of which 5 and 11 are full: the fixture `dense` twice over.
fn twelve_layers() -> Twin {
    let twin = Twin::of("dense");
    twin.tensors(WEIGHTS, |tensors| (0..6).for_each(|layer| copy_layer(tensors, layer, layer + 6)));
    twin.json(CONFIG, |config| {
        let types = config["layer_types"].as_array().expect("a list").clone();
        config["layer_types"] = json!([types.clone(), types].concat());
        config["num_hidden_layers"] = json!(12);
    });
    twin
}

/// The twin with a per-layer map instead of the fields of full layers.
fn with_map(twin: &Twin, map: Value) -> Result<Target> {
    twin.json(CONFIG, |config| {
        let fields = config.as_object_mut().expect("an object");
        fields.remove("global_head_dim");
        fields.remove("num_global_key_value_heads");
        fields.insert("per_layer_config".into(), map);
    });
    target(&twin.path("target"))
}

/// transformers pads the keys to the digits of the largest; a lookup of "5" would miss layer 5,
/// which would get the sliding layers' geometry.
#[test]
fn per_layer_keys_padded_and_unpadded() {
    let twin = twelve_layers();
    let published = target(&twin.path("target")).expect("the fields of published files");
    let ids = case("dense").ids("input_ids");
    let want = logits(&published, &ids);
    let full = json!({"head_dim": 64, "num_key_value_heads": 1});
    for keys in [["05", "11"], ["5", "11"], ["005", "011"]] {
        let map = Value::Object(keys.iter().map(|key| ((*key).to_owned(), full.clone())).collect());
        let padded = with_map(&twin, map).expect("a target");
        assert_eq!(padded.config(), published.config(), "{keys:?}");
        assert_eq!(logits(&padded, &ids), want, "{keys:?}");
    }
}

/// The map replaces the fields of full layers: a layer without an entry is like the sliding ones.
#[test]
fn per_layer_maps_that_are_empty_or_partial() {
    let twin = twelve_layers();
    let full = json!({"head_dim": 64, "num_key_value_heads": 1});
    refused(with_map(&twin, json!({})), &["layers.5.self_attn", "the configuration implies"]);
    // Layers of one type share their angles, so only layer 5 cannot be as wide as the sliding ones.
    let about = [CONFIG, "per_layer_config", "full_attention", "of 32 in layer 5", "of 64 in layer 11"];
    refused(with_map(&twin, json!({"11": full})), &about);

    // The full layers with the width of the sliding ones: layer 5 also has their K/V heads, layer 11 fewer.
    twin.json(CONFIG, |config| config["attention_k_eq_v"] = json!(false));
    twin.tensors(WEIGHTS, |tensors| {
        copy_layer(tensors, 0, 5);
        copy_layer(tensors, 0, 11);
        for part in ["k_proj", "v_proj"] {
            let name = format!("model.layers.11.self_attn.{part}.weight");
            let (_, shape, bytes) = tensors.get_mut(&name).expect("the tensor");
            (shape[0], *bytes) = (32, bytes[..bytes.len() / 2].to_vec());
        }
    });
    let partial = with_map(&twin, json!({"11": {"num_key_value_heads": 1}})).expect("a target");
    let geometry =
        |layer: usize| (partial.config().layers[layer].head_dim, partial.config().layers[layer].num_kv_heads);
    assert_eq!([geometry(4), geometry(5), geometry(11)], [(32, 2), (32, 2), (32, 1)]);

    twin.tensors(WEIGHTS, |tensors| copy_layer(tensors, 0, 11));
    let empty = with_map(&twin, json!({})).expect("a target");
    // The map's meaning, in the fields of published files.
    twin.json(CONFIG, |config| {
        config.as_object_mut().expect("an object").remove("per_layer_config");
        config["global_head_dim"] = json!(32);
    });
    let uniform = target(&twin.path("target")).expect("a target");
    assert_eq!(empty.config(), uniform.config());
    let ids = case("dense").ids("input_ids");
    assert_eq!(logits(&empty, &ids), logits(&uniform, &ids));
}

#[test]
fn per_layer_keys_that_are_no_layers() {
    let twin = twelve_layers();
    let full = json!({"head_dim": 64, "num_key_value_heads": 1});
    for key in ["12", "-1", "+5", "x", "", "5.0", "99999999999999999999999"] {
        refused(with_map(&twin, json!({key: full})), &["per_layer_config", "layers from 0 to 11"]);
    }
    refused(with_map(&twin, json!({"5": full, "05": full})), &["per_layer_config", "repeats layer 5"]);
    refused(with_map(&twin, json!({"5": 7})), &["per_layer_config.5", "an object"]);
    refused(with_map(&twin, json!({"5": {"head_dim": 0}})), &["per_layer_config.5.head_dim", "is 0"]);
    refused(with_map(&twin, json!({"5": {"skip": ["mlp"]}})), &["per_layer_config.5.skip", "not implemented"]);
}
