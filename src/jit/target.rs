//! The architectures that code is generated for.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::machine::Instructions;

/// A code generation target, named like the values of NVRTC's `--gpu-architecture`.
///
/// The variants are ordered from the oldest to the newest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Target {
    /// A100 and others of capability 8.0 to 8.5; the baseline with `mma.sync` and `cp.async`.
    #[serde(rename = "sm_80")]
    Sm80,
    /// A10, A40, RTX 30 and Orin: capability 8.6 to 8.8.
    #[serde(rename = "sm_86")]
    Sm86,
    /// L4, L40 and RTX 40: capability 8.9.
    #[serde(rename = "sm_89")]
    Sm89,
    /// H100 and H200, with the instructions that are specific to capability 9.0 (`wgmma`,
    /// `setmaxnreg`).
    #[serde(rename = "sm_90a")]
    Sm90a,
    /// B100 and B200, with the instructions that are specific to capability 10.0 (`tcgen05`).
    #[serde(rename = "sm_100a")]
    Sm100a,
    /// RTX 50 and RTX PRO Blackwell: capability 12.x.
    #[serde(rename = "sm_120")]
    Sm120,
}

/// Error for a card that no target supports, or for an unknown target name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// The card is older than all targets.
    #[error(
        "the card has compute capability {major}.{minor}; gemmule needs 8.0 (A100, RTX 30) or \
         newer, because its kernels use the tensor cores through `mma.sync` with f16 and bf16, and \
         `cp.async`. The CPU executor runs without the card"
    )]
    CardTooOld {
        /// Major number of the card's compute capability.
        major: u32,
        /// Minor number.
        minor: u32,
    },

    /// No target generates code for the card's generation or variant.
    #[error(
        "no target runs on a card of compute capability {major}.{minor}; the targets are {}, and \
         code for one generation does not run on another. The CPU executor runs without the card",
        Target::names()
    )]
    NoTargetForCard {
        /// Major number of the card's compute capability.
        major: u32,
        /// Minor number.
        minor: u32,
    },

    /// A name that is not a target.
    #[error("`{name}` is not a target; the targets are {}", Target::names())]
    UnknownTarget {
        /// The name.
        name: String,
    },
}

impl Target {
    /// Every target, oldest first.
    pub const ALL: [Target; 6] = [
        Target::Sm80,
        Target::Sm86,
        Target::Sm89,
        Target::Sm90a,
        Target::Sm100a,
        Target::Sm120,
    ];

    /// Returns whether the target supports `instructions`.
    pub fn has(self, instructions: Instructions) -> bool {
        self.instructions().includes(instructions)
    }

    /// Returns the newest instruction set that kernels for the target may use.
    pub fn instructions(self) -> Instructions {
        match self {
            Target::Sm80 | Target::Sm86 | Target::Sm100a => Instructions::Ampere,
            Target::Sm89 | Target::Sm120 => Instructions::Ada,
            Target::Sm90a => Instructions::Hopper,
        }
    }

    /// Returns the target whose code runs best on a card of this compute capability.
    ///
    /// A cubin runs on cards with the same major number and an equal or higher minor number. A cubin for a target with the suffix `a` runs
    /// only on cards of exactly that capability (CUDA C++ Programming Guide, "Binary Compatibility" and "Architecture-Specific Features").
    ///
    /// # Errors
    /// Returns [`TargetError::CardTooOld`] below 8.0, and [`TargetError::NoTargetForCard`] if no target fits the card.
    pub fn for_capability(major: u32, minor: u32) -> Result<Target, TargetError> {
        match (major, minor) {
            (0..=7, _) => Err(TargetError::CardTooOld { major, minor }),
            (8, 0..=5) => Ok(Target::Sm80),
            (8, 6..=8) => Ok(Target::Sm86),
            (8, _) => Ok(Target::Sm89),
            (9, 0) => Ok(Target::Sm90a),
            (10, 0) => Ok(Target::Sm100a),
            (12, _) => Ok(Target::Sm120),
            _ => Err(TargetError::NoTargetForCard { major, minor }),
        }
    }

    /// Returns the compute capability that the target's code is generated for.
    pub fn capability(self) -> (u32, u32) {
        match self {
            Target::Sm80 => (8, 0),
            Target::Sm86 => (8, 6),
            Target::Sm89 => (8, 9),
            Target::Sm90a => (9, 0),
            Target::Sm100a => (10, 0),
            Target::Sm120 => (12, 0),
        }
    }

    /// Returns whether a kernel for the target may be launched before the previous kernel ends (programmatic dependent launch). Such a
    /// kernel waits on the device for the previous one (`templates/partials/dependent.cu`).
    pub fn has_dependent_launch(self) -> bool {
        self >= Target::Sm90a
    }

