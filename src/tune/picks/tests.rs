//! What a file of picks may hold, and each refusal by its text.

use insta::assert_snapshot;
use proptest::{prelude::*, test_runner::Config};

use super::*;
use crate::{
    kernels::{attention::MhaShort, gemm::Tile},
    tensor::DType,
    tune::{
        Choice,
        problem::tests::{attention, gemm},
    },
};

fn made() -> Made {
    Made {
        card: Card {
            name: "NVIDIA H200".to_owned(),
            capability: (9, 0),
            n_sms: 132,
        },
        nvrtc: (13, 0),
    }
}

fn range(up_to: Option<u64>, choice: Choice) -> Range {
    Range { up_to, choice }
}

fn picked(ranges: Vec<Range>) -> Picked {
    let timing = |size, us, guess_us| Timing { size, us, guess_us };
    Picked {
        digest: "0123456789abcdef".repeat(4),
        effort: Effort::Quick,
        ranges,
        timings: vec![timing(16, 3.25, 3.5), timing(8192, 71.034, 80.0)],
    }
}

fn picks() -> Picks {
    let mut picks = Picks::new(made());
    picks.gemmule = "0.1.0".to_owned();
    let tiles: Vec<Choice> = gemm().candidates();
    let ranges = vec![range(Some(362), tiles[5]), range(None, tiles[0])];
    picks.problems.insert(gemm().key(), picked(ranges));
    let ranges = vec![
        range(Some(64), Choice::MhaShort { max_len: 64 }),
        range(None, Choice::MhaOnline),
    ];
    picks.problems.insert(attention(64).key(), picked(ranges));
    picks
}

fn text() -> String {
    picks().to_ron().expect("they are sound")
}

/// As by people: without the checksum.
fn changed(from: &str, to: &str) -> Result<Picks, PicksError> {
    let text = text();
    assert!(text.contains(from), "{from} is in no file:\n{text}");
    let lines = text.lines().filter(|line| !line.contains("checksum"));
    let text: String = lines.map(|line| format!("{line}\n")).collect();
    Picks::parse(text.replace(from, to).as_bytes())
}

/// Why a changed file is refused, when it is read or when a problem asks for its ranges.
fn refusal(from: &str, to: &str) -> PicksError {
    let of_problems = |picks: Picks| -> Result<(), PicksError> {
        picks.ranges(&gemm())?;
        picks.ranges(&attention(64)).map(drop)
    };
    changed(from, to)
        .and_then(of_problems)
        .expect_err("it is refused")
}

#[test]
fn picks_read_back_as_they_were_written() {
    assert_eq!(Picks::parse(text().as_bytes()), Ok(picks()));
    assert_eq!(
        Picks::parse(text().as_bytes()).unwrap().to_ron().unwrap(),
        text()
    );
    let empty = Picks::new(made());
    let text = empty.to_ron().unwrap();
    assert_eq!(Picks::parse(text.as_bytes()), Ok(empty));
}

#[test]
fn a_file_is_made_to_be_read_and_compared() {
    assert_snapshot!(text());
}

#[test]
fn a_problem_gets_its_ranges_and_no_others() {
    let picks = picks();
    let ranges = picks.ranges(&gemm()).unwrap().unwrap();
    assert_eq!(ranges.len(), 2);
    assert_eq!(picks.ranges(&attention(128)), Ok(None));
    assert_eq!(picks.clone().only(&[attention(128)]).problems.len(), 0);
    assert_eq!(picks.only(&[gemm()]).problems.len(), 1);
}

#[test]
fn a_change_shows_in_the_checksum_unless_it_is_taken_out() {
    let changed_text = text().replace("Some(362)", "Some(363)");
    let error = Picks::parse(changed_text.as_bytes()).unwrap_err();
    assert_snapshot!(error, @"their checksum does not fit, so they were damaged or changed; whoever changed them on purpose takes the line `checksum` out");
    let picks = changed("Some(362)", "Some(363)").unwrap();
    assert_eq!(picks.problems[&gemm().key()].ranges[0].up_to, Some(363));
}

