//! Archives written by hand. The files of PyTorch itself are read in gemmule's `tests/torch.rs`.

use std::io::Write;

use super::{Element, Tensor, TorchError, open};

/// Writes an archive of `(name, contents)` and opens it.
fn opened(entries: &[(&str, &[u8])]) -> Result<Vec<(String, Tensor)>, TorchError> {
    let mut archive = rawzip::ZipArchiveWriter::new(Vec::new());
    for (name, contents) in entries {
        let (mut entry, config) = archive.new_file(name).start().expect("an entry");
        let mut writer = config.wrap(&mut entry);
        writer.write_all(contents).expect("memory");
        let (_, descriptor) = writer.finish().expect("memory");
        entry.finish(descriptor).expect("memory");
    }
    of_bytes(&archive.finish().expect("memory"))
}

fn of_bytes(bytes: &[u8]) -> Result<Vec<(String, Tensor)>, TorchError> {
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(bytes).expect("room");
    Ok(open(&file)?.into_iter().collect())
}

/// The instructions of a dictionary with one tensor `w` of f32, with these sizes, strides and offset, in a storage of `n` elements.
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
fn views_that_are_not_contiguous_or_leave_their_storage_are_refused() {
    let cases = [
        (
            pickled(6, 0, &[2, 3], &[1, 2]),
            "the tensor `w`: it is a view of sizes [2, 3] and strides [1, 2], not stored contiguously; save it with Tensor.contiguous()",
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
    // Sizes whose product exceeds 64 bits, and negative ones.
    let with_dims = |dim: &[u8; 8]| {
        let plain = pickled(6, 0, &[6], &[1]);
        let at = plain.windows(5).position(|w| w == b"(K\x06t(");
        let at = at.expect("the sizes");
        let mut pickle = plain[..at + 1].to_vec();
        for _ in 0..2 {
            pickle.extend([0x8a, 8]);
            pickle.extend(dim);
        }
        pickle.extend(b"t(K\x01K\x01t");
        pickle.extend(&plain[at + 8..]);
        refused(&pickle)
    };
    assert_eq!(
        with_dims(&[0, 0, 0, 0, 0, 0, 0, 1]),
        "the tensor `w`: its sizes exceed 64 bits"
    );
    assert_eq!(
        with_dims(&[0xff; 8]),
        "the tensor `w`: its size is -1; expected at least 0"
    );
}

#[test]
fn other_functions_and_instructions_are_refused_by_name() {
    let cases: [(&[u8], &str); 9] = [
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
            "the pickle uses the instruction 0x69 at byte 3, which a dictionary of tensors does not need",
        ),
        (
            b"\x80\x02ctorch\nSize\n)R.",
            "the pickle calls `torch.Size` with unexpected arguments at byte 15",
        ),
        (b"\x80\x02}", "the pickle ends early, at byte 3"),
        (b"\x80\x02", "the pickle ends early, at byte 2"),
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
    // Tuples within tuples, a list that contains itself, and a value that is recalled without end.
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
    let of = |bytes: &[u8]| of_bytes(bytes).expect_err("it is refused").to_string();
    let no_zip = "it is no file of torch.save: it does not begin as a zip archive; if it was cut short, download it again";
    assert_eq!(of(b""), no_zip);
    assert_eq!(of(b"<!doctype html>"), no_zip);
    assert!(of(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.").contains("PyTorch before 1.6"));
    assert!(of(b"PK\x03\x04 and no more").contains("its zip archive is damaged"));
}