    /// Returns the name, such as `sm_90a`.
    pub fn name(self) -> &'static str {
        match self {
            Target::Sm80 => "sm_80",
            Target::Sm86 => "sm_86",
            Target::Sm89 => "sm_89",
            Target::Sm90a => "sm_90a",
            Target::Sm100a => "sm_100a",
            Target::Sm120 => "sm_120",
        }
    }

    /// Returns the maximum shared memory of a block in bytes, static and dynamic together, for kernels that opt in to more than 48 KiB
    /// (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
    pub fn max_shared_bytes(self) -> usize {
        match self {
            Target::Sm80 => 163 * 1024,
            Target::Sm86 | Target::Sm89 | Target::Sm120 => 99 * 1024,
            Target::Sm90a | Target::Sm100a => 227 * 1024,
        }
    }

    /// Returns the target's number in NVRTC's list of supported architectures.
    pub(super) fn arch_number(self) -> i32 {
        match self {
            Target::Sm80 => 80,
            Target::Sm86 => 86,
            Target::Sm89 => 89,
            Target::Sm90a => 90,
            Target::Sm100a => 100,
            Target::Sm120 => 120,
        }
    }

    /// Returns the first version of NVRTC, (major, minor), that compiles for this target. NVRTC's own list of architectures is not
    /// sufficient, because it does not distinguish `sm_90` (since 11.8) from `sm_90a` (since 12.0).
    pub(super) fn first_nvrtc(self) -> (i32, i32) {
        match self {
            Target::Sm80 => (11, 0),
            Target::Sm86 => (11, 1),
            Target::Sm89 => (11, 8),
            Target::Sm90a => (12, 0),
            Target::Sm100a | Target::Sm120 => (12, 8),
        }
    }

    /// Returns all names joined into one line, for messages.
    pub(super) fn names() -> String {
        Target::ALL.map(Target::name).join(", ")
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Target {
    type Err = TargetError;

    fn from_str(name: &str) -> Result<Target, TargetError> {
        Target::ALL
            .into_iter()
            .find(|target| target.name() == name)
            .ok_or_else(|| TargetError::UnknownTarget {
                name: name.to_owned(),
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_reads_back_from_its_name() {
        for target in Target::ALL {
            assert_eq!(target.to_string().parse::<Target>().unwrap(), target);
            let json = serde_json::to_string(&target).unwrap();
            assert_eq!(json, format!("\"{target}\""));
            assert_eq!(serde_json::from_str::<Target>(&json).unwrap(), target);
        }
    }

    #[test]
    fn a_card_gets_the_nearest_target_that_runs_on_it() {
        let picks = [
            ((8, 0), "sm_80"),
            ((8, 6), "sm_86"),
            ((8, 7), "sm_86"),
            ((8, 9), "sm_89"),
            ((9, 0), "sm_90a"),
            ((10, 0), "sm_100a"),
            ((12, 0), "sm_120"),
            ((12, 1), "sm_120"),
        ];
        for ((major, minor), name) in picks {
            assert_eq!(Target::for_capability(major, minor).unwrap().name(), name);
        }
    }

    #[test]
    fn a_card_older_than_8_0_is_rejected() {
        insta::assert_snapshot!(
            Target::for_capability(7, 5).unwrap_err(),
            @"the card has compute capability 7.5; gemmule needs 8.0 (A100, RTX 30) or newer, because its kernels use the tensor cores through `mma.sync` with f16 and bf16, and `cp.async`. The CPU executor runs without the card"
        );
        assert!(matches!(
            Target::for_capability(0, 0),
            Err(TargetError::CardTooOld { major: 0, minor: 0 })
        ));
    }

    #[test]
    fn a_card_without_a_target_is_rejected() {
        for (major, minor) in [(9, 1), (10, 3), (11, 0), (13, 0), (u32::MAX, u32::MAX)] {
            assert!(matches!(
                Target::for_capability(major, minor),
                Err(TargetError::NoTargetForCard { .. })
            ));
        }
        insta::assert_snapshot!(
            Target::for_capability(10, 3).unwrap_err(),
            @"no target runs on a card of compute capability 10.3; the targets are sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120, and code for one generation does not run on another. The CPU executor runs without the card"
        );
    }

    #[test]
    fn an_unknown_target_lists_the_known_ones() {
        insta::assert_snapshot!(
            "sm_90".parse::<Target>().unwrap_err(),
            @"`sm_90` is not a target; the targets are sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120"
        );
    }

    #[test]
    fn a_target_has_the_instructions_of_its_cards_and_all_older_sets() {
        use Instructions::{Ada, Ampere, Hopper};
        for machine in crate::machine::Machine::all().unwrap() {
            let (major, minor) = machine.capability;
            let target = Target::for_capability(major, minor).unwrap();
            assert_eq!(target.instructions(), machine.instructions, "{target}");
        }
        let has = |needed| Target::ALL.map(|target| target.has(needed));
        assert_eq!(has(Ampere), [true; 6]);
        assert_eq!(has(Ada), [false, false, true, true, false, true]);
        assert_eq!(has(Hopper), [false, false, false, true, false, false]);
    }

    #[test]
    fn shared_memory_limits_are_those_of_the_programming_guide() {
        let limits = Target::ALL.map(Target::max_shared_bytes);
        assert_eq!(limits, [166912, 101376, 101376, 232448, 232448, 101376]);
    }
}
