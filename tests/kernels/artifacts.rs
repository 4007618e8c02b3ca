//! Tests of artifacts (compiled models in files): an artifact runs like the model that it was written from, and reading any file returns a
//! valid artifact or an error.

use std::path::Path;

use crate::common::{Folder, difference, nvrtc, run, tiny_compiled, tiny_tensors};
use gemmule::{
    DType, DeviceChoice, Engine, Format,
    engine::{Artifact, Builder, Precision, Sealed, emit},
    graph::WeightExpr,
    jit::{DiskCache, Jit, Source, Target},
    kernels::{KernelSpec, gemm::Tile},
    ops::BatchInput,
    program::Storage,
    runtime::{
        cuda::CudaModel,
        weights::{RandomWeights, WeightSource},
    },
    select::{Batches, Dispatch, Entry, Interval},
    tensor::{Element, Shape, Symbol},
};
use insta::assert_snapshot;
use sha2::{Digest, Sha256};

const MAGIC: usize = 8;
const BODY: usize = MAGIC + 32;

fn without_code(dtype: DType) -> Artifact {
    Artifact::of(tiny_compiled(dtype), Vec::new())
}

fn from_file(file: &Path, weights: &Folder) -> Result<Engine, gemmule::EngineError> {
    Engine::from_artifact(file)
        .checkpoint(weights.path())
        .device(DeviceChoice::Cpu)
        .build()
}

fn kernel<'a, T>(
    artifact: &'a mut Artifact,
    pick: impl Fn(&'a mut KernelSpec) -> Option<&'a mut T>,
) -> &'a mut T {
    let mut kernels = artifact.program.kernels.iter_mut();
    kernels.find_map(pick).expect("the model has such a kernel")
}

macro_rules! kernel {
    ($artifact:expr, $name:ident) => {
        kernel($artifact, |k| match k {
            KernelSpec::$name(k) => Some(k),
            _ => None,
        })
    };
}

/// Returns an artifact of the tiny model with cubins for `targets`, and the sources of its kernels.
fn with_code(targets: &[Target]) -> (Artifact, Vec<Source>) {
    let compiled = tiny_compiled(DType::F32);
    let sources = emit(&CudaModel::kernels(&compiled.program)).expect("every kernel has source");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("artifacts");
    let jit = Jit::new(nvrtc(), Some(DiskCache::at(&folder)));
    let mut cubins = Vec::new();
    for &target in targets {
        let made = jit.compile_all(&sources, target, &|_, _| ());
        let made = made.expect("it compiles");
        cubins.extend(Sealed::all(made, &sources, jit.nvrtc().version()));
    }
    (Artifact::of(compiled, cubins), sources)
}

#[test]
fn an_artifact_runs_as_the_model_itself() {
    let folder = Folder::whole(&tiny_tensors(DType::F32));
    let target: Target = "sm_80".parse().expect("a target");
    let (artifact, sources) = with_code(&[target]);
    let file = folder.file("tiny.gemmule");
    let bytes = artifact.write(&file).expect("it is written");
    assert_eq!(bytes, std::fs::metadata(&file).expect("it is there").len());
    assert!(Artifact::is_one(&file));

    let read = Artifact::read(&file).expect("it is sound");
    assert!(read == artifact);
    assert_eq!(read.targets(), [target]);
    assert_eq!(read.cubins.len(), sources.len());
    let ours = run(&from_file(&file, &folder).expect("it loads"));
    assert_eq!(
        difference(&ours, &run(&folder.load().expect("it loads"))),
        0.0
    );
}

#[test]
fn every_shipped_model_is_sound_in_a_file() {
    let folder = Folder::new();
    let file = folder.file("model");
    for (name, model, config) in gemmule::measure::shipped_configs().expect("they are shipped") {
        let description = gemmule::engine::description(model).expect("it is shipped");
        let outputs: Vec<String> = description
            .outputs_without_source()
            .into_iter()
            .map(Into::into)
            .collect();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for fused in [true, false] {
                let mut options = crate::common::options(dtype);
                options.outputs = Some(outputs.clone());
                if !fused {
                    let passes = gemmule::passes::all().iter();
                    options.without = passes.map(|p| p.name().to_owned()).collect();
                }
                let compiled = gemmule::engine::compile(&description, &config, &options);
                let artifact = Artifact::of(compiled.expect("it compiles"), Vec::new());
                artifact.write(&file).expect("it is written");
                let read = Artifact::read(&file).unwrap_or_else(|e| panic!("{name}: {e}"));
                assert!(read == artifact, "{name}");
            }
        }
    }
}

