//! Tests with handwritten archives. gemmule's `tests/models/torch.rs` reads files written by PyTorch.

use std::io::Write;

use super::{Tensor, TorchError, open};
use crate::Element;

/// Writes an archive with entries `(name, contents)`.
fn written(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = rawzip::ZipArchiveWriter::new(Vec::new());
    for (name, contents) in entries {
        let (mut entry, config) = archive.new_file(name).start().expect("an entry");
        let mut writer = config.wrap(&mut entry);
        writer.write_all(contents).expect("memory");
        let (_, descriptor) = writer.finish().expect("memory");
        entry.finish(descriptor).expect("memory");
    }
    archive.finish().expect("memory")
}

fn opened(entries: &[(&str, &[u8])]) -> Result<Vec<(String, Tensor)>, TorchError> {
    of_bytes(&written(entries))
}

fn of_bytes(bytes: &[u8]) -> Result<Vec<(String, Tensor)>, TorchError> {
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(bytes).expect("room");
    Ok(open(&file)?.into_iter().collect())
}

/// Returns a pickle of a dictionary with one f32 tensor `w`, with these sizes, strides and offset, in a storage of `n` elements.
fn pickled(n: u8, offset: u8, dims: &[u8], strides: &[u8]) -> Vec<u8> {
    let mut pickle =
        b"\x80\x02}q\x00X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n(".to_vec();
    pickle.extend(
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK",
    );
    pickle.extend([n]);
    pickle.extend(b"tQK");
    pickle.push(offset);
    for numbers in [dims, strides] {
        pickle.push(b'(');
        numbers.iter().for_each(|&n| pickle.extend([b'K', n]));
        pickle.push(b't');
    }
    pickle.extend(b"\x89ccollections\nOrderedDict\n)RtRs.");
    pickle
}

fn with(pickle: &[u8]) -> Result<Vec<(String, Tensor)>, TorchError> {
    opened(&[("a/data.pkl", pickle), ("a/data/0", &[0; 24])])
}

fn refused(pickle: &[u8]) -> String {
    with(pickle).expect_err("it is refused").to_string()
}

#[test]
fn a_contiguous_tensor_is_found_at_its_place() {
    let found = with(&pickled(6, 2, &[2, 2], &[2, 1])).expect("it is valid");
    let [(name, tensor)] = &found[..] else {
        panic!("{found:?}")
    };
    assert_eq!((name.as_str(), tensor.element), ("w", Element::F32));
    assert_eq!(tensor.dims, [2, 2]);
    assert_eq!(tensor.bytes.end - tensor.bytes.start, 16);
    // The stride of a dimension of size 1 is arbitrary.
    with(&pickled(6, 0, &[1, 6], &[9, 1])).expect("it is contiguous");
    with(&pickled(6, 0, &[0, 6], &[9, 1])).expect("it is empty");
}

