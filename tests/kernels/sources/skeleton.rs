//! The skeleton of a generated text: its lines without the numbers and types in which sources of one template differ.

/// Returns the skeleton of `text`: placeholders replace `symbol`, numbers and storage types, and one entry replaces several equal entries
/// of a list. Two renderings of a template have the same skeleton if they take the same branches and insert the same words and expressions.
pub fn skeleton(symbol: &str, text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        push_without_repeats(&plain(line, symbol), &mut out);
        out.push('\n');
    }
    out
}

/// Returns `line` with `@` for the symbol, `T` for a storage type, and `#` for a number, also within a word such as `float4` or
/// `m64n96k16`. A number on the left of ` + ` is removed, because address expressions omit an offset of 0.
fn plain(line: &str, symbol: &str) -> String {
    const ADDED: &str = " + ";
    let mut out = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(first) = rest.chars().next() {
        let in_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let n_word = rest.find(|c| !in_word(c)).unwrap_or(rest.len());
        let taken = if first.is_ascii_digit() {
            let n_number = number(rest);
            if rest[n_number..].starts_with(ADDED) {
                n_number + ADDED.len()
            } else {
                out.push('#');
                n_number
            }
        } else if n_word == 0 {
            out.push(first);
            first.len_utf8()
        } else {
            match &rest[..n_word] {
                word if word == symbol => out.push('@'),
                "float" | "f16" | "bf16" | "f16x2" | "bf16x2" => out.push('T'),
                word => push_without_digits(word, &mut out),
            }
            n_word
        };
        rest = &rest[taken..];
    }
    out
}

/// Returns the number of bytes of the number at the start of `text`, such as `12`, `0.125f`, `1e-12f` or `0xffff`.
fn number(text: &str) -> usize {
    let mut end = 0;
    let bytes = text.as_bytes();
    while let Some(&byte) = bytes.get(end) {
        let follows = bytes.get(end + 1).is_some_and(u8::is_ascii_digit);
        let exponent = end > 0 && bytes[end - 1] == b'e' && !text.starts_with("0x");
        match byte {
            b'.' if follows => {}
            b'-' | b'+' if follows && exponent => {}
            _ if byte.is_ascii_alphanumeric() => {}
            _ => break,
        }
        end += 1;
    }
    end
}

fn push_without_digits(word: &str, out: &mut String) {
    let mut digits = false;
    for c in word.chars() {
        if !c.is_ascii_digit() {
            out.push(c);
        } else if !digits {
            out.push('#');
        }
        digits = c.is_ascii_digit();
    }
}

/// Appends `line`, with one entry in place of several equal neighboring entries of a list. The register lists `{ %0, %1 }` and
/// `{ %0, %1, %2, %3 }` then have the same skeleton, because `#` already replaces all numbers.
fn push_without_repeats(line: &str, out: &mut String) {
    let mut last = None;
    for entry in line.split(", ") {
        // Ignore the braces around a list when its first and last entry are compared.
        let begin = entry.split(" }").next();
        match last {
            None => out.push_str(entry),
            Some(last) if begin == Some(last) => out.push_str(&entry[last.len()..]),
            Some(_) => out.extend([", ", entry]),
        }
        last = entry.rsplit("{ ").next();
    }
}

#[test]
fn sources_of_other_sizes_and_storage_have_one_skeleton() {
    let one = "constexpr int N = 768;\nconst float EPS = 1e-12f;\nusing T = f16;  // add_f16_w768\n\
               asm(\"m64n96k16.f32.f16 { %0, %1, %2 }, %3\"\n: \"+f\"(s[0]), \"+f\"(s[1]), \"+f\"(s[2])\n: x);\n\
               float4* add_f16_w768(f16x2 x) { x + 8 + 24 * h; y & 0xffe; }";
    let other = "constexpr int N = 12;\nconst float EPS = 0.00001f;\nusing T = bf16;  // add_bf16_w12\n\
                 asm(\"m64n8k16.f32.bf16 { %0, %1 }, %2\"\n: \"+f\"(s[0]), \"+f\"(s[1])\n: x);\n\
                 float2* add_bf16_w12(bf16x2 x) { x + 24 * h; y & 0xf; }";
    let expected = "constexpr int N = #;\nconst T EPS = #;\nusing T = T;  // @\n\
                    asm(\"m#n#k#.f#.T { %# }, %#\"\n: \"+f\"(s[#]), \"+f\"(s[#])\n: x);\n\
                    float#* @(T x) { x + # * h; y & #; }\n";
    assert_eq!(skeleton("add_f16_w768", one), expected);
    assert_eq!(skeleton("add_bf16_w12", other), expected);
}

#[test]
fn sources_that_differ_in_a_word_have_two_skeletons() {
    let plain = "constexpr bool BIAS = false;\nreturn identity(x) - 1;";
    for other in [
        "constexpr bool BIAS = true;\nreturn identity(x) - 1;",
        "constexpr bool BIAS = false;\nreturn gelu(x) - 1;",
        "constexpr bool BIAS = false;\nreturn identity(x) + 1;",
        "constexpr bool BIAS = false;\n\nreturn identity(x) - 1;",
        "constexpr bool BIAS = false;\nreturn identity(x, y) - 1;",
    ] {
        assert_ne!(skeleton("k", plain), skeleton("k", other), "{other}");
    }
}
