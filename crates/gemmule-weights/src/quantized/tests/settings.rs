//! Tests the errors for unsupported configurations.

use super::*;

#[test]
fn settings_that_are_not_read_are_named() {
    let refused = |settings: Value, expected: &str| {
        let error = config(&settings).expect_err(expected);
        assert!(error.contains(expected), "{error}\nexpected {expected}");
    };
    let mut methods = [
        "bitsandbytes",
        "hqq",
        "eetq",
        "torchao",
        "quanto",
        "aqlm",
        "vptq",
        "higgs",
    ]
    .to_vec();
    methods.extend([
        "bitnet",
        "spqr",
        "quark",
        "fp_quant",
        "auto-round",
        "mxfp4",
        "nvfp4",
        "new",
    ]);
    for method in methods {
        let expected = format!("quantized with the method `{method}`, which is not read");
        refused(json!({"quant_method": method}), &expected);
    }
    refused(json!({"load_in_4bit": true}), "the method `bitsandbytes`");
    let with = |base: Value, key: &str, value: Value| {
        let mut settings = base;
        settings[key] = value;
        settings
    };
    for (base, key, value, expected) in [
        (
            gptq().0,
            "bits",
            json!(3),
            "`quantization_config.bits` is 3, expected 4 or 8",
        ),
        (
            gptq().0,
            "bits",
            json!("4"),
            "bits` is a text, expected a whole number",
        ),
        (gptq().0, "bits", Value::Null, "bits` is missing"),
        (
            gptq().0,
            "group_size",
            json!(0),
            "group_size` is 0, expected a positive number",
        ),
        (
            gptq().0,
            "desc_act",
            json!(1),
            "desc_act` is a number, expected true or false",
        ),
        (
            gptq().0,
            "checkpoint_format",
            json!("marlin"),
            "checkpoint_format` is `marlin`",
        ),
        (
            gptq().0,
            "is_marlin_format",
            json!(true),
            "is_marlin_format` is true",
        ),
        (
            awq().0,
            "version",
            json!("gemv_fast"),
            "version` is `gemv_fast`, expected gemm",
        ),
        (awq().0, "bits", json!(8), "bits` is 8, expected 4;"),
        (awq().0, "backend", json!("llm-awq"), "backend` is llm-awq"),
        (awq().0, "zero_point", json!(false), "zero_point` is false"),
        (
            fp8().0,
            "weight_block_size",
            json!([0, 128]),
            "weight_block_size` is a list, expected",
        ),
        (
            fp8().0,
            "fmt",
            json!("e5m2"),
            "fmt` is `e5m2`, expected e4m3",
        ),
        (
            fp8().0,
            "expert_dtype",
            json!("fp4"),
            "expert_dtype` is `fp4`",
        ),
        (
            fp8().0,
            "modules_to_not_convert",
            json!("lm_head"),
            "is a text, expected a list of texts",
        ),
        (
            int8().0,
            "format",
            json!("marlin-24"),
            "format` is `marlin-24`, which is not read",
        ),
        (
            int8().0,
            "format",
            json!("float-quantized"),
            "type` is int, but the format is float-quantized",
        ),
        (
            int8().0,
            "ignore",
            json!(["re:("]),
            "ignore` has the pattern `(`, which is no regular",
        ),
        (
            int8().0,
            "sparsity_config",
            json!({"format": "sparse-24-bitmask"}),
            "sparse weights are not read",
        ),
        (
            int8().0,
            "transform_config",
            json!({"config_groups": {"u": {}}}),
            "has transforms of activations",
        ),
        (
            json!({"quant_method": "modelopt"}),
            "quant_algo",
            json!("NVFP4"),
            "quant_algo` is `nvfp4`, expected FP8",
        ),
    ] {
        refused(with(base, key, value), expected);
    }
    for (key, value, expected) in [
        ("num_bits", json!(9), "num_bits` is 9, expected 2 to 8"),
        ("dynamic", json!(true), "dynamic` is set"),
        (
            "strategy",
            json!("token"),
            "strategy` is `token`, expected tensor",
        ),
        ("strategy", json!("group"), "group_size` is missing"),
        ("group_size", json!(8), "strategy` contradicts `group_size`"),
        ("actorder", json!("random"), "actorder` is unknown"),
    ] {
        let (mut settings, _) = int8();
        settings["config_groups"]["group_0"]["weights"][key] = value;
        refused(settings, expected);
    }
}

#[test]
fn names_of_a_key_must_agree() {
    let mut settings = gptq().0;
    settings["checkpoint_format"] = json!("gptq_v2");
    settings["format"] = json!("GPTQ_V2");
    assert!(config(&settings).is_ok());
    settings["format"] = json!("gptq");
    let error = config(&settings).expect_err("they differ");
    assert!(
        error.contains(
            "`quantization_config.format` differs from `quantization_config.checkpoint_format`"
        ),
        "{error}"
    );
}