#[test]
fn code_that_is_not_of_its_kernels_source_is_refused() {
    let (artifact, sources) = with_code(&[Target::Sm80, Target::Sm86]);
    let folder = Folder::new();
    let file = folder.file("tiny");
    let refused = |change: &dyn Fn(&mut Vec<Sealed>)| {
        let mut artifact = artifact.clone();
        change(&mut artifact.cubins);
        artifact.write(&file).expect("it is written");
        let text = folder.text(&Artifact::read(&file).expect_err("its code is mixed up"));
        // Replace the symbols of kernels by the numbers of the kernels, because symbols depend on the choice of tiles.
        let numbered = sources.iter().enumerate();
        numbered.fold(text, |text, (i, source)| {
            text.replace(&format!("`{}`", source.symbol), &format!("[kernel {i}]"))
        })
    };
    artifact.write(&file).expect("it is written");
    assert!(Artifact::read(&file).expect("it is sound") == artifact);
    let n = sources.len();

    // A cubin has the bytes of another kernel's cubin, or of the same kernel's cubin for another target.
    assert_snapshot!(refused(&|c| c[1].cubin.bytes = c[2].cubin.bytes.clone()), @"`[dir]/tiny` is not an artifact of this version of gemmule: its code of [kernel 1] for sm_80 was not compiled from the kernel's current source; compile the model again");
    assert_snapshot!(refused(&|c| c[1].cubin.bytes = c[1 + n].cubin.bytes.clone()), @"`[dir]/tiny` is not an artifact of this version of gemmule: its code of [kernel 1] for sm_80 was not compiled from the kernel's current source; compile the model again");
    // Two cubins and their digests are exchanged, but each position keeps its symbol.
    assert_snapshot!(refused(&|c| {
        c.swap(1, 2);
        let (a, b) = (c[1].cubin.symbol.clone(), c[2].cubin.symbol.clone());
        (c[1].cubin.symbol, c[2].cubin.symbol) = (b, a);
    }), @"`[dir]/tiny` is not an artifact of this version of gemmule: its code of [kernel 1] for sm_80 was not compiled from the kernel's current source; compile the model again");
    assert_snapshot!(refused(&|c| c[0].digest[7] ^= 1), @"`[dir]/tiny` is not an artifact of this version of gemmule: its code of [kernel 0] for sm_80 was not compiled from the kernel's current source; compile the model again");
    assert_snapshot!(refused(&|c| c[0].cubin.target = Target::Sm90a), @"`[dir]/tiny` is not an artifact of this version of gemmule: its code of [kernel 0] for sm_90a was not compiled from the kernel's current source; compile the model again");
    assert_snapshot!(refused(&|c| c[0].nvrtc = (12, 8)), @"`[dir]/tiny` is not an artifact of this version of gemmule: its code of [kernel 0] for sm_80 was not compiled from the kernel's current source; compile the model again");
    assert_snapshot!(refused(&|c| c[0].cubin.symbol = "other\n".to_owned()), @r"`[dir]/tiny` is not an artifact of this version of gemmule: it has code for `other\n`, which is not one of its kernels; compile the model again");
    // The digest is valid, but it was computed from a changed source.
    assert_snapshot!(refused(&|c| {
        let mut source = sources[3].clone();
        source.text.push(' ');
        c[3] = Sealed::new(c[3].cubin.clone(), &source, c[3].nvrtc);
    }), @"`[dir]/tiny` is not an artifact of this version of gemmule: its code of [kernel 3] for sm_80 was not compiled from the kernel's current source; compile the model again");
    // A constant of a kernel changes in the program, but its cubin does not change.
    let mut changed = artifact.clone();
    kernel!(&mut changed, BiasResidualLayerNorm).eps *= 2.0;
    changed.write(&file).expect("it is written");
    let text = folder.text(&Artifact::read(&file).expect_err("its code is another kernel's"));
    assert_snapshot!(text, @"`[dir]/tiny` is not an artifact of this version of gemmule: it has code for `bias_residual_layernorm_f32_w16_eps1em12`, which is not one of its kernels; compile the model again");
}

