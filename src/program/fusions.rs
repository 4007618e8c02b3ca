//! The nodes that each launch computes, with the rule that fused them, and the rules that were refused.

/// Name of a rule that computes several nodes in one launch, and the equation that its kernels compute.
pub type RuleName = (&'static str, &'static str);

/// The nodes that a launch computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The rule that chose the launch; `None` if a single operator is lowered without a rule.
    pub rule: Option<RuleName>,
    /// The operator of each node, with the name of the node's value.
    pub nodes: Vec<String>,
}

/// A rule that does not apply although its pattern was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    pub rule: &'static str,
    /// Name of the value where the pattern was found.
    pub at: String,
    pub because: String,
}

/// All decisions about launches for one batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fusions {
    /// The nodes of each step of the program.
    pub origins: Vec<Origin>,
    pub refused: Vec<Refused>,
}
