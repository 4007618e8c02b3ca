//! Formatting of a graph as text and as Graphviz source.

use std::fmt::{self, Write};

use super::{Graph, NodeId, Op};

impl Graph {
    /// Returns one line per value in topological order: `name = op(attributes) operands : shape`.
    /// Weights appear by name where they are read.
    pub fn text(&self) -> String {
        self.to_string()
    }

    /// Returns the graph as Graphviz source. Weights are nodes of the drawing only if `weights` is true.
    pub fn dot(&self, weights: bool) -> String {
        let mut out = String::from(
            "digraph model {\n  rankdir=TB;\n  node [shape=box, fontname=\"Helvetica\"];\n",
        );
        let shown = |id: NodeId| weights || !matches!(self.op(id), Op::Weight(_));
        for id in self.topological().into_iter().filter(|&id| shown(id)) {
            let node = self.node(id);
            let style = if node.op.is_compute() {
                ""
            } else {
                ", style=dashed"
            };
            // Writing to a String cannot fail.
            let _ = writeln!(
                out,
                "  \"{}\" [label=\"{}\\n{}\\n{}\"{style}];",
                node.name, node.op, node.name, node.shape
            );
            for operand in self.operands(id).into_iter().filter(|&o| shown(o)) {
                let _ = writeln!(
                    out,
                    "  \"{}\" -> \"{}\";",
                    self.node(operand).name,
                    node.name
                );
            }
        }
        for (name, id) in &self.outputs {
            let _ = writeln!(out, "  \"output {name}\" [shape=oval];");
            let _ = writeln!(out, "  \"{}\" -> \"output {name}\";", self.node(*id).name);
        }
        out.push_str("}\n");
        out
    }
}

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for id in self.topological() {
            let node = self.node(id);
            if matches!(node.op, Op::Weight(_)) {
                continue;
            }
            write!(f, "{} = {}", node.name, node.op)?;
            for operand in self.operands(id) {
                let source = self.node(operand);
                match &source.op {
                    Op::Weight(expr) if expr.stored().len() > 1 => {
                        let names: Vec<&str> = expr.stored().iter().map(|&(n, _)| n).collect();
                        write!(f, " [{}]", names.join("; "))?;
                    }
                    Op::Weight(_) => write!(f, " @{}", source.name)?,
                    _ => write!(f, " {}", source.name)?,
                }
            }
            writeln!(f, " : {}", node.shape)?;
        }
        for (name, id) in &self.outputs {
            writeln!(f, "output {name} = {}", self.node(*id).name)?;
        }
        Ok(())
    }
}