#[test]
fn picks_of_another_card_are_refused() {
    let mut here = made();
    assert_eq!(picks().check_made(&here), Ok(()));
    here.card.name = "NVIDIA H100 80GB HBM3".to_owned();
    assert_snapshot!(picks().check_made(&here).unwrap_err(), @"they were measured on NVIDIA H200 (capability 9.0, 132 multiprocessors), and this is NVIDIA H100 80GB HBM3 (capability 9.0, 132 multiprocessors)");
    let mut part = made();
    part.card.n_sms = 16;
    assert_snapshot!(picks().check_made(&part).unwrap_err(), @"they were measured on NVIDIA H200 (capability 9.0, 132 multiprocessors), and this is NVIDIA H200 (capability 9.0, 16 multiprocessors)");
}

#[test]
fn picks_of_another_nvrtc_are_refused() {
    let mut here = made();
    here.nvrtc = (12, 8);
    assert_snapshot!(picks().check_made(&here).unwrap_err(), @"they were measured with code of NVRTC 13.0, and this is NVRTC 12.8");
}

#[test]
fn picks_of_other_kernels_are_refused() {
    let digest = "0123456789abcdef".repeat(4);
    assert_eq!(picks().check_problem(&gemm(), &digest), Ok(()));
    assert_eq!(picks().check_problem(&attention(128), "another"), Ok(()));
    let error = picks().check_problem(&gemm(), &"0".repeat(64)).unwrap_err();
    assert_snapshot!(error, @"the kernels of `gemm_bias_gelu_f16_n3072_k768` are not those that were measured; this version of gemmule generates others");
}

#[test]
fn damaged_and_cut_files_are_refused() {
    let text = text();
    assert_snapshot!(Picks::parse(b"").unwrap_err(), @"they do not read as picks: 1:1: Expected opening `(` for struct `Document`");
    assert_snapshot!(Picks::parse(&text.as_bytes()[..text.len() / 2]).unwrap_err(), @"they do not read as picks: 19:64-19:65: Expected comma");
    assert_snapshot!(Picks::parse(b"\xff\xfe").unwrap_err(), @"they are no text in UTF-8");
    assert_snapshot!(Picks::parse(&vec![b' '; MOST_BYTES + 1]).unwrap_err(), @"they are more than 1048576 bytes, which no tuner writes");
    assert_snapshot!(refusal("problems: [", "surprise: 1, problems: ["), @"they do not read as picks: 11:5-11:13: Unexpected field named `surprise` in `Document`, expected one of `format`, `gemmule`, `card`, `nvrtc`, `checksum`, or `problems` instead");
    assert_snapshot!(refusal("digest: \"0", "digest: \"\\u{1b}["), @"the digest of `gemm_bias_gelu_f16_n3072_k768` is �[123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef, expected 64 hexadecimal digits");
    assert_snapshot!(refusal("effort: Quick", "effort: Endless"), @"they do not read as picks: 15:21-15:28: Unexpected variant named `Endless` in enum `Effort`, expected one of `Quick`, `Full`, or `Chain` instead");
    let deep = format!("(format: {}1", "(".repeat(100_000));
    assert!(Picks::parse(deep.as_bytes()).is_err());
    for cut in 0..text.len() {
        assert!(Picks::parse(&text.as_bytes()[..cut]).is_err() || text[cut..].trim().is_empty());
    }
}

#[test]
fn another_format_is_refused_by_its_number() {
    assert_snapshot!(refusal("format: 1", "format: 2"), @"their format is 2, this version of gemmule reads format 1");
    let other = Picks::parse(b"(format: 7, what: [1, 2], ever: \"x\")");
    assert_snapshot!(other.unwrap_err(), @"their format is 7, this version of gemmule reads format 1");
}