#[test]
fn views_that_leave_their_storage_are_refused() {
    let cases = [
        (
            pickled(6, 0, &[3, 2], &[2, 2]),
            "the tensor `w`: it ends at element 7 of a storage of 6 elements",
        ),
        (
            pickled(6, 7, &[0], &[1]),
            "the tensor `w`: it ends at element 7 of a storage of 6 elements",
        ),
        (
            pickled(6, 3, &[2, 2], &[2, 1]),
            "the tensor `w`: it ends at element 7 of a storage of 6 elements",
        ),
        (
            pickled(7, 0, &[7], &[1]),
            "the tensor `w`: its storage has 24 bytes; expected 7 elements of 4 bytes",
        ),
        (
            pickled(6, 0, &[6], &[1, 1]),
            "the tensor `w`: it has 1 sizes and 2 strides",
        ),
    ];
    for (pickle, problem) in cases {
        assert_eq!(refused(&pickle), problem);
    }
    const LARGE: i64 = 1 << 56;
    let with_views = |offset: i64, dims: &[i64], strides: &[i64]| {
        let mut pickle =
            b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n(".to_vec();
        pickle.extend(storage(b"ctorch\nFloatStorage\n", 6));
        integer(&mut pickle, offset);
        for numbers in [dims, strides] {
            pickle.push(b'(');
            numbers.iter().for_each(|&n| integer(&mut pickle, n));
            pickle.push(b't');
        }
        pickle.extend(b"tRs.");
        refused(&pickle)
    };
    let overflow = "the tensor `w`: its sizes exceed 64 bits";
    assert_eq!(with_views(0, &[LARGE, LARGE], &[1, 1]), overflow);
    assert_eq!(with_views(0, &[LARGE, 1], &[LARGE, 1]), overflow);
    assert_eq!(with_views(0, &[i64::MAX; 3], &[1, 0, 0]), overflow);
    assert_eq!(
        with_views(i64::MAX, &[6], &[1]),
        "the tensor `w`: it ends at element 9223372036854775813 of a storage of 6 elements"
    );
    assert_eq!(
        with_views(0, &[-1], &[1]),
        "the tensor `w`: its size is -1; expected at least 0"
    );
    assert_eq!(
        with_views(5, &[6], &[-1]),
        "the tensor `w`: its stride is -1; expected at least 0"
    );
    assert_eq!(
        with_views(-1, &[6], &[1]),
        "the tensor `w`: its offset is -1; expected at least 0"
    );
    // A single element, repeated by a stride of 0.
    assert_eq!(
        with_views(0, &[1 << 20, 1 << 20], &[0, 0]),
        "the tensor `w`: it is a view of sizes [1048576, 1048576] and strides [0, 0], which takes 4398046511104 bytes to gather, above the limit of 1073741824; save it with Tensor.contiguous()"
    );
}

/// Appends the opcode for an integer.
fn integer(pickle: &mut Vec<u8>, n: i64) {
    pickle.extend([0x8a, 8]);
    pickle.extend(n.to_le_bytes());
}

/// Returns the opcodes that refer to the storage with key `0` and `n` elements. `class` contains the opcode for its class, such as
/// `FloatStorage`.
fn storage(class: &[u8], n: i64) -> Vec<u8> {
    let mut pickle = b"(X\x07\x00\x00\x00storage".to_vec();
    pickle.extend(class);
    pickle.extend(b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu");
    integer(&mut pickle, n);
    pickle.extend(b"tQ");
    pickle
}

#[test]
fn views_of_any_strides_are_gathered() {
    let span: Vec<u8> = (0..24).collect();
    let gathered = |dims: &[u8], strides: &[u8]| {
        let found = with(&pickled(6, 0, dims, strides)).expect("it is valid");
        let (_, tensor) = &found[0];
        assert!(!tensor.is_contiguous());
        let n = (tensor.bytes.end - tensor.bytes.start) as usize;
        let mut out = Vec::new();
        tensor.gather(&span[..n], &mut out);
        // The first byte identifies an element.
        let first = |element: &[u8; 4]| element[0] / 4;
        out.as_chunks::<4>()
            .0
            .iter()
            .map(first)
            .collect::<Vec<u8>>()
    };
    assert_eq!(gathered(&[2, 3], &[1, 2]), [0, 2, 4, 1, 3, 5]);
    assert_eq!(gathered(&[3, 1], &[2, 9]), [0, 2, 4]);
    assert_eq!(gathered(&[2, 2], &[0, 5]), [0, 5, 0, 5]);
    assert_eq!(gathered(&[4], &[0]), [0; 4]);
}

#[test]
fn types_that_only_newer_files_have_are_named() {
    let typed = |dtype: &[u8], n: i64| {
        let mut pickle =
            b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v3\n(".to_vec();
        pickle.extend(storage(b"ctorch.storage\nUntypedStorage\n", n));
        pickle.extend(b"K\x01K\x04\x85K\x01\x85\x89N");
        pickle.extend(dtype);
        pickle.extend(b"tRs.");
        with(&pickle)
    };
    let found = typed(b"ctorch\nfloat8_e4m3fn\n", 24).expect("it is valid");
    assert_eq!(found[0].1.element.to_string(), "F8_E4M3");
    assert_eq!(found[0].1.bytes.end - found[0].1.bytes.start, 4);
    let found = typed(b"ctorch\nbfloat16\n", 24).expect("it is valid");
    assert_eq!(found[0].1.element, Element::BF16);
    // For a storage of bytes, the number of elements is the number of bytes.
    let short = typed(b"ctorch\nfloat32\n", 16).expect_err("it is refused");
    assert_eq!(
        short.to_string(),
        "the tensor `w`: it ends at element 5 of a storage of 4 elements"
    );
    let other = typed(b"ctorch\nqint8\n", 24).expect_err("it is refused");
    assert_eq!(
        other.to_string(),
        "the pickle names `torch.qint8`, which a dictionary of tensors does not need; it is not loaded"
    );
}

#[test]
fn a_state_dict_may_be_a_part_of_a_checkpoint() {
    let plain = pickled(6, 0, &[6], &[1]);
    let tensors = &plain[2..plain.len() - 1];
    let wrapped = |key: &[u8], value: &[u8]| {
        let mut pickle = b"\x80\x02}(X\x05\x00\x00\x00epochK\x03X".to_vec();
        pickle.extend((key.len() as u32).to_le_bytes());
        pickle.extend([key, value, b"u."].concat());
        with(&pickle)
    };
    for key in [&b"state_dict"[..], b"model_state_dict"] {
        let found = wrapped(key, tensors).expect("it is valid");
        assert_eq!(found[0].0, "w");
    }
    let epoch = "`epoch` is no tensor; expected the state dict of a model: torch.save(model.state_dict(), FILE)";
    for (key, value) in [(&b"optimizer"[..], tensors), (b"state_dict", b"K\x01")] {
        let error = wrapped(key, value).expect_err("it is refused");
        assert_eq!(error.to_string(), epoch);
    }
}

#[test]
fn other_functions_and_instructions_are_refused_by_name() {
    let cases: [(&[u8], &str); 12] = [
        (
            b"\x80\x02cposix\nsystem\nX\x02\x00\x00\x00ls\x85R.",
            "the pickle names `posix.system`, which a dictionary of tensors does not need; it is not loaded",
        ),
        (
            b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
            "the pickle names `builtins.eval`, which a dictionary of tensors does not need; it is not loaded",
        ),
        (
            b"\x80\x02(ios\nsystem\n.",
            "the pickle uses the instruction INST at byte 3, which a dictionary of tensors does not need; it is not loaded",
        ),
        (
            b"\x80\x02ctorch\nSize\n)R.",
            "the pickle calls `torch.Size` with unexpected arguments at byte 15",
        ),
        (
            b"\x80\x04\x8c\x05posix\x8c\x06system\x93)\x81.",
            "the pickle names `posix.system`, which a dictionary of tensors does not need; it is not loaded",
        ),
        (
            b"\x80\x02ctorch\nSize\n)\x81.",
            "the pickle uses the instruction NEWOBJ at byte 15, which a dictionary of tensors does not need; it is not loaded",
        ),
        (
            b"\x80\x02\xff.",
            "the pickle uses the instruction 0xff at byte 2, which a dictionary of tensors does not need; it is not loaded",
        ),
        (
            b"\x80\x02}",
            "the pickle ends early, at byte 3; download the file again",
        ),
        (
            b"\x80\x02",
            "the pickle ends early, at byte 2; download the file again",
        ),
        (b"\x80\x00.", "the pickle has version 0; expected 2 to 5"),
        (
            b"\x80\x02(t.",
            "its pickle is no dictionary of tensors by name; expected the state dict of a model: torch.save(model.state_dict(), FILE)",
        ),
        (
            b"\x80\x02h\x07.",
            "the pickle is malformed at byte 4: a memo entry is read before it is written",
        ),
    ];
    for (pickle, problem) in cases {
        assert_eq!(refused(pickle), problem);
    }
}

#[test]
fn nesting_cycles_and_copies_are_bounded() {
    // Nested tuples, a list that contains itself, and a value that is recalled again and again.
    let mut nested = b"\x80\x02)".to_vec();
    nested.extend(std::iter::repeat_n(0x85, 1 << 20));
    nested.push(b'.');
    refused(&nested);
    refused(b"\x80\x02]q\x00h\x00a.");
    let mut copies = b"\x80\x02Nq\x00".to_vec();
    copies.extend(b"h\x00".repeat(5 << 20));
    let large = "the pickle has more than 4194304 values; expected a dictionary of tensors";
    assert_eq!(refused(&copies), large);
    assert_eq!(
        refused(&[&b"\x80\x02"[..], &vec![b'}'; 5 << 20]].concat()),
        large
    );
    assert_eq!(refused(b"\x80\x02}r\xff\xff\xff\xff."), large);
    // Many calls that each copy a large tuple or list.
    for (function, open, close, item) in [
        (&b"ctorch\nSize\n"[..], &b"("[..], b't', b'N'),
        (b"ccollections\nOrderedDict\n", b"](", b'e', b'0'),
    ] {
        let mut pickle = [b"\x80\x02", function, b"q\x00K\x01K\x01\x86q\x01", open].concat();
        for _ in 0..1 << 20 {
            match item {
                b'N' => pickle.push(b'N'),
                _ => pickle.extend(b"h\x01"),
            }
        }
        pickle.extend([close, 0x85, b'q', 2]);
        for _ in 0..1 << 20 {
            pickle.extend(b"h\x00h\x02R");
        }
        pickle.push(b'.');
        assert_eq!(refused(&pickle), large);
    }
    let deep = [&b"\x80\x02"[..], &[b'('; 1025]].concat();
    assert_eq!(
        refused(&deep),
        "the pickle nests more than 1024 values; expected a dictionary of tensors"
    );
    let long = b"\x80\x02X\xff\xff\xff\xff.";
    assert_eq!(
        refused(long),
        "the pickle has a text of 4294967295 bytes, above the limit of 1048576; expected a dictionary of tensors"
    );
    // Names in messages are truncated and have no control characters.
    let mut named = b"\x80\x02X\x00\x04\x00\x00\x1b[31m".to_vec();
    named.extend([b'a'; 1024 - 5]);
    named.extend(b"X\x01\x00\x00\x00b\x93.");
    let error = refused(&named);
    assert!(
        error.starts_with("the pickle names `\\u{1b}[31maaa"),
        "{error}"
    );
    assert!(error.len() < 300, "{error}");
}

#[test]
fn archives_that_are_no_checkpoint_are_refused() {
    let pickle = &pickled(6, 0, &[6], &[1])[..];
    let of = |entries: &[(&str, &[u8])]| opened(entries).expect_err("it is refused").to_string();
    assert_eq!(
        of(&[("a/version", b"3")]),
        "its zip archive has no `data.pkl`; expected a file of torch.save"
    );
    assert_eq!(
        of(&[("a/data.pkl", pickle)]),
        "the tensor `w`: its values, `a/data/0`, are missing"
    );
    assert_eq!(
        of(&[("a/data.pkl", pickle), ("a/byteorder", b"big")]),
        "its values are big-endian; save it again on a little-endian machine"
    );
    assert_eq!(
        of(&[("a/data.pkl", pickle), ("b/data.pkl", pickle)]),
        "its zip archive is damaged: it has more than one `data.pkl`; download it again"
    );
    assert_eq!(
        of(&[("a/data.pkl", pickle), ("a/data/0", b""), ("a/data/0", b"")]),
        "its zip archive is damaged: it has two entries `a/data/0`; download it again"
    );
    let of = |bytes: &[u8]| of_bytes(bytes).expect_err("it is refused").to_string();
    let no_zip = "it is no file of torch.save: it does not begin as a zip archive; if it was cut short, download it again";
    assert_eq!(of(b""), no_zip);
    assert_eq!(of(b"<!doctype html>"), no_zip);
    assert!(of(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.").contains("PyTorch before 1.6"));
    assert!(of(b"\x80\x04\x95\r").contains("PyTorch before 1.6"));
    assert!(of(b"version https://git-lfs.github.com/spec/v1\n").contains("git lfs pull"));
    assert!(of(b"PK\x03\x04 and no more").contains("its zip archive is damaged"));
}

#[test]
fn entries_that_are_not_stored_as_they_are_are_refused() {
    let pickle = &pickled(6, 0, &[6], &[1])[..];
    let entries: [(&str, &[u8]); 2] = [("a/data/0", &[0; 24]), ("a/data.pkl", pickle)];
    // Changes a byte of the first entry of the central directory.
    let changed = |offset: usize, value: u8| {
        let mut bytes = written(&entries);
        let at = bytes.windows(4).position(|w| w == b"PK\x01\x02");
        bytes[at.expect("a directory") + offset] = value;
        of_bytes(&bytes).expect_err("it is refused").to_string()
    };
    assert_eq!(
        changed(10, 8),
        "its entry `a/data/0` is compressed, which torch.save does not do; save the file again"
    );
    assert_eq!(
        changed(8, 1),
        "its entry `a/data/0` is encrypted; save the file again"
    );
    // Byte 23 is the highest byte of the entry's compressed size.
    let large = changed(23, 0x7f);
    assert!(large.starts_with("its zip archive is damaged: "), "{large}");
    let mut bytes = written(&entries);
    let at = bytes.windows(4).position(|w| w == b"_reb");
    bytes[at.expect("a name")] ^= 1;
    let error = of_bytes(&bytes).expect_err("it is refused").to_string();
    assert!(
        error.starts_with("its zip archive is damaged: the entry `a/data.pkl`"),
        "{error}"
    );
}
