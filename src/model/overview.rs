//! Overview of a description for the documentation: its tasks, and the keys of config.json that select or restrict what is computed.

use serde_json::Value;

use super::{
    Description, EMBEDDING, SPARSE,
    modules::{NEXT_LOGITS, STATES, TOKEN_LOGITS as MASK_LOGITS},
    syntax::{Origin, Requirement, Statement, Test, When},
};

/// Suffixes of the class names in `architectures`, with the tasks of these classes.
const HEADS: [(&str, &str); 3] = [
    ("ForSequenceClassification", "classes and scores"),
    ("ForTokenClassification", "token classes"),
    ("ForQuestionAnswering", "questions"),
];

impl Description {
    /// Returns the tasks of the description, which follow from its outputs and architectures.
    pub fn tasks(&self) -> Vec<&'static str> {
        let outputs = self.output_names();
        let generation = match self.ast.parts.len() {
            1 => "generation",
            _ => "generation from a source",
        };
        let of_outputs = [
            (NEXT_LOGITS, generation),
            (STATES, "embeddings"),
            (EMBEDDING, "embeddings"),
            (SPARSE, "sparse embeddings"),
            (MASK_LOGITS, "masks"),
        ];
        let of_outputs = of_outputs
            .into_iter()
            .filter(|(output, _)| outputs.contains(output));
        let architectures = &self.ast.architectures;
        let of_heads = HEADS.into_iter().filter(|(end, _)| {
            let mut classes = architectures.iter();
            classes.any(|(class, _)| class.ends_with(end))
        });
        let mut tasks: Vec<&str> = of_outputs.chain(of_heads).map(|(_, task)| task).collect();
        tasks.dedup();
        tasks
    }

    /// Returns the keys of config.json that select what is computed, in the order of the file: the keys of activation
    /// functions and of `When` statements. Sizes are not included.
    pub fn options(&self) -> Vec<String> {
        let mut keys = Vec::new();
        let mut add = |key: &str| {
            if key != "model_type" && !keys.iter().any(|known| known == key) {
                keys.push(key.to_owned());
            }
        };
        let origins = self.ast.activations.iter().flat_map(|one| &one.origins);
        for origin in origins {
            match &origin.value {
                Origin::Key(key) => add(key),
                Origin::Length(_) | Origin::Expr(_) | Origin::Word(_) => {}
            }
        }
        for part in &self.ast.parts {
            choices(&part.body, &mut |when| {
                if let Test::Key { key, .. } = &when.test {
                    let spelled = self.file.text().get(key.span.clone());
                    add(spelled.unwrap_or_default().trim_matches('"'));
                }
            });
        }
        keys
    }

    /// Returns the keys of config.json that must have certain values, each with the values that are accepted.
    pub fn requirements(&self) -> Vec<String> {
        self.ast.requirements.iter().map(in_words).collect()
    }
}

/// Calls `see` with each `When` among the statements, including nested ones.
fn choices(statements: &[Statement], see: &mut impl FnMut(&When)) {
    for statement in statements {
        match statement {
            Statement::Let { .. } => {}
            Statement::Repeat(repeat) => choices(&repeat.body, see),
            Statement::When(when) => {
                see(when);
                choices(&when.body, see);
                choices(&when.otherwise, see);
            }
        }
    }
}

fn in_words(requirement: &Requirement) -> String {
    let listed = |values: &[Value]| {
        let values = values.iter().map(|value| format!("`{value}`"));
        values.collect::<Vec<_>>().join(" or ")
    };
    let mut text = format!(
        "`{}` other than {}",
        requirement.key.value,
        listed(&requirement.is)
    );
    if let Some((key, values)) = &requirement.only {
        text += &format!(" if `{}` is {}", key.value, listed(values));
    }
    if let Some(outputs) = &requirement.outputs {
        let outputs = outputs.iter().map(|output| format!("`{}`", output.value));
        text += &format!(" for {}", outputs.collect::<Vec<_>>().join(", "));
    }
    text
}