#[test]
fn a_tile_that_is_no_candidate_is_refused() {
    assert_snapshot!(refusal("m: 64, n: 64", "m: 4096, n: 64"), @"`gemm_bias_gelu_f16_n3072_k768` has no candidate t4096x64x64_w2x2_s4; it has t128x256x32_w2x4_s4, t128x192x32_w2x4_s4, t128x128x64_w2x2_s3, t128x64x64_w2x2_s4, t64x128x64_w2x2_s4, t64x64x64_w2x2_s4, t32x64x64_w1x4_s4, t16x64x64_w1x4_s5, t16x32x64_w1x2_s5");
    assert_snapshot!(refusal("stages: 4", "stages: 4000000000"), @"`gemm_bias_gelu_f16_n3072_k768` has no candidate t64x64x64_w2x2_s4000000000; it has t128x256x32_w2x4_s4, t128x192x32_w2x4_s4, t128x128x64_w2x2_s3, t128x64x64_w2x2_s4, t64x128x64_w2x2_s4, t64x64x64_w2x2_s4, t32x64x64_w1x4_s4, t16x64x64_w1x4_s5, t16x32x64_w1x2_s5");
    assert_snapshot!(refusal("MhaShort(max_len: 64)", "MhaShort(max_len: 65)"), @"`mha_f16_h12x64_qkv2304` has no candidate mha_short_l65; it has mha_short_l32, mha_short_l64, mha_short_l128, mha_short_l256, mha_online, mha_grouped");
    let unknown = refusal("MhaOnline", "MhaGuessed").to_string();
    assert_snapshot!(unknown.split(", expected").next().unwrap(), @"they do not read as picks: 31:39-31:49: Unexpected variant named `MhaGuessed` in enum `Choice`");
    let of_other_kind = changed(
        "MhaOnline",
        "Tile((m:1,n:1,k:1,warps_m:1,warps_n:1,stages:1))",
    );
    assert_snapshot!(of_other_kind.unwrap().ranges(&attention(64)).unwrap_err(), @"`mha_f16_h12x64_qkv2304` has no candidate t1x1x1_w1x1_s1; it has mha_short_l32, mha_short_l64, mha_short_l128, mha_short_l256, mha_online, mha_grouped");
}

#[test]
fn ranges_that_do_not_ascend_to_a_last_without_limit_are_refused() {
    let of = |ranges: &[(Option<u64>, usize)]| {
        let tiles = Tile::candidates(DType::F16);
        let ranges = ranges
            .iter()
            .map(|&(up_to, tile)| range(up_to, Choice::Tile(tiles[tile])))
            .collect();
        let mut picks = Picks::new(made());
        picks.problems.insert(gemm().key(), picked(ranges));
        let read = Picks::parse(picks.to_ron().unwrap().as_bytes());
        // Also where they were not read from a file.
        assert_eq!(picks.ranges(&gemm()).err(), read.clone().err());
        read.unwrap_err()
    };
    assert_snapshot!(of(&[]), @"`gemm_bias_gelu_f16_n3072_k768` has no ranges");
    assert_snapshot!(of(&[(Some(9), 1), (Some(8), 0), (None, 2)]), @"`gemm_bias_gelu_f16_n3072_k768` has a range up to 8 after one up to 9; limits ascend");
    assert_snapshot!(of(&[(Some(9), 1), (Some(9), 0), (None, 2)]), @"`gemm_bias_gelu_f16_n3072_k768` has a range up to 9 after one up to 9; limits ascend");
    assert_snapshot!(of(&[(None, 1), (None, 0)]), @"`gemm_bias_gelu_f16_n3072_k768` has a range without a limit before its last");
    assert_snapshot!(of(&[(Some(9), 1)]), @"the last range of `gemm_bias_gelu_f16_n3072_k768` ends at 9; the last has no limit");
    let many: Vec<_> = (0..256).map(|i| (Some(i), 0)).chain([(None, 1)]).collect();
    assert_snapshot!(of(&many), @"the number of ranges of `gemm_bias_gelu_f16_n3072_k768` is 257, expected at most 256");
}