#[cfg(unix)]
#[test]
fn an_artifact_is_written_as_other_files_are() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = Folder::new();
    let mode = |file: &Path| file.metadata().expect("it is there").permissions().mode() & 0o777;
    let usual = folder.write("usual", "");
    let artifact = without_code(DType::F32);
    let file = folder.file("tiny");
    artifact.write(&file).expect("it is written");
    assert_eq!(mode(&file), mode(&usual));
    let kept = std::fs::Permissions::from_mode(0o640);
    std::fs::set_permissions(&file, kept).expect("it is ours");
    let link = folder.file("link");
    symlink("tiny", &link).expect("the folder is ours");
    artifact.write(&link).expect("it is written");
    assert!(link.symlink_metadata().expect("it is there").is_symlink());
    assert_eq!(mode(&file), 0o640);
    artifact
        .write(Path::new("/dev/null"))
        .expect("it takes all");
    assert!(!Path::new("/dev/null").is_file());
    let refused = artifact.write(folder.path()).expect_err("it is a folder");
    assert_snapshot!(folder.text(&refused), @r"
    `[dir]` cannot be written
    caused by: it is a folder; give the name of a file
    ");
}

#[test]
fn another_storage_type_than_the_artifacts_is_refused() {
    let folder = Folder::whole(&tiny_tensors(DType::F32));
    let file = folder.file("tiny");
    without_code(DType::F32)
        .write(&file)
        .expect("it is written");
    let asked = Engine::from_artifact(&file)
        .checkpoint(folder.path())
        .device(DeviceChoice::Cpu)
        .dtype(DType::F16)
        .build();
    assert_snapshot!(folder.text(&asked.err().expect("an error")), @"the artifact `[dir]/tiny` stores f32, not f16; omit the storage type, or compile the model for it");
    without_code(DType::F16)
        .write(&file)
        .expect("it is written");
    assert_snapshot!(folder.text(&from_file(&file, &folder).err().expect("an error")), @"the CPU executor computes in f32, but the program stores f16; use f32, or a CUDA device");
}

#[test]
fn outputs_and_settings_that_an_artifact_lacks_are_refused() {
    let folder = Folder::whole(&tiny_tensors(DType::F32));
    let file = folder.file("tiny");
    let artifact = without_code(DType::F32);
    artifact.write(&file).expect("it is written");
    let with = |change: fn(Builder) -> Builder| {
        let builder = Engine::from_artifact(&file).checkpoint(folder.path());
        let built = change(builder.device(DeviceChoice::Cpu)).build();
        built.map_err(|e| folder.text(&e))
    };
    let refused = |change| with(change).err().expect("an error");
    assert_snapshot!(refused(|of| of.outputs(["pooled"])), @"the artifact `[dir]/tiny` computes `last_hidden_state`, `sentence_embedding`, and `pooled` is requested; compile the model with the output `pooled`");
    assert_snapshot!(refused(|of| of.without(["fuse_residual"])), @"the artifact `[dir]/tiny` is already compiled, so the setting `without` has no effect on it; omit the setting, or compile the model with it");
    assert_snapshot!(refused(|of| of.no_fused_launches(true)), @"the artifact `[dir]/tiny` is already compiled, so the setting `no_fused_launches` has no effect on it; omit the setting, or compile the model with it");
    let (name, _) = &artifact.program.outputs[0];
    assert_eq!(name, "last_hidden_state");
    with(|of| of.outputs(["last_hidden_state"])).expect("it has this output");
}

/// Compiles the tiny model with the weights of linear layers in 8-bit integers.
fn quantized() -> gemmule::engine::Compiled {
    let mut options = crate::common::options(DType::F32);
    options.quantize = Some(Format::INT8);
    crate::common::tiny_compiled_with(&options)
}

#[test]
fn an_artifact_keeps_the_format_of_the_weights() {
    let folder = Folder::whole(&tiny_tensors(DType::F32));
    let file = folder.file("tiny");
    let artifact = Artifact::of(quantized(), Vec::new());
    artifact.write(&file).expect("it is written");
    assert!(Artifact::read(&file).expect("it is sound") == artifact);
    let engine = from_file(&file, &folder).expect("it loads");
    assert_eq!(engine.precision(), Precision::Int8);
    let plain = folder.load().expect("it loads");
    assert_eq!(plain.precision(), Precision::F32);
    let off = difference(&run(&engine), &run(&plain));
    assert!(off > 0.0 && off < 0.1, "{off}");
    let asked = Engine::builder("bert")
        .checkpoint(folder.path())
        .device(DeviceChoice::Cpu)
        .quantize(Format::INT8);
    let asked = asked.build().expect("it loads");
    assert_eq!(difference(&run(&engine), &run(&asked)), 0.0);
}

#[test]
fn another_format_than_the_artifacts_is_refused() {
    let folder = Folder::whole(&tiny_tensors(DType::F32));
    let file = folder.file("tiny");
    without_code(DType::F32)
        .write(&file)
        .expect("it is written");
    let asked = Engine::from_artifact(&file)
        .checkpoint(folder.path())
        .device(DeviceChoice::Cpu)
        .quantize(Format::INT8)
        .build();
    assert_snapshot!(folder.text(&asked.err().expect("an error")), @"the artifact `[dir]/tiny` stores the weights of linear layers in f32, not int8; omit the format, or compile the model with it");
}