#[test]
fn a_configuration_is_found_once_and_inside_of_an_object() {
    let (settings, _) = gptq();
    let parse = |whole: &Value| Config::parse(whole).map(|found| found.is_some());
    assert!(matches!(parse(&json!({"model_type": "llama"})), Ok(false)));
    assert!(matches!(
        parse(&json!({"quantization_config": null})),
        Ok(false)
    ));
    let nested = json!({"text_config": {"quantization_config": settings}});
    assert!(matches!(parse(&nested), Ok(true)));
    let two =
        json!({"quantization_config": fp8().0, "text_config": {"quantization_config": settings}});
    let error = parse(&two).expect_err("they differ").to_string();
    assert!(
        error.contains("`text_config.quantization_config` differs from `quantization_config`"),
        "{error}"
    );
    let unknown = json!({"quant_method": "fbgemm_fp8", "rotation": 3, "activation_scale_ub": 1.0});
    let parsed = config(&unknown).expect("it is read");
    assert_eq!(parsed.unknown(), ["quantization_config.rotation"]);
}

#[test]
fn scales_of_a_cache_have_several_names_and_are_positive_numbers() {
    let names = CacheRows::Values.scale_names("model.layers.3.self_attn.v_proj");
    for (name, is_one) in [
        ("model.layers.3.self_attn.v_scale", true),
        ("model.layers.3.self_attn.attn.v_scale", true),
        ("model.layers.3.self_attn.v_proj.v_scale", true),
        ("model.layers.3.self_attn.v_proj.output_scale", true),
        ("model.layers.3.self_attn.kv_scale", true),
        ("model.layers.3.self_attn.k_scale", false),
        ("model.layers.13.self_attn.v_scale", false),
    ] {
        assert_eq!(names.iter().any(|other| other == name), is_one, "{name}");
        assert!(is_cache_scale(name), "{name}");
    }
    for name in [
        "x.input_scale",
        "x.q_scale",
        "mlp.up_proj.output_scale",
        "k_scale",
    ] {
        assert!(!is_cache_scale(name), "{name}");
    }
    let read = |element, dims: &[u64], bytes: &[u8]| {
        let dims = dims.to_vec();
        let info = Info { element, dims };
        cache_scale("a.k_scale", &info, bytes).map_err(|error| error.to_string())
    };
    assert_eq!(read(Element::F32, &[], &0.75f32.to_le_bytes()), Ok(0.75));
    assert_eq!(read(Element::BF16, &[1], &[0x40, 0x3f]), Ok(0.75));
    assert_eq!(read(Element::F16, &[1, 1], &[0x00, 0x3a]), Ok(0.75));
    let refused = |element, dims: &[u64], bytes: &[u8], expected: &str| {
        let error = read(element, dims, bytes).expect_err("it is refused");
        assert!(
            error.contains("`a.k_scale`") && error.contains(expected),
            "{error}"
        );
    };
    for value in [
        0.0,
        -0.5,
        f32::NAN,
        f32::INFINITY,
        f32::MIN_POSITIVE / 2.0,
        f32::MAX,
    ] {
        let expected = format!("is {value}, expected a positive number");
        refused(Element::F32, &[1], &value.to_le_bytes(), &expected);
    }
    refused(Element::F32, &[2], &[0; 8], "is [2], expected one number");
    refused(Element::F32, &[], &[0; 3], "is stored as F32");
    refused(
        Element::I8,
        &[1],
        &[1],
        "is stored as I8, expected a scale in F32, F16 or BF16",
    );
}

#[test]
fn a_cache_in_another_format_is_refused_only_if_its_scales_are_used() {
    let check = |settings: Value| {
        let mut whole = json!({"quant_method": "fp8"});
        for (key, value) in settings.as_object().expect("an object") {
            whole[key] = value.clone();
        }
        let parsed = config(&whole).expect("it is read without its cache");
        assert_eq!(parsed.unknown(), Vec::<String>::new());
        parsed.check_cache().map_err(|error| error.to_string())
    };
    let scheme = |scheme: Value| check(json!({"kv_cache_scheme": scheme}));
    for fp8 in [
        json!(null),
        json!({}),
        json!({"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": true}),
    ] {
        assert_eq!(scheme(fp8), Ok(()));
    }
    assert_eq!(check(json!({"kv_cache_quant_algo": "FP8"})), Ok(()));
    let refused = |result: Result<(), String>, expected: &str| {
        let error = result.expect_err("it is refused");
        assert!(error.contains(expected), "{error}");
    };
    refused(
        scheme(json!({"num_bits": 8, "type": "int"})),
        "`quantization_config.kv_cache_scheme` has 8 bits of type `int`, but",
    );
    refused(
        scheme(json!({"num_bits": 4, "symmetric": false})),
        "has 4 bits of type `float` with zero points, but",
    );
    refused(scheme(json!("fp8")), "is not understood: its key");
    refused(
        check(json!({"kv_cache_quant_algo": "NVFP4"})),
        "`quantization_config.kv_cache_quant_algo` is `nvfp4`, but",
    );
}