#[test]
fn a_short_kernel_is_not_picked_for_sequences_that_it_cannot_take() {
    let max_len = MhaShort::max_len_for(64, DType::F16).into();
    let of = |ranges: Vec<Range>| {
        let mut picks = Picks::new(made());
        picks.problems.insert(attention(64).key(), picked(ranges));
        picks.ranges(&attention(64)).map(drop)
    };
    let short = Choice::MhaShort { max_len: 64 };
    let online = range(None, Choice::MhaOnline);
    assert_eq!(of(vec![range(Some(64), short), online]), Ok(()));
    assert_snapshot!(of(vec![range(Some(65), short), online]).unwrap_err(), @"`mha_f16_h12x64_qkv2304` has mha_short_l64 for more than it serves: 65, at most 64");
    assert_snapshot!(of(vec![range(Some(max_len), Choice::MhaOnline), range(None, short)]).unwrap_err(), @"`mha_f16_h12x64_qkv2304` has mha_short_l64 for more than it serves: any, at most 64");
}

#[test]
fn names_and_numbers_that_no_tuner_writes_are_refused() {
    assert_snapshot!(refusal("NVIDIA H200", ""), @"the name of their card is ``, expected 1 to 256 bytes without control characters");
    assert_snapshot!(refusal("NVIDIA H200", "a\\u{1b}[2Jb"), @"the name of their card is `a�[2Jb`, expected 1 to 256 bytes without control characters");
    assert_snapshot!(refusal("NVIDIA H200", &"x".repeat(300)), @"the name of their card is `xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…`, expected 1 to 256 bytes without control characters");
    assert_snapshot!(refusal("us: 3.25", "us: -3.25"), @"a time of `gemm_bias_gelu_f16_n3072_k768` is -3.25 µs, expected a number above 0");
    assert_snapshot!(refusal("us: 3.25", "us: NaN"), @"a time of `gemm_bias_gelu_f16_n3072_k768` is NaN µs, expected a number above 0");
    assert_snapshot!(refusal("size: 8192", "size: 16"), @"a size of `gemm_bias_gelu_f16_n3072_k768` is 16 after 16, expected ascending sizes");
    assert_snapshot!(refusal("mha_f16_h12x64_qkv2304", "gemm_bias_gelu_f16_n3072_k768"), @"a problem is `gemm_bias_gelu_f16_n3072_k768` for the second time, expected each once");
}

/// What a mutation writes.
const PIECES: [&str; 14] = [
    "(",
    ")",
    "[",
    "]",
    "{",
    "\"",
    "//",
    "/*",
    "Some(",
    "-1",
    "99999999999999999999",
    "1e400",
    "r#\"",
    "\u{0}",
];

proptest! {
    #![proptest_config(Config { cases: 2000, failure_persistence: None, ..Config::default() })]

    #[test]
    fn whatever_is_read_is_sound(
        edits in prop::collection::vec((any::<usize>(), 0..40usize, any::<usize>(), 0..3u8), 1..6),
        summed in any::<bool>(),
    ) {
        let mut text: Vec<char> = text().chars().collect();
        if !summed {
            let lines = text.split(|&c| c == '\n').map(<[char]>::to_vec);
            let kept = lines.filter(|l| !l.iter().collect::<String>().contains("checksum"));
            text = kept.collect::<Vec<_>>().join(&'\n');
        }
        for (at, len, other, kind) in edits {
            let at = at % text.len().max(1);
            let end = (at + len).min(text.len());
            match kind {
                0 => { text.splice(at..at, PIECES[other % PIECES.len()].chars()); }
                1 => { text.drain(at..end); }
                _ => {
                    let piece = text[at..end].to_vec();
                    let to = other % text.len().max(1);
                    text.splice(to..to, piece);
                }
            }
        }
        let text: String = text.into_iter().collect();
        match Picks::parse(text.as_bytes()) {
            Err(error) => prop_assert!(!error.to_string().is_empty()),
            Ok(picks) => {
                prop_assert_eq!(picks.check(), Ok(()));
                let again = Picks::parse(picks.to_ron().unwrap().as_bytes());
                prop_assert_eq!(again, Ok(picks.clone()));
                for problem in [gemm(), attention(64)] {
                    if let Ok(Some(ranges)) = picks.ranges(&problem) {
                        let candidates = problem.candidates();
                        prop_assert!(ranges.iter().all(|r| candidates.contains(&r.choice)));
                        prop_assert_eq!(ranges.last().unwrap().up_to, None);
                    }
                }
            }
        }
    }
}
