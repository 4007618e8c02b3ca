//! Tests the errors for tensors that contradict their configuration or each other.

mod settings;

use serde_json::{Value, json};

use super::*;

/// A tensor: its name, type, shape and bytes.
type Tensor = (&'static str, Element, Vec<u64>, Vec<u8>);

fn tensor(name: &'static str, element: Element, dims: &[u64]) -> Tensor {
    let n = dims.iter().product::<u64>() * element.bytes();
    (name, element, dims.to_vec(), vec![0; n as usize])
}

fn filled(name: &'static str, element: Element, dims: &[u64], values: &[u8]) -> Tensor {
    let (.., zeros) = tensor(name, element, dims);
    let bytes = values.iter().copied().cycle().take(zeros.len());
    (name, element, dims.to_vec(), bytes.collect())
}

/// Scales of 1 in f16.
fn ones(name: &'static str, dims: &[u64]) -> Tensor {
    filled(name, Element::F16, dims, &[0, 0x3c])
}

fn config(config: &Value) -> Result<Config, String> {
    let whole = json!({"model_type": "llama", "quantization_config": config});
    let parsed = Config::parse(&whole).map_err(|error| error.to_string())?;
    Ok(parsed.expect("it has a configuration"))
}

/// Reads all matrices, and returns their values by name.
fn read(settings: &Value, tensors: &[Tensor]) -> Result<Vec<(String, Vec<f32>)>, String> {
    let infos = tensors.iter().map(|(name, element, dims, _)| {
        let (element, dims) = (*element, dims.clone());
        ((*name).to_owned(), Info { element, dims })
    });
    let bytes = |name: &str| {
        let mut tensors = tensors.iter();
        let found = tensors.find(|tensor| tensor.0 == name);
        Ok::<_, QuantizedError>(found.expect("it was listed").3.clone())
    };
    let text = |error: QuantizedError| error.to_string();
    let found = config(settings)?
        .matrices(&infos.collect(), bytes)
        .map_err(text)?;
    let values = found.matrices.iter().map(|matrix| {
        let quantized = matrix.read(bytes).map_err(text)?;
        let values = quantized.dequantize(matrix.name()).map_err(text)?;
        assert_eq!(values.len() as u64, matrix.dims().iter().product::<u64>());
        Ok((matrix.name().to_owned(), values))
    });
    values.collect()
}

#[track_caller]
fn refused(settings: &Value, tensors: &[Tensor], expected: &str) {
    match read(settings, tensors) {
        Ok(values) => panic!("read as {values:?}, expected the error {expected}"),
        Err(error) => assert!(error.contains(expected), "{error}\nexpected {expected}"),
    }
}

/// Replaces a tensor of the same name, or adds one.
fn with(tensors: &[Tensor], tensor: Tensor) -> Vec<Tensor> {
    let mut changed = without(tensors, tensor.0);
    changed.push(tensor);
    changed
}

fn without(tensors: &[Tensor], name: &str) -> Vec<Tensor> {
    let kept = tensors.iter().filter(|tensor| tensor.0 != name);
    kept.cloned().collect()
}

fn gptq() -> (Value, Vec<Tensor>) {
    let settings = json!({"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": true});
    let order: Vec<u8> = (0..16u8).flat_map(|at| [at % 2, 0, 0, 0]).collect();
    let tensors = vec![
        filled("x.qweight", Element::I32, &[2, 8], &[0x98]),
        filled("x.qzeros", Element::I32, &[2, 1], &[0x77]),
        ones("x.scales", &[2, 8]),
        filled("x.g_idx", Element::I32, &[16], &order),
    ];
    (settings, tensors)
}

fn awq() -> (Value, Vec<Tensor>) {
    let settings = json!({"quant_method": "awq", "bits": 4, "group_size": 4, "version": "gemm"});
    let tensors = vec![
        filled("x.qweight", Element::I32, &[8, 2], &[0x98]),
        filled("x.qzeros", Element::I32, &[2, 2], &[0x87]),
        ones("x.scales", &[2, 16]),
    ];
    (settings, tensors)
}

fn fp8() -> (Value, Vec<Tensor>) {
    let settings = json!({"quant_method": "fp8", "weight_block_size": [2, 4]});
    let tensors = vec![
        filled("x.weight", Element::F8E4M3, &[3, 5], &[0x38]),
        ones("x.weight_scale_inv", &[2, 2]),
    ];
    (settings, tensors)
}

fn compressed(format: &str, weights: Value) -> Value {
    json!({
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*gate$"],
    })
}

fn int8() -> (Value, Vec<Tensor>) {
    let weights = json!({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": true});
    let tensors = vec![
        filled("x.weight", Element::I8, &[3, 5], &[0xff]),
        ones("x.weight_scale", &[3, 1]),
    ];
    (compressed("int-quantized", weights), tensors)
}

fn packed() -> (Value, Vec<Tensor>) {
    let weights = json!({
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 6, "symmetric": false,
    });
    let tensors = vec![
        filled("x.weight_packed", Element::I32, &[3, 2], &[0x98]),
        ones("x.weight_scale", &[3, 2]),
        filled("x.weight_zero_point", Element::I32, &[1, 2], &[0x77]),
        filled(
            "x.weight_shape",
            Element::I64,
            &[2],
            &[3, 0, 0, 0, 0, 0, 0, 0, 12, 0, 0, 0, 0, 0, 0, 0],
        ),
    ];
    (compressed("pack-quantized", weights), tensors)
}

/// The tensor that lists the groups of the inputs for [`packed`].
fn order(groups: [i32; 12]) -> Tensor {
    let bytes: Vec<u8> = groups
        .iter()
        .flat_map(|group| group.to_le_bytes())
        .collect();
    filled("x.weight_g_idx", Element::I32, &[12], &bytes)
}

#[test]
fn each_layout_is_read() {
    let alternating =
        |low: f32, high: f32| move |at: usize| if at.is_multiple_of(2) { low } else { high };
    type Case<'c> = ((Value, Vec<Tensor>), usize, &'c dyn Fn(usize) -> f32);
    let cases: [Case<'_>; 5] = [
        (gptq(), 128, &alternating(0.0, 1.0)),
        // A word holds the outputs in the order 0, 2, 4, 6, 1, 3, 5, 7.
        (awq(), 128, &|at| {
            let output = at / 8 % 8;
            let place = [0, 4, 1, 5, 2, 6, 3, 7][output];
            alternating(8.0 - 7.0, 9.0 - 8.0)(place)
        }),
        (fp8(), 15, &|_| 1.0),
        (int8(), 15, &|_| -1.0),
        (packed(), 36, &alternating(1.0, 2.0)),
    ];
    for ((settings, tensors), n, value) in cases {
        let read = read(&settings, &tensors).unwrap_or_else(|error| panic!("{settings}: {error}"));
        let expected: Vec<f32> = (0..n).map(value).collect();
        assert_eq!(read, [("x.weight".to_owned(), expected)], "{settings}");
    }
}

#[test]
fn scales_that_are_no_positive_numbers_are_named() {
    for (settings, tensors) in [gptq(), awq(), fp8(), int8(), packed()] {
        let scale = tensors.iter().find(|tensor| tensor.0.contains("scale"));
        let (name, _, dims, bytes) = scale.expect("each has one").clone();
        // The f16 values 0, -1, infinity and NaN.
        for (half, shown) in [
            (0u16, "0"),
            (0xbc00, "-1"),
            (0x7c00, "inf"),
            (0x7e00, "NaN"),
        ] {
            let mut bytes = bytes.clone();
            let at = bytes.len() - 2;
            bytes[at..].copy_from_slice(&half.to_le_bytes());
            let changed = with(&tensors, (name, Element::F16, dims.clone(), bytes));
            let index = at / 2;
            let expected = format!("the tensor `{name}` has the scale {shown} at index {index}");
            refused(&settings, &changed, &expected);
        }
        let changed = with(&tensors, ones(name, &[7]));
        refused(
            &settings,
            &changed,
            &format!("the tensor `{name}` is [7], expected ["),
        );
        let changed = with(&tensors, tensor(name, Element::I64, &dims));
        refused(
            &settings,
            &changed,
            &format!("the tensor `{name}` is stored as I64, expected F32"),
        );
    }
}

#[test]
fn every_tensor_of_a_layout_is_needed_and_no_other() {
    for (settings, tensors) in [gptq(), awq(), fp8(), int8(), packed()] {
        for (missing, ..) in &tensors {
            let left = without(&tensors, missing);
            refused(&settings, &left, &format!("has no `{missing}` beside it"));
        }
        for extra in ["x.weight_scale_2", "x.qweight", "x.weight_g_idx"] {
            if tensors.iter().all(|tensor| tensor.0 != extra) {
                let more = with(&tensors, ones(extra, &[1]));
                refused(&settings, &more, &format!("the tensor `{extra}` is "));
            }
        }
    }
    let (settings, tensors) = fp8();
    let more = with(&tensors, ones("x.weight_scale", &[2, 2]));
    refused(
        &settings,
        &more,
        "`x.weight_scale_inv` is a second scale of the weight, next to `x.weight_scale`",
    );
    let plain = with(&tensors, tensor("x.weight", Element::BF16, &[3, 5]));
    refused(
        &settings,
        &plain,
        "`x.weight` is stored as BF16, expected F8_E4M3",
    );
}

#[test]
fn orders_of_inputs_must_exist_and_be_in_range() {
    let (mut settings, tensors) = gptq();
    let left = without(&tensors, "x.g_idx");
    refused(
        &settings,
        &left,
        "has no `x.g_idx` beside it, but `desc_act` is true",
    );
    for (byte, shown) in [(2, "33686018"), (0xff, "-1")] {
        let wrong = with(&tensors, filled("x.g_idx", Element::I32, &[16], &[byte]));
        let expected =
            format!("`x.g_idx` has the group {shown} at index 0, but there are 2 groups");
        refused(&settings, &wrong, &expected);
    }
    settings["desc_act"] = json!(false);
    refused(
        &settings,
        &tensors,
        "`x.g_idx` has the group 1 at index 1, but `desc_act` is false, which means the group 0",
    );
    assert!(read(&settings, &left).is_ok());

    let (mut settings, tensors) = packed();
    let ordered = with(&tensors, order([0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1]));
    refused(
        &settings,
        &ordered,
        "`x.weight_g_idx` is an order of inputs, but `actorder` is not `group`",
    );
    settings["config_groups"]["group_0"]["weights"]["actorder"] = json!("group");
    assert!(read(&settings, &ordered).is_ok());
    let unset = read(&settings, &with(&tensors, order([-1; 12])));
    settings["config_groups"]["group_0"]["weights"]["actorder"] = json!("weight");
    assert_eq!(unset, read(&settings, &tensors));
}

#[test]
fn columns_in_the_order_of_their_groups_are_runs_if_the_groups_have_one_size() {
    let (mut settings, tensors) = packed();
    settings["config_groups"]["group_0"]["weights"]["actorder"] = json!("group");
    let column_order = |groups: [i32; 12]| {
        let tensors = with(&tensors, order(groups));
        let infos = tensors.iter().map(|(name, element, dims, _)| {
            let (element, dims) = (*element, dims.clone());
            ((*name).to_owned(), Info { element, dims })
        });
        let bytes = |name: &str| {
            let mut tensors = tensors.iter();
            let found = tensors.find(|tensor| tensor.0 == name);
            Ok::<_, QuantizedError>(found.expect("it was listed").3.clone())
        };
        let parsed = config(&settings).expect("it is valid");
        let found = parsed.matrices(&infos.collect(), bytes);
        let matrix = found.expect("it is valid").matrices.remove(0);
        assert_eq!(matrix.runs_of_rows(), None);
        assert_eq!(
            matrix.ordered_runs_of_rows().map(|runs| runs.columns),
            Some(6)
        );
        matrix.column_order(bytes).expect("groups in range")
    };
    let alternating = column_order([0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1]);
    assert_eq!(
        alternating,
        Some(vec![0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11])
    );
    assert_eq!(column_order([-1; 12]), Some((0..12).collect()));
    assert_eq!(column_order([0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]), None);
}

#[test]
fn zero_points_that_are_ambiguous_or_contradictory_are_refused() {
    let (mut settings, tensors) = gptq();
    let full = with(&tensors, filled("x.qzeros", Element::I32, &[2, 1], &[0xf7]));
    refused(
        &settings,
        &full,
        "`x.qzeros` has the zero point 15, which version 1",
    );
    settings["checkpoint_format"] = json!("gptq_v2");
    assert!(read(&settings, &full).is_ok());

    let (settings, tensors) = int8();
    let zeros = |value| filled("x.weight_zero_point", Element::I8, &[3, 1], &[value]);
    assert_eq!(
        read(&settings, &with(&tensors, zeros(0))),
        read(&settings, &tensors)
    );
    let expected = "`x.weight_zero_point` has values other than 0, but `symmetric` is true";
    refused(&settings, &with(&tensors, zeros(1)), expected);
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let (mut settings, tensors) = awq();
    settings["group_size"] = json!(3);
    refused(
        &settings,
        &tensors,
        "has 8 inputs, which groups of 3 do not divide",
    );
    let (mut settings, tensors) = packed();
    settings["config_groups"]["group_0"]["weights"]["group_size"] = json!(5);
    refused(
        &settings,
        &tensors,
        "groups of 5 inputs, which do not divide the 12 inputs",
    );
    let (settings, tensors) = packed();
    for bytes in [[255; 16], [0; 16], [127; 16]] {
        let wrong = with(
            &tensors,
            filled("x.weight_shape", Element::I64, &[2], &bytes),
        );
        refused(&settings, &wrong, "`x.weight_shape` holds the sizes ");
    }
    let (settings, tensors) = gptq();
    let wrong = with(&tensors, tensor("x.qweight", Element::I32, &[2, 9]));
    refused(
        &settings,
        &wrong,
        "`x.qweight` has 9 outputs, which is no multiple of the 8 integers",
    );
    // If one size of a matrix is 0, its number of bytes does not limit the other size.
    for dims in [&[1 << 40, 0][..], &[0, 1 << 40], &[5], &[1, 2, 3]] {
        let wrong = with(&tensors, tensor("x.qweight", Element::I32, dims));
        refused(&settings, &wrong, "expected a matrix");
    }
}

#[test]
fn modules_that_are_not_quantized_must_be_plain() {
    for (settings, key) in [
        (json!({"ignore": ["x"]}), "ignore"),
        (json!({"ignore": ["re:^x$"]}), "ignore"),
    ] {
        let (mut base, tensors) = int8();
        base["ignore"] = settings["ignore"].clone();
        let expected = format!("`quantization_config.{key}` names its module as not quantized");
        refused(&base, &tensors, &expected);
    }
    let (mut settings, tensors) = gptq();
    settings["dynamic"] = json!({"-:x": {}});
    refused(
        &settings,
        &tensors,
        "`quantization_config.dynamic` names its module",
    );
    settings["dynamic"] = json!({"+:x": {"bits": 8}});
    refused(
        &settings,
        &tensors,
        "has settings of their own for the modules `+:x`",
    );
    let (mut settings, tensors) = fp8();
    settings["modules_to_not_convert"] = json!(["x"]);
    refused(
        &settings,
        &tensors,
        "modules_to_not_convert` names its module",
    );

    let (mut settings, tensors) = int8();
    settings["config_groups"]["group_0"]["targets"] = json!(["re:y"]);
    refused(
        &settings,
        &tensors,
        "has no group with the module `x` as a target",
    );
    settings["config_groups"]["group_0"]["targets"] = json!(["Embedding"]);
    refused(
        &settings,
        &tensors,
        "has the class `Embedding`, expected Linear",
    );
    settings["config_groups"]["group_0"]["targets"] = json!(["x"]);
    let mut other = settings["config_groups"]["group_0"].clone();
    other["weights"]["strategy"] = json!("tensor");
    settings["config_groups"]["group_1"] = other;
    refused(
        &settings,
        &tensors,
        "has the module `x`, which `quantization_config.config_groups.group_0.targets` has, too",
    );
}

#[test]
fn plain_weights_and_scales_of_activations_are_no_matrices() {
    let (settings, mut tensors) = int8();
    for name in ["lm_head.weight", "gate.weight", "norm.weight"] {
        tensors.push(tensor(name, Element::BF16, &[3, 5]));
    }
    for name in ["x.input_scale", "attn.k_scale"] {
        tensors.push(ones(name, &[1]));
    }
    let read = read(&settings, &tensors).expect("it is valid");
    assert_eq!(read.len(), 1);
}

#[test]
fn weights_in_8_bits_without_input_activations_keep_their_inputs() {
    let keeps = |settings: &Value| config(settings).expect("it is read").keeps_inputs();
    let float = json!({"num_bits": 8, "type": "float", "strategy": "channel"});
    let mut settings = compressed("float-quantized", float);
    assert!(keeps(&settings));
    settings["config_groups"]["group_0"]["input_activations"] = Value::Null;
    assert!(keeps(&settings));
    settings["config_groups"]["group_0"]["input_activations"] =
        json!({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": true});
    assert!(!keeps(&settings));
    let integers = json!({"num_bits": 8, "type": "int", "strategy": "channel"});
    for layout in ["int-quantized", "pack-quantized"] {
        let mut settings = compressed(layout, integers.clone());
        assert!(keeps(&settings), "{layout}");
        settings["config_groups"]["group_0"]["input_activations"] =
            json!({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": true});
        assert!(!keeps(&settings), "{layout}");
    }
    for ((settings, _), expected) in [
        (fp8(), false),
        (packed(), false),
        (gptq(), true),
        (awq(), true),
    ] {
        assert_eq!(keeps(&settings), expected, "{settings}");
    }
}

#[test]
fn quantized_tensors_need_a_configuration() {
    for (_, tensors) in [gptq(), awq(), fp8(), int8(), packed()] {
        let infos = tensors.iter().map(|(name, element, dims, _)| {
            let (element, dims) = (*element, dims.clone());
            ((*name).to_owned(), Info { element, dims })
        });
        let error = check_plain(&infos.collect()).expect_err("they are quantized");
        assert!(
            error.to_string().contains("has no `quantization_config`"),
            "{error}"
        );
    }
}