#[test]
fn a_format_that_a_gpu_does_not_compute_with_has_no_source() {
    let error = emit(&CudaModel::kernels(&quantized().program)).expect_err("it has no source");
    let error = format!("{error}");
    assert!(
        error.contains("has no CUDA source: its weight is stored in int8, its input in f32; run it on a CPU, or compile without quantization"),
        "{error}"
    );
}

#[test]
fn a_file_that_cannot_be_written_is_named() {
    let folder = Folder::new();
    let error = without_code(DType::F32).write(&folder.file("absent/tiny"));
    let text = folder.text(&error.expect_err("there is no such folder"));
    // Compare only the beginning, because the rest contains the random name of a temporary file.
    assert!(
        text.starts_with(
            "`[dir]/absent/tiny` cannot be written\ncaused by: No such file or directory"
        ),
        "{text}"
    );
}

#[test]
fn a_damaged_file_is_refused() {
    let folder = Folder::new();
    let file = folder.file("tiny");
    let text = || folder.text(&Artifact::read(&file).expect_err("it is damaged"));
    assert_snapshot!(text(), @r"
    `[dir]/tiny` cannot be read
    caused by: No such file or directory (os error 2)
    ");
    without_code(DType::F32)
        .write(&file)
        .expect("it is written");
    let bytes = std::fs::read(&file).expect("it is there");
    let flipped = |at: usize| {
        let mut bytes = bytes.clone();
        bytes[at] ^= 1;
        folder.write("tiny", bytes);
        text()
    };
    assert_snapshot!(flipped(0), @"`[dir]/tiny` is not an artifact of this version of gemmule: it does not start with an artifact header; compile the model again");
    assert_snapshot!(flipped(MAGIC), @"`[dir]/tiny` is not an artifact of this version of gemmule: its checksum does not match, so it is damaged or truncated; compile the model again");
    let damaged = flipped(BODY);
    assert_snapshot!(damaged, @"`[dir]/tiny` is not an artifact of this version of gemmule: its checksum does not match, so it is damaged or truncated; compile the model again");
    for at in (MAGIC..bytes.len()).step_by(61) {
        assert_eq!(flipped(at), damaged, "at {at}");
    }
    for end in [bytes.len() - 1, bytes.len() / 2, BODY] {
        folder.write("tiny", &bytes[..end]);
        assert_eq!(text(), damaged, "cut at {end}");
    }
    folder.write("tiny", &bytes[..BODY - 1]);
    assert_snapshot!(text(), @"`[dir]/tiny` is not an artifact of this version of gemmule: it is truncated; compile the model again");
    folder.write("tiny", "");
    assert_snapshot!(text(), @"`[dir]/tiny` is not an artifact of this version of gemmule: it does not start with an artifact header; compile the model again");
    folder.write("tiny", [bytes.as_slice(), b"more"].concat());
    assert_eq!(text(), damaged);
}

/// Returns the bytes of an artifact file with this body and a valid digest.
fn sealed(body: &[u8]) -> Vec<u8> {
    [b"GEMMULEJ".as_slice(), &Sha256::digest(body), body].concat()
}

#[test]
fn a_body_that_is_no_artifact_is_refused() {
    let folder = Folder::new();
    let text = |body: &[u8]| {
        let file = folder.write("tiny", sealed(body));
        folder.text(&Artifact::read(&file).expect_err("it is not an artifact"))
    };
    assert_snapshot!(text(b""), @"`[dir]/tiny` is not an artifact of this version of gemmule: Hit the end of buffer, expected more data; compile the model again");
    assert_snapshot!(text(&[0xff; 64]), @"`[dir]/tiny` is not an artifact of this version of gemmule: Found a varint that didn't terminate. Is the usize too big for this platform?; compile the model again");
    let whole = postcard::to_stdvec(&without_code(DType::F32)).expect("plain data");
    assert_snapshot!(text(&whole[..whole.len() - 1]), @"`[dir]/tiny` is not an artifact of this version of gemmule: Hit the end of buffer, expected more data; compile the model again");
    assert_snapshot!(text(&[whole.as_slice(), b"more"].concat()), @"`[dir]/tiny` is not an artifact of this version of gemmule: 4 bytes follow its end; compile the model again");
}

#[test]
fn stacks_of_weights_do_not_nest() {
    // Each of the 2²⁰ levels takes only two bytes in the file, but a recursive reader would need a stack frame for each level.
    let depth = 1 << 20;
    let mut body = postcard::to_stdvec(&("name", DType::F32, [0u8; 0])).expect("plain data");
    body.extend([0]); // No kernels.
    body.extend([1, 1, b't']); // One tensor, its name,
    body.extend(postcard::to_stdvec(&(DType::F32, Shape::fixed(&[1]))).expect("plain data"));
    body.extend([1]); // and its storage, a weight.
    for _ in 0..depth {
        body.extend([1, 1]);
    }
    let folder = Folder::new();
    let file = folder.write("tiny", sealed(&body));
    assert!(Artifact::read(&file).is_err());
    let nested = WeightExpr::ConcatRows(vec![WeightExpr::ConcatRows(Vec::new())]);
    let bytes = postcard::to_stdvec(&nested).expect("plain data");
    assert!(postcard::from_bytes::<WeightExpr>(&bytes).is_err());
}

/// Returns the error of reading an artifact that `change` has modified.
fn refused(change: impl FnOnce(&mut Artifact)) -> String {
    let mut artifact = without_code(DType::F32);
    change(&mut artifact);
    let folder = Folder::new();
    let file = folder.file("tiny");
    artifact.write(&file).expect("it is written");
    let text = folder.text(&Artifact::read(&file).expect_err("it is unsound"));
    // Replace the symbols of GEMMs (which contain tile sizes) and the indices and the number of kernels with placeholders. The texts then
    // do not depend on the selected kernels.
    let gemms = artifact.program.kernels.iter().map(KernelSpec::as_kernel);
    let text = gemms
        .filter(|kernel| kernel.template().starts_with("gemm_"))
        .fold(text, |text, k| text.replace(&k.symbol(), "[gemm]"));
    let n = artifact.program.kernels.len();
    let text = text.replace(&format!("kernel 10000 of {n};"), "kernel 10000 of N;");
    (0..n).fold(text, |text, i| {
        text.replace(&format!("its kernel {i} is"), "its kernel N is")
    })
}

#[test]
fn impossible_kernels_are_refused() {
    assert_snapshot!(refused(|a| kernel!(a, Gemm).problem.k = 0), @"`[dir]/tiny` is not an artifact of this version of gemmule: its kernel N is invalid: a width of 0, expected 1 to 2147483647; compile the model again");
    assert_snapshot!(refused(|a| kernel!(a, Gemm).tile = Tile { m: 0, n: 0, k: 0, warps_m: 0, warps_n: 0, stages: 0 }), @"`[dir]/tiny` is not an artifact of this version of gemmule: its kernel N is invalid: Tile { m: 0, n: 0, k: 0, warps_m: 0, warps_n: 0, stages: 0 } is not a tile for f32 with a weight in f32; compile the model again");
    assert_snapshot!(refused(|a| kernel!(a, BiasResidualLayerNorm).width = 0), @"`[dir]/tiny` is not an artifact of this version of gemmule: its kernel N is invalid: a width of 0, expected 1 to 16777216; compile the model again");
    assert_snapshot!(refused(|a| kernel!(a, BiasResidualLayerNorm).eps = f32::NAN), @"`[dir]/tiny` is not an artifact of this version of gemmule: its kernel N is invalid: eps is NaN, expected a finite number above 0; compile the model again");
    assert_snapshot!(refused(|a| kernel!(a, BiasResidualLayerNorm).dtype = DType::F16), @"`[dir]/tiny` is not an artifact of this version of gemmule: its kernel N is invalid: it computes in f16, the program in f32; compile the model again");
    assert_snapshot!(refused(|a| kernel!(a, BiasResidualLayerNorm).teams.warps = 33), @"`[dir]/tiny` is not an artifact of this version of gemmule: its kernel N is invalid: Teams { warps: 33, x_rows: 4 } cannot hold rows of 16 f32; compile the model again");
    assert_snapshot!(refused(|a| kernel!(a, EmbeddingLayerNorm).tables.clear()), @"`[dir]/tiny` is not an artifact of this version of gemmule: its kernel N is invalid: 0 tables, expected 1 to 4; compile the model again");
    assert_snapshot!(refused(|a| kernel!(a, EmbeddingLayerNorm).tables[0].offset = 20), @"`[dir]/tiny` is not an artifact of this version of gemmule: its kernel N is invalid: a table of 20 rows with an offset of 20, expected an offset below the number of rows, and at most 2147483647 rows; compile the model again");
    assert_snapshot!(refused(|a| kernel!(a, MhaOnline).of.heads = u32::MAX), @"`[dir]/tiny` is not an artifact of this version of gemmule: its kernel N is invalid: a width of 4294967295, expected 1 to 16777216; compile the model again");
    assert_snapshot!(refused(|a| kernel!(a, MhaOnline).of.head = 0), @"`[dir]/tiny` is not an artifact of this version of gemmule: its kernel N is invalid: a width of 0, expected 1 to 16777216; compile the model again");
    assert_snapshot!(refused(|a| kernel!(a, MhaShort).max_len = 1 << 20), @"`[dir]/tiny` is not an artifact of this version of gemmule: its kernel N is invalid: the longest sequence of a short kernel is 1048576; with head size 8 in f32 it is from 1 to 256, use the online kernel; compile the model again");
    assert_snapshot!(refused(|a| a.program.kernels.push(KernelSpec::runtime()[1].clone())), @"`[dir]/tiny` is not an artifact of this version of gemmule: its kernel N is invalid: a program cannot contain `pack_scan`, which belongs to the runtime; compile the model again");
}

#[test]
fn programs_that_would_reach_past_their_tensors_are_refused() {
    let weight = |a: &mut Artifact| {
        let tensors = a.program.tensors.iter();
        tensors
            .clone()
            .position(|t| matches!(t.place, Storage::Weight(_)))
            .expect("a weight")
    };
    assert_snapshot!(refused(|a| a.program.steps[1].operands[0] = 10_000), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `layer.0.query+key+value` binds tensor 10000 of 30; compile the model again");
    assert_snapshot!(refused(|a| a.program.steps[1].dispatch = Dispatch::always(10_000)), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `layer.0.query+key+value` launches kernel 10000 of N; compile the model again");
    assert_snapshot!(refused(|a| a.program.steps[1].operands.truncate(1)), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `layer.0.query+key+value` binds 1 tensors to `[gemm]`, which takes 4; compile the model again");
    assert_snapshot!(refused(|a| a.program.outputs[0].1 = 0), @"`[dir]/tiny` is not an artifact of this version of gemmule: the output `last_hidden_state` is not a tensor that a step computes; compile the model again");
    assert_snapshot!(refused(|a| {
        let out = a.program.outputs[0].1;
        if let Storage::Planned { last, .. } = &mut a.program.tensors[out].place { *last -= 1 }
    }), @"`[dir]/tiny` is not an artifact of this version of gemmule: the output `last_hidden_state` is not alive after the last step; compile the model again");
    assert_snapshot!(refused(|a| a.program.steps.swap(1, 2)), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `layer.0.context` binds `layer.0.query+key+value` outside its lifetime; compile the model again");
    assert_snapshot!(refused(|a| a.program.steps.truncate(3)), @"`[dir]/tiny` is not an artifact of this version of gemmule: `hidden` lives from step 0 to 4 of 3; compile the model again");
    assert_snapshot!(refused(|a| {
        let at = weight(a);
        a.program.tensors[at].place = Storage::Weight(WeightExpr::ConcatRows(Vec::new()));
    }), @"`[dir]/tiny` is not an artifact of this version of gemmule: the weight `embeddings.word_embeddings.weight` has no parts; compile the model again");
    assert_snapshot!(refused(|a| {
        let at = weight(a);
        a.program.tensors[at].place = Storage::Weight(WeightExpr::Stored { name: "w".into(), dims: vec![u64::MAX, 2] });
    }), @"`[dir]/tiny` is not an artifact of this version of gemmule: the weight `embeddings.word_embeddings.weight` is [18446744073709551615, 2], at most 1099511627776 elements fit; compile the model again");
    assert_snapshot!(refused(|a| {
        let at = weight(a);
        a.program.tensors[at].element = Element::Value(DType::F16);
    }), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `hidden` binds `embeddings.word_embeddings.weight`, f16 [20, 16], to `table_0`, f32 of 320 elements; compile the model again");
    assert_snapshot!(refused(|a| {
        let ids = a.program.tensors.iter_mut().find(|t| t.place == Storage::Batch(BatchInput::TypeIds));
        ids.expect("the model has segments").place = Storage::Batch(BatchInput::TokenIds);
    }), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `hidden` looks up `type_ids` in a table for TypeIds; compile the model again");
}

#[test]
fn parts_of_batches_that_are_no_partition_are_refused() {
    let rows = |above, up_to| Batches::by_rows(Interval::new(above, up_to));
    let longest = |above, up_to| Batches::by_longest(Interval::new(above, up_to));
    let part = |batches, choice| Entry { batches, choice };
    // Step 1 is the first linear layer, and its kernel has index 1.
    let of_step = |at: usize, parts: Vec<Entry<usize>>| {
        refused(|a| a.program.steps[at].dispatch = Dispatch::of(parts))
    };
    let refused_with = |parts| of_step(1, parts);
    let all = || part(Batches::ALL, 1);
    assert_snapshot!(refused_with(Vec::new()), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `layer.0.query+key+value` has kernels for 0 ranges of batches; 1 to 1024 are possible; compile the model again");
    let many = |n: u64| (0..n).map(|i| part(rows(i, Some(i + 1)), 1));
    assert_snapshot!(refused_with(many(1025).collect()), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `layer.0.query+key+value` has kernels for 1025 ranges of batches; 1 to 1024 are possible; compile the model again");
    // The table has the max number of ranges, but no range covers batches of more than 1024 rows.
    assert_snapshot!(refused_with(many(1024).collect()), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `layer.0.context` reads `layer.0.query+key+value`, which is not computed for all its batches; compile the model again");
    assert_snapshot!(refused_with(vec![all(), part(rows(64, Some(64)), 1)]), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `layer.0.query+key+value` has a kernel for an empty range of batches (rows 65 to 64); compile the model again");
    assert_snapshot!(refused_with(vec![all(), part(rows(64, Some(8)), 1)]), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `layer.0.query+key+value` has a kernel for an empty range of batches (rows 65 to 8); compile the model again");
    assert_snapshot!(refused_with(vec![all(), part(longest(0, Some(0)), 1)]), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `layer.0.query+key+value` has a kernel for an empty range of batches (longest up to 0); compile the model again");
    assert_snapshot!(refused_with(vec![part(rows(0, Some(65)), 1), part(rows(64, None), 1)]), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `layer.0.query+key+value` has two kernels for the same batch (rows above 64; rows up to 65); compile the model again");
    assert_snapshot!(refused_with(vec![part(rows(0, Some(64)), 1), part(longest(8, None), 1)]), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `layer.0.query+key+value` has two kernels for the same batch (longest above 8; rows up to 64); compile the model again");
    assert_snapshot!(refused_with(vec![all(), all()]), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `layer.0.query+key+value` has two kernels for the same batch (any batch; any batch); compile the model again");
    assert_snapshot!(refused_with(vec![part(rows(0, Some(64)), 1), part(rows(65, None), 1)]), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `layer.0.context` reads `layer.0.query+key+value`, which is not computed for all its batches; compile the model again");
    assert_snapshot!(refused_with(vec![part(longest(1, None), 1)]), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `layer.0.context` reads `layer.0.query+key+value`, which is not computed for all its batches; compile the model again");
    // Small batches use kernel 0, whose parameters do not match the operands of the step.
    assert_snapshot!(refused_with(vec![part(rows(0, Some(64)), 0), part(rows(64, None), 1)]), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `layer.0.query+key+value` binds 4 tensors to `embedding_layernorm_f32_w16_token20_type2_position12_eps1em12`, which takes 9; compile the model again");
    // Remove the kernels of a step for batches of more than 64 rows: first of the step that computes the model's first output, and then of
    // the pooling step, whose rows are sequences.
    assert_snapshot!(refused(|a| {
        let out = a.program.outputs[0].1;
        let step = a.program.steps.iter_mut().find(|s| s.operands.last() == Some(&out));
        let step = step.expect("a step computes it");
        let kernel = step.kernels()[0];
        step.dispatch = Dispatch::of(vec![part(rows(0, Some(64)), kernel)]);
    }), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `sentence_embedding` reads `layer.0.hidden`, which is not computed for all its batches; compile the model again");
    assert_snapshot!(refused(|a| {
        let step = a.program.steps.iter_mut().find(|s| s.rows != Symbol::Tokens.into());
        let step = step.expect("a step pools");
        let kernel = step.kernels()[0];
        step.dispatch = Dispatch::of(vec![part(rows(0, Some(64)), kernel)]);
    }), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `sentence_embedding` has no kernel for some numbers of batch; compile the model again");
    // The range of the short kernel includes sequences that are longer than the kernel supports.
    assert_snapshot!(refused(|a| {
        let is_short = |k: &usize| matches!(a.program.kernels[*k], KernelSpec::MhaShort(_));
        let at = a.program.steps.iter().position(|s| s.dispatch.choices().any(is_short));
        let step = &mut a.program.steps[at.expect("attention has a short form")];
        let mut parts = step.dispatch.entries().to_vec();
        parts.truncate(1);
        parts[0].batches = longest(0, Some(1 << 20));
        step.dispatch = Dispatch::of(parts);
    }), @"`[dir]/tiny` is not an artifact of this version of gemmule: the step `layer.0.context` launches a kernel for sequences longer than its limit of 64 tokens; compile the model again");
}

#[test]
fn limits_that_let_ids_past_a_table_are_refused() {
    assert_snapshot!(refused(|a| a.limits.vocabulary = 21), @"`[dir]/tiny` is not an artifact of this version of gemmule: ids of TokenIds are not limited to the 20 rows of their table; compile the model again");
    assert_snapshot!(refused(|a| a.limits.segments = Some(3)), @"`[dir]/tiny` is not an artifact of this version of gemmule: ids of TypeIds are not limited to the 2 rows of their table; compile the model again");
    assert_snapshot!(refused(|a| a.limits.longest = None), @"`[dir]/tiny` is not an artifact of this version of gemmule: ids of Positions are not limited to the 12 rows of their table; compile the model again");
}

/// A source of random weights for any tensor that an artifact requests. Refuses artifacts whose weights have more than 2²⁰ elements, which
/// would take too much memory for a test.
struct Any;

impl WeightSource for Any {
    fn read(
        &self,
        name: &str,
        dims: &[u64],
    ) -> Result<Vec<f32>, gemmule::runtime::weights::CheckpointError> {
        RandomWeights::new(1).read(name, dims)
    }
    fn check(
        &self,
        stored: &[(&str, &[u64])],
    ) -> Result<(), gemmule::runtime::weights::CheckpointError> {
        let n = stored
            .iter()
            .map(|(_, dims)| dims.iter().product::<u64>())
            .fold(0, u64::saturating_add);
        if n > 1 << 20 {
            return Err(gemmule::runtime::weights::CheckpointError::NoCheckpoint {
                folder: "too large".into(),
                found: gemmule::runtime::weights::Found::Nothing,
            });
        }
        Ok(())
    }
    fn surplus(&self, _: &[(&str, &[u64])]) -> Vec<String> {
        Vec::new()
    }
}

#[test]
fn two_thousand_mutations_under_a_fitting_digest_give_an_artifact_that_runs_or_an_error() {
    let folder = Folder::new();
    let whole = postcard::to_stdvec(&without_code(DType::F32)).expect("plain data");
    let batch = gemmule::Batch::from_sequences(&[vec![1, 2, 3], vec![19, 0]]).expect("a batch");
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = |below: usize| {
        // The generator xorshift64 (Marsaglia, 2003).
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let (mut n_read, mut n_run) = (0, 0);
    for _ in 0..2_000 {
        let mut body = whole.clone();
        for _ in 0..1 + random(3) {
            let at = random(body.len());
            match random(5) {
                0 => body[at] ^= 1 << random(8),
                1 => body[at] = [0, 1, 0x7f, 0x80, 0xff][random(5)],
                2 => drop(body.remove(at)),
                3 => body.insert(at, random(256) as u8),
                _ => {
                    // Copy up to 8 random bytes of the body to another position, so that an index or a name may become another valid one.
                    let (from, n) = (random(body.len() - 8), 1 + random(8));
                    let at = at.min(body.len() - 8);
                    body.copy_within(from..from + n, at);
                }
            }
        }
        let file = folder.write("tiny", sealed(&body));
        let Ok(artifact) = Artifact::read(&file) else {
            continue;
        };
        n_read += 1;
        // If the artifact can be read, its kernels have source, and it runs with random weights or returns an error.
        emit(&CudaModel::kernels(&artifact.program)).expect("a sound kernel has source");
        n_run += usize::from(ran(artifact, &batch));
    }
    // Some mutations leave an artifact valid, for example mutations of names.
    assert!(
        n_read >= 20 && n_run >= 20,
        "{n_read} were read, {n_run} ran"
    );
}

/// Runs an artifact on the CPU. Returns whether it ran without an error.
fn ran(artifact: Artifact, batch: &gemmule::Batch) -> bool {
    use gemmule::runtime::cpu::{CpuModel, CpuSession};
    let program = artifact.program;
    let stored: Vec<(&str, &[u64])> = program
        .tensors
        .iter()
        .filter_map(|t| match &t.place {
            Storage::Weight(expr) => Some(expr.stored()),
            _ => None,
        })
        .flatten()
        .collect();
    if Any.check(&stored).is_err() || batch.check(&artifact.limits).is_err() {
        return false;
    }
    let Ok(model) = CpuModel::load(
        program,
        gemmule::engine::Threads::usual().unwrap(),
        &Any,
        &|_, _| (),
    ) else {
        return false;
    };
    CpuSession::new(model.into(), &gemmule::AllocatorChoice::default())
        .is_ok_and(|mut session| session.run(batch).is_ok())
}
